"""Profiles of devices, read from `profiles/*.toml`; every figure names its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jetdraft.errors import DeviceError, OptionError
from jetdraft.recipe import Recipe

PROFILES_FOLDER = Path(__file__).with_name("profiles")
"""The folder of the profiles."""

QUANTIZATIONS = {"none", "int8", "int4", "fp8", "fp4"}
"""The number formats that a profile may name."""


@dataclass(frozen=True)
class PowerMode:
    """The rates of a device in one power mode: GB/s, MHz, and dense fp16 TFLOPS."""

    name: str
    watts: float
    bandwidth_gbs: float
    gpu_mhz: float
    fp16_tflops: float
    source: str


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
    """The profile of a board: its sizes, rates and versions.

    `boards` are the part numbers in its device tree; `quantizations` are the number
    formats that its GPU computes in. The first power mode is the default; it is not a
    "Super" mode. `recipe` is the default of an export with a calibration text, and
    `recipe_evidence` says why.
    """

    name: str
    title: str
    compute_capability: str
    memory_gb: float
    multiprocessors: int
    cuda_cores: int
    boards: tuple[str, ...]
    quantizations: tuple[str, ...]
    recipe: str
    recipe_evidence: str
    source: str
    power_modes: tuple[PowerMode, ...]
    jetpacks: tuple[JetPack, ...]

    @classmethod
    def names(cls) -> list[str]:
        """The names of all profiles, sorted."""
        return sorted(file.stem for file in PROFILES_FOLDER.glob("*.toml"))

    @classmethod
    def named(cls, name: str) -> Device:
        """Read the profile of that name; raises `DeviceError` for an unknown name."""
        if name not in cls.names():
            raise DeviceError(
                f"unknown device {name!r}; choose {', '.join(cls.names())}"
            )
        return cls.read(PROFILES_FOLDER / f"{name}.toml")

    @classmethod
    def read(cls, file: Path) -> Device:
        """Read a profile; raises `DeviceError` if the file is not a profile."""
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
            modes = tuple(_build(PowerMode, mode) for mode in table.pop("power_modes"))
            packs = tuple(_build(JetPack, pack) for pack in table.pop("jetpacks"))
            lists = {name: tuple(table[name]) for name in ("boards", "quantizations")}
            if unknown := set(lists["quantizations"]) - QUANTIZATIONS:
                raise ValueError(f"unknown quantization {unknown.pop()!r}")
            Recipe.parse(str(table["recipe"]))
            table |= {**lists, "power_modes": modes, "jetpacks": packs}
            device: Device = _build(cls, {"name": file.stem, **table})
            return device
        except OSError as error:
            raise DeviceError(f"cannot read {file} ({error.strerror})") from error
        except (
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            OptionError,
        ) as error:
            missing = " is missing" if isinstance(error, KeyError) else ""
            raise DeviceError(
                f"{file} is not a device profile ({error}{missing}); compare it with "
                f"the others in {PROFILES_FOLDER}"
            ) from error

    def power_mode(self, name: str | None = None) -> PowerMode:
        """A power mode by name, or the first; raises `DeviceError` if unknown."""
        if name is None:
            return self.power_modes[0]
        for mode in self.power_modes:
            if mode.name == name:
                return mode
        names = ", ".join(mode.name for mode in self.power_modes)
        raise DeviceError(f"{self.name} has no power mode {name!r}; choose {names}")


def _build(kind: Any, table: Mapping[str, Any]) -> Any:
    """Build the dataclass `kind` from a table that has exactly its fields."""
    types = {field.name: field.type for field in fields(kind)}
    if table.keys() != types.keys():
        names = ", ".join(sorted(table.keys() ^ types.keys()))
        raise ValueError(f"missing or unknown: {names}")
    for name, type_name in types.items():
        value = table[name]
        is_number = type(value) in (int, float) and value > 0
        if type_name in ("float", "int") and not is_number:
            raise ValueError(f"{name} must be a positive number")
        if type_name == "str" and not isinstance(value, str):
            raise ValueError(f"{name} must be a text")
    return kind(**table)
