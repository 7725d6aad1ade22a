import mmap
import platform
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jetdraft.cli.doctor import examine
from jetdraft.devices import memory
from jetdraft.devices.cost_model import FITTED
from jetdraft.devices.detection import Meter, detect_machine, module_rails, rails
from jetdraft.devices.device import PROFILES_FOLDER, Device
from jetdraft.devices.memory import HUGE_PAGE, release_files, use_huge_pages
from jetdraft.errors import DeviceError
from jetdraft.recipe import Recipe
from tests import cases
from tests.devices.trees import ORIN_NANO, POWER, RAILS, THOR, write
from tests.programs import ended, succeed


def test_an_orin_nano(tmp_path):
    odd = {"usr/lib/aarch64-linux-gnu/libnvinfer.so.10.3.0.bak": ""}
    machine = detect_machine(write(tmp_path, ORIN_NANO | odd))
    board = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert machine.board == machine.gpu == board
    assert machine.device == Device.named("orin-nano-8gb")
    assert (machine.l4t, machine.jetpack.version) == ("36.4.3", "6.2")
    versions = machine.cuda, machine.tensorrt, machine.power_mode
    assert versions == ("12.6.68", "10.3.0", "25W")
    assert machine.memory_mb == pytest.approx(7990.17, abs=0.01)
    assert machine.available_mb < machine.memory_mb
    assert machine.swap_mb > 3900
    assert (machine.gpu_mhz, machine.gpu_max_mhz) == (306, 1020)


def test_a_thor_with_fewer_files(tmp_path):
    machine = detect_machine(write(tmp_path, THOR))
    assert machine.device == Device.named("agx-thor")
    assert machine.jetpack.version == "7.2"
    assert {machine.cuda, machine.power_mode, machine.gpu_mhz} == {None}


def test_a_raspberry_pi_needs_no_driver(tmp_path):
    board = "Raspberry Pi 5 Model B Rev 1.0"
    names = "raspberrypi,5-model-b\0brcm,bcm2712\0"
    files = {"model": f"{board}\0", "compatible": names}
    tree = {f"proc/device-tree/{name}": text for name, text in files.items()}
    assert detect_machine(write(tmp_path, tree)).device.name == "raspberry-pi-5-8gb"
    findings = {finding.what: finding for finding in examine(tmp_path)}
    assert findings["board"].found == f"{board} (raspberry-pi-5-8gb)"
    assert not findings.keys() & {"driver", "cuda", "tensorrt"}
    shown = succeed("doctor", "--device", "raspberry-pi-5-8gb").stdout
    assert "watts 25, bandwidth_gbs 17.1, source " in shown
    assert "gpu" not in shown


def test_no_files_at_all(tmp_path):
    facts = vars(detect_machine(tmp_path))
    assert facts.pop("has_gpu") is False
    assert set(facts.values()) == {None}
    assert detect_machine().memory_mb > 100, "this machine has files"


@cases(
    "name, text, field",
    ("usr/local/cuda/version.json", "{", "cuda"),
    ("usr/local/cuda/version.json", '{"cuda": 5}', "cuda"),
    ("etc/nv_tegra_release", "garbage", "l4t"),
    ("var/lib/nvpmodel/status", "pmode:9", "power_mode"),
    ("proc/device-tree/compatible", "nvidia,p9999-0000", "device"),
    ("proc/device-tree/model", "\0", "board"),
    ("sys/class/devfreq/17000000.gpu/cur_freq", "?", "gpu_mhz"),
)
def test_files_that_say_something_else(tmp_path, name, text, field):
    root = write(tmp_path, {**ORIN_NANO, name: text})
    assert getattr(detect_machine(root), field) is None


JETPACKS = {"4.0": None, "4.3": "6.2", "4.4": "6.2", "40.1": None, "5.0": None}


@pytest.mark.parametrize(("revision", "jetpack"), JETPACKS.items())
def test_patches_belong_to_their_release(tmp_path, revision, jetpack):
    release = f"# R36 (release), REVISION: {revision}, GCID: 1"
    tree = {**ORIN_NANO, "etc/nv_tegra_release": release}
    machine = detect_machine(write(tmp_path, tree))
    assert machine.l4t == f"36.{revision}"
    assert (machine.jetpack.version if machine.jetpack else None) == jetpack


def test_a_gpu_is_named_with_its_driver(tmp_path):
    tree = {
        "proc/driver/nvidia/gpus/0000:19:00.0/information": "Model: \t\t NVIDIA H200\n"
        "IRQ:   40\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "
        "580.65.06  Sun Jul 27\nGCC version: 13\n",
    }
    assert detect_machine(write(tmp_path, tree)).gpu == "NVIDIA H200, driver 580.65.06"


def test_rails_have_volts_and_amperes_and_one_feeds_the_module(tmp_path):
    root = write(tmp_path, POWER)
    measured = rails(root)
    assert [rail.name for rail in measured] == ["VDD_IN", "VDD_CPU_GPU_CV"]
    assert [rail.watts() for rail in measured] == [pytest.approx(10), pytest.approx(4)]
    assert [rail.name for rail in module_rails(root)] == ["VDD_IN"]
    (root / RAILS / "in1_label").write_text("VDD_GPU_SOC\n")
    assert len(module_rails(root)) == 2


def test_energy_is_power_times_time(tmp_path):
    with Meter(write(tmp_path, POWER), interval=0.01) as meter:
        start = time.perf_counter()
        time.sleep(0.2)
        took = time.perf_counter() - start
    assert meter.joules == pytest.approx(10 * took, rel=0.2)


