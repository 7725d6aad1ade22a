import time

import pytest

from jetdraft.devices.rails import Meter, module_rails, rails
from tests.devices.trees import POWER, RAILS, write


def test_rails_have_volts_and_amperes(tmp_path):
    measured = rails(write(tmp_path, POWER))
    assert [rail.name for rail in measured] == ["VDD_IN", "VDD_CPU_GPU_CV"]
    assert [rail.watts() for rail in measured] == [pytest.approx(10), pytest.approx(4)]


def test_the_rail_that_feeds_the_module_is_its_power(tmp_path):
    root = write(tmp_path, POWER)
    assert [rail.name for rail in module_rails(root)] == ["VDD_IN"]
    (root / RAILS / "in1_label").write_text("VDD_GPU_SOC\n")
    assert len(module_rails(root)) == 2


def test_energy_is_power_times_time(tmp_path):
    with Meter(write(tmp_path, POWER), interval=0.01) as meter:
        start = time.perf_counter()
        time.sleep(0.2)
        took = time.perf_counter() - start
    assert meter.joules == pytest.approx(10 * took, rel=0.2)


def test_without_monitors_there_is_no_figure(tmp_path):
    with Meter(tmp_path) as meter:
        pass
    assert meter.joules is None


def test_a_rail_that_cannot_be_read_ends_the_measurement(tmp_path):
    root = write(tmp_path, {**POWER, f"{RAILS}/curr1_input": "?"})
    with Meter(root, interval=0.01) as meter:
        pass
    assert meter.joules is None


def test_a_rail_that_vanishes_midway_leaves_no_figure(tmp_path):
    root = write(tmp_path, POWER)
    with Meter(root, interval=0.01) as meter:
        time.sleep(0.05)
        assert meter.joules > 0
        (root / RAILS / "curr1_input").unlink()
        time.sleep(0.05)
    assert meter.joules is None
