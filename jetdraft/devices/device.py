"""Profiles of devices, read from `profiles/*.toml`; every figure has its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jetdraft.errors import DeviceError, OptionError
from jetdraft.recipe import Recipe

FOLDER = Path(__file__).with_name("profiles")
QUANTIZATIONS = {"none", "int8", "int4", "fp8", "fp4"}


@dataclass(frozen=True)
class PowerMode:
    """Rates in one power mode: GB/s, MHz, and dense fp16 TFLOPS."""

    name: str
    watts: float
    bandwidth_gbs: float
    gpu_mhz: float
    fp16_tflops: float
    source: str


@dataclass(frozen=True)
class JetPack:
    """Versions that belong together."""

    version: str
    l4t: str
    cuda: str
    tensorrt: str
    python: str


@dataclass(frozen=True)
class Device:
    """What a board is and can do.

    `boards` are the part numbers in its device tree, `quantizations` those its GPU has
    arithmetic for. The first power mode is the one without "Super". `recipe` is how
    its models are quantized where a text calibrates them.

        Device.named("orin-nx-16gb").power_mode().bandwidth_gbs
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
        """The profiles there are."""
        return sorted(file.stem for file in FOLDER.glob("*.toml"))

    @classmethod
    def named(cls, name: str) -> Device:
        """A profile; raises `DeviceError` if there is none."""
        if name not in cls.names():
            raise DeviceError(
                f"unknown device {name!r}; choose {', '.join(cls.names())}"
            )
        return cls.read(FOLDER / f"{name}.toml")

    @classmethod
    def read(cls, file: Path) -> Device:
        """Read a profile file; raises `DeviceError` if it is none."""
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8"))
            modes = tuple(_typed(PowerMode, mode) for mode in found.pop("power_modes"))
            packs = tuple(_typed(JetPack, pack) for pack in found.pop("jetpacks"))
            lists = {name: tuple(found[name]) for name in ("boards", "quantizations")}
            if odd := set(lists["quantizations"]) - QUANTIZATIONS:
                raise ValueError(f"unknown quantization {odd.pop()!r}")
            Recipe.parse(str(found["recipe"]))
            given = {**found, **lists, "power_modes": modes, "jetpacks": packs}
            device: Device = _typed(cls, {"name": file.stem, **given})
            return device
        except OSError as error:
            raise DeviceError(f"cannot read {file} ({error.strerror})") from error
        except KeyError as error:
            raise DeviceError(
                f"{file} is no device profile ({error} is missing); compare with those "
                f"in {FOLDER}"
            ) from error
        except (ValueError, TypeError, AttributeError, OptionError) as error:
            raise DeviceError(
                f"{file} is no device profile ({error}); compare with those in {FOLDER}"
            ) from error

    def power_mode(self, name: str | None = None) -> PowerMode:
        """A power mode, or the first; raises `DeviceError` if unknown."""
        if name is None:
            return self.power_modes[0]
        for mode in self.power_modes:
            if mode.name == name:
                return mode
        known = ", ".join(mode.name for mode in self.power_modes)
        raise DeviceError(f"{self.name} has no power mode {name!r}; choose {known}")


def _typed(kind: Any, given: Mapping[str, Any]) -> Any:
    """A dataclass from a table of exactly its fields."""
    wanted = {field.name: field.type for field in fields(kind)}
    if given.keys() != wanted.keys():
        odd = ", ".join(sorted(given.keys() ^ wanted.keys()))
        raise ValueError(f"missing or unknown: {odd}")
    for name, kind_name in wanted.items():
        number = kind_name in ("float", "int")
        if number and not (_is_number(given[name]) and given[name] > 0):
            raise ValueError(f"{name} must be a positive number")
        if kind_name == "str" and not isinstance(given[name], str):
            raise ValueError(f"{name} must be a text")
    return kind(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