@pytest.mark.parametrize("files", [{}, {**POWER, f"{RAILS}/curr1_input": "?"}])
def test_without_a_rail_that_can_be_read_there_is_no_figure(tmp_path, files):
    with Meter(write(tmp_path, files), interval=0.01) as meter:
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_mapped_files_leave_memory_and_come_back(tmp_path):
    size = 1 << 20
    arrays = {}
    for folder, mode in (("own", "r"), ("written", "c"), ("other", "r")):
        file = tmp_path / folder / "weights"
        file.parent.mkdir()
        file.write_bytes(bytes(range(256)) * (size // 256))
        arrays[folder] = np.memmap(file, np.uint8, mode)
        assert arrays[folder].sum() == size * 255 // 2
    arrays["written"][5] = 77
    assert release_files(tmp_path / "own") >= size
    assert release_files(tmp_path / "own") == 0
    assert release_files(tmp_path / "written") == 0
    assert arrays["written"][5] == 77
    assert arrays["own"].sum() == size * 255 // 2
    assert release_files(tmp_path / "other") >= size


def test_without_proc_nothing_happens(tmp_path, monkeypatch):
    """A sandbox may hide the files; loading a bundle must not fail for it."""
    monkeypatch.setattr(memory, "_read_text", lambda file: "")
    assert release_files(tmp_path) == use_huge_pages() == 0


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COLLAPSES = (
    HUGE_PAGES.is_file()
    and "[never]" not in HUGE_PAGES.read_text()
    and tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 1)
)


@pytest.mark.skipif(not COLLAPSES, reason="Linux 6.1 can move memory to huge pages")
def test_filled_memory_goes_to_huge_pages_and_keeps_its_bytes():
    """In a process of its own: the memory of other tests would count too."""
    process = ended(sys.executable, "-c", f"import {__name__} as t; t.gather()")
    assert process.returncode == 0, process.stderr


def gather() -> None:
    size = 16 * HUGE_PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    filled, empty = (mmap.mmap(-1, size, flags=private) for _ in range(2))
    filled[:] = bytes(range(256)) * (size // 256)
    empty[:10] = b"0123456789"
    resident = _resident()
    assert use_huge_pages() >= size - 2 * HUGE_PAGE
    assert _resident() - resident < size // 2  # the empty one stays empty
    assert filled[:] == bytes(range(256)) * (size // 256)
    assert empty[:12] == b"0123456789\0\0"
    assert use_huge_pages() < size // 2


def _resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


ALL = [
    *("agx-orin-32gb", "agx-orin-64gb", "agx-thor", "dgx-spark", "laptop-16gb"),
    *("n100-16gb", "orin-nano-4gb", "orin-nano-8gb", "orin-nx-16gb", "orin-nx-8gb"),
    *("raspberry-pi-5-8gb", "thor-t4000"),
]
# The dense fp16 operations of a multiprocessor in a clock, by compute capability.
OPERATIONS = {"8.7": 2048, "11.0": 8192, "12.1": 1024}


def test_every_device_has_a_profile_and_every_part_number_a_device():
    assert Device.names() == ALL
    boards = [board for name in ALL for board in Device.named(name).boards]
    assert len(boards) == len(set(boards))


@pytest.mark.parametrize("name", ALL)
def test_profiles_are_whole(name):
    device = Device.named(name)
    assert device.power_modes
    has_gpu = bool(device.compute_capability)
    assert bool(device.jetpacks) == ("Jetson" in device.title)
    assert not has_gpu or device.compute_capability in FITTED
    assert Recipe.parse(device.recipe).name == device.recipe
    assert "docs/quantization.md" in device.recipe_evidence
    assert {"none", "int8", "int4"} <= set(device.quantizations)
    is_orin = device.compute_capability == "8.7"
    assert ("fp8" in device.quantizations) == (has_gpu and not is_orin)
    for mode in device.power_modes:
        assert mode.source
        rate = re.fullmatch(r"LP\w+-(\d+)|DDR\d-(\d+)", mode.name)
        if not has_gpu:  # memory of 4, 8 or 16 bytes
            width = mode.bandwidth_gbs * 1e3 / int(rate[1] or rate[2])
            assert min(abs(width - n) for n in (4, 8, 16)) < 0.01
        else:
            operations = OPERATIONS[device.compute_capability]
            peak = device.multiprocessors * operations * mode.gpu_mhz * 1e-6
            assert mode.fp16_tflops == pytest.approx(peak, rel=0.03)


def test_unknown_names(tmp_path):
    with pytest.raises(DeviceError, match="cannot read"):
        Device.read(tmp_path / "none.toml")
    with pytest.raises(DeviceError, match="unknown device 'orin'; choose agx-orin"):
        Device.named("orin")
    with pytest.raises(DeviceError, match="'7W'; choose 15W, 25W"):
        Device.named("orin-nano-8gb").power_mode("7W")


@cases(
    "old, new, match",
    ("memory_gb = 16", "memory_gb = -1", "memory_gb must be a positive number"),
    ("memory_gb = 16", 'memory_gb = "16"', "memory_gb must be a number"),
    ('recipe = "int4', 'recipe = "int3', "unknown quantization 'int3'"),
    ('["none"', '["int3"', r"quantizations\[0\] must be one of none, int8"),
    ("memory_gb = 16", "", "memory_gb is missing"),
    ("watts = 25", "watts = 25\nvolts = 5", r"power_modes\[0\].volts is unknown"),
    ("title =", "title", "not a device profile"),
)
def test_a_corrupt_profile(tmp_path, old, new, match):
    file = shutil.copy(PROFILES_FOLDER / "orin-nx-16gb.toml", tmp_path / "own.toml")
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(DeviceError, match=match):
        Device.read(file)
