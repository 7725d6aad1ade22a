"""Command lines, one after the other in one process that finds packages: JSON."""

import json
import sys

from click.testing import CliRunner

from jetdraft.cli import main


def answer(line):
    result = CliRunner().invoke(main, line)
    return {name: getattr(result, name) for name in ("exit_code", "stdout", "stderr")}


print(json.dumps([answer(line) for line in json.loads(sys.argv[1])]))
