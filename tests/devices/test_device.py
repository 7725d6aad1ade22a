import shutil

import pytest

from jetdraft.devices.device import PROFILES_FOLDER, Device
from jetdraft.errors import DeviceError
from jetdraft.recipe import Recipe

ALL = [
    *("agx-orin-32gb", "agx-orin-64gb", "agx-thor", "orin-nano-4gb", "orin-nano-8gb"),
    *("orin-nx-16gb", "orin-nx-8gb", "thor-t4000"),
]


def test_every_device_has_a_profile_and_every_part_number_a_device():
    assert Device.names() == ALL
    boards = [board for name in ALL for board in Device.named(name).boards]
    assert len(boards) == len(set(boards))


@pytest.mark.parametrize("name", ALL)
def test_profiles_are_whole(name):
    device = Device.named(name)
    assert device.power_modes
    assert device.jetpacks
    assert Recipe.parse(device.recipe).name == device.recipe
    assert "docs/quantization.md" in device.recipe_evidence
    assert {"none", "int8", "int4"} <= set(device.quantizations)
    is_orin = device.compute_capability == "8.7"
    assert ("fp8" in device.quantizations) == (not is_orin)
    for mode in device.power_modes:
        assert mode.source
        if is_orin:
            # 4 tensor cores a multiprocessor, 512 operations a clock each.
            peak = device.multiprocessors * 4 * 512 * mode.gpu_mhz * 1e-6
            assert mode.fp16_tflops == pytest.approx(peak, rel=0.03)


def test_unknown_names():
    with pytest.raises(DeviceError, match="unknown device 'orin'; choose agx-orin"):
        Device.named("orin")
    with pytest.raises(DeviceError, match="no power mode '7W'; choose 15W, 25W"):
        Device.named("orin-nano-8gb").power_mode("7W")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("memory_gb = 16", "memory_gb = -1", "memory_gb must be a positive number"),
        ("memory_gb = 16", 'memory_gb = "16"', "memory_gb must be a number"),
        ('recipe = "int4', 'recipe = "int3', "unknown quantization 'int3'"),
        ('["none"', '["int3"', r"quantizations\[0\] must be one of none, int8"),
        ("memory_gb = 16", "", "memory_gb is missing"),
        ("watts = 25", "watts = 25\nvolts = 5", r"power_modes\[0\].volts is unknown"),
        ("title =", "title", "not a device profile"),
    ],
)
def test_a_corrupt_profile(tmp_path, old, new, match):
    file = shutil.copy(PROFILES_FOLDER / "orin-nx-16gb.toml", tmp_path / "own.toml")
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(DeviceError, match=match):
        Device.read(file)


def test_a_missing_profile(tmp_path):
    with pytest.raises(DeviceError, match="cannot read"):
        Device.read(tmp_path / "none.toml")
