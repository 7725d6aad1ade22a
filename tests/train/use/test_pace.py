"""A training that waits."""

import pytest

from jetdraft.devices.rails import Rail
from jetdraft.errors import DeviceError
from jetdraft.train.use import learning as module
from jetdraft.train.use.learning import Pace
from tests.devices.trees import POWER, write
from tests.programs import python


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_what_follows_a_rest_is_not_counted(clock):
    pace, steps = Pace(seconds=3.0), 0
    while pace.wait_for_step():
        clock.now += 1.0
        pace.pause()
        clock.now += 100.0  # an export
        steps += 1
    assert steps == 3
    assert not pace.has_time
    assert Pace().wait_for_step()


def test_it_waits_while_the_board_is_hot(clock, tmp_path, monkeypatch):
    root = write(tmp_path, POWER)
    powers = iter([12.0, 11.0, 3.0])
    monkeypatch.setattr(Rail, "watts", lambda self: next(powers))
    pace = Pace(seconds=1.0, watts=10.0, root=root)
    assert pace.wait_for_step()
    assert clock.now == 2 * module.REST_SECONDS
    assert pace.spent == 0.0, "waiting is not training"


def test_a_machine_must_tell_its_power(tmp_path):
    with pytest.raises(DeviceError, match="no power monitors"):
        Pace(watts=10.0, root=tmp_path)


def test_idle_priority():
    # It ends at once: at this priority a busy machine clears up for a minute.
    code = (
        "import os; from jetdraft.train.use.learning import lower_priority;"
        "lower_priority();"
        "print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE, flush=True);"
        "os._exit(0)"
    )
    assert python(code) == "19 True\n"
