import pytest

from jetdraft.devices.detection import detect_machine
from jetdraft.devices.device import Device
from tests.devices.trees import ORIN_NANO, THOR, write


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
    assert machine.cuda is None
    assert machine.power_mode is None
    assert machine.gpu_mhz is None


def test_no_files_at_all(tmp_path):
    facts = vars(detect_machine(tmp_path))
    assert facts.pop("has_gpu") is False
    assert set(facts.values()) == {None}
    assert detect_machine().memory_mb > 100, "this machine has files"


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("usr/local/cuda/version.json", "{", "cuda"),
        ("usr/local/cuda/version.json", '{"cuda": 5}', "cuda"),
        ("etc/nv_tegra_release", "garbage", "l4t"),
        ("var/lib/nvpmodel/status", "pmode:9", "power_mode"),
        ("proc/device-tree/compatible", "nvidia,p9999-0000", "device"),
        ("proc/device-tree/model", "\0", "board"),
        ("sys/class/devfreq/17000000.gpu/cur_freq", "?", "gpu_mhz"),
    ],
)
def test_files_that_say_something_else(tmp_path, name, text, field):
    root = write(tmp_path, {**ORIN_NANO, name: text})
    assert getattr(detect_machine(root), field) is None


@pytest.mark.parametrize(
    ("revision", "jetpack"),
    [("4.0", None), ("4.3", "6.2"), ("4.4", "6.2"), ("40.1", None), ("5.0", None)],
)
def test_patches_belong_to_their_release(tmp_path, revision, jetpack):
    release = f"# R36 (release), REVISION: {revision}, GCID: 1"
    machine = detect_machine(
        write(tmp_path, {**ORIN_NANO, "etc/nv_tegra_release": release})
    )
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
