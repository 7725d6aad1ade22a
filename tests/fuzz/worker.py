"""The process that `driver` watches: tests.fuzz.worker NAME FIRST COUNT LIGHT."""

import sys

from tests.fuzz.driver import work

if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
