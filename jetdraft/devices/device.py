"""Profiles of devices, read from `profiles/*.toml`; every figure names its source."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from jetdraft.errors import DeviceError, OptionError, as_error, check_choice
from jetdraft.parsing import Rule, one_of, read_record
from jetdraft.recipe import Recipe

PROFILES_FOLDER = Path(__file__).with_name("profiles")  # The folder of the profiles.
# The number formats that a profile may name.
Quantization = Annotated[str, one_of("none", "int8", "int4", "fp8", "fp4")]
_POSITIVE = Rule("a positive number", lambda number: number > 0)
Count = Annotated[int, _POSITIVE]
Amount = Annotated[float, _POSITIVE]


@dataclass(frozen=True)
class PowerMode:
    """Rates in a power mode or with a kind of memory: GB/s, MHz, dense fp16 TFLOPS."""

    name: str
    watts: Amount
    bandwidth_gbs: Amount
    source: str
    gpu_mhz: Amount = 0.0
    fp16_tflops: Amount = 0.0


@dataclass(frozen=True)
class JetPack:
    """The versions of one JetPack release."""

    version: str
    l4t: str
    cuda: str
    tensorrt: str
    python: str


@dataclass(frozen=True)
class Device:
    """The profile of a board or a computer: its sizes, rates and versions.

    `boards` are names in its device tree; `quantizations` the formats that its
    GPU computes in. The first power mode is the default, not a "Super" mode. `recipe`
    is the default of an export with a calibration text, by `recipe_evidence`. Only the
    CPU is known without a `compute_capability`.
    """

    name: str
    title: str
    memory_gb: Amount
    quantizations: tuple[Quantization, ...]
    recipe: str
    recipe_evidence: str
    source: str
    power_modes: tuple[PowerMode, ...]
    boards: tuple[str, ...] = ()
    compute_capability: str = ""
    multiprocessors: Count = 0
    cuda_cores: Count = 0
    jetpacks: tuple[JetPack, ...] = ()

    @classmethod
    def names(cls) -> list[str]:
        return sorted(file.stem for file in PROFILES_FOLDER.glob("*.toml"))

    @classmethod
    def named(cls, name: str) -> "Device":
        """Read the profile of that name; raises `DeviceError` for an unknown name."""
        check_choice(DeviceError, "device", name, cls.names())
        return cls.read(PROFILES_FOLDER / f"{name}.toml")

    @classmethod
    def read(cls, file: Path) -> "Device":
        """Read a profile; raises `DeviceError` if the file is not a profile."""
        fact = f"{file} is not a device profile"
        fix = f"compare it with the others in {PROFILES_FOLDER}"
        with as_error(DeviceError, OSError, f"cannot read {file}", fix):
            text = file.read_bytes()
        with as_error(DeviceError, (ValueError, OptionError), fact, fix):
            table = tomllib.loads(text.decode("utf-8"))
            device: Device = read_record(cls, {"name": file.stem, **table})
            Recipe.parse(device.recipe)
            return device

    def power_mode(self, name: str | None = None) -> PowerMode:
        """A power mode by name, or the first; raises `DeviceError` if unknown."""
        modes = {mode.name: mode for mode in self.power_modes}
        name = self.power_modes[0].name if name is None else name
        check_choice(DeviceError, "power mode", name, modes)
        return modes[name]
