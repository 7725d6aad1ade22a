"""The roofline's constants from published rows, and how far off it is without each."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.devices.device import Device, PowerMode
from jetdraft.devices.dimensions import Dimensions
from jetdraft.devices.roofline import BYTES, Efficiency, Load

FILE = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Row:
    """One published measurement: a model on a device, ms per pass of 1 and of `prompt`.

    `memory_mb` is None where it was not measured.
    """

    device: Device
    mode: PowerMode
    model: str
    load: Load
    prompt: int
    prefill_ms: float
    pass_ms: float
    memory_mb: float | None

    def predict_ms(self, efficiency: Efficiency, width: int = 1) -> float:
        """The same from the roofline; contexts are short, half of 128 new tokens."""
        capability, context = self.device.compute_capability, self.prompt + 64
        return self.load.pass_ms(width, context, self.mode, capability, efficiency)


def read(file: Path = FILE) -> tuple[list[Row], dict[str, Any]]:
    """The published rows, and the file itself."""
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    return [_row(given, found["models"]) for given in found["rows"]], found


def _row(given: dict[str, Any], models: dict[str, dict[str, Any]]) -> Row:
    # An embedding in half precision beside the head: two tensors even where tied.
    sizes = Dimensions.of({**models[given["model"]], "tie_word_embeddings": False})
    device = Device.named(given["device"])
    return Row(
        device,
        device.power_mode(given.get("power_mode")),
        given["model"],
        Load(sizes, BYTES["int4"], BYTES["none"]),
        given["prompt"],
        given["prefill_ms"],
        1e3 / given["tokens_per_second"],
        given.get("memory_mb"),
    )


def fit(rows: Sequence[Row]) -> Efficiency:
    """The constants with the least squares of relative errors.

        fit(read()[0]).bandwidth

    An architecture without any row gets no compute rate.
    """
    reading = [
        row.load.pass_bytes(row.prompt + 64) / row.mode.bandwidth_gbs / 1e6
        for row in rows
    ]
    columns = np.array([reading, np.ones(len(rows))]).T
    measured = np.array([row.pass_ms for row in rows])
    relative = columns / measured[:, None]
    (slow, pass_ms), *_ = np.linalg.lstsq(relative, np.ones(len(rows)), rcond=None)
    return Efficiency(1 / float(slow), float(pass_ms), _compute(rows))


def _compute(rows: Sequence[Row]) -> dict[str, float]:
    """Per architecture, the share of the rate that prefills reached: their median."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        capability = row.device.compute_capability
        full = Efficiency(1.0, 0.0, {capability: 1.0})
        least = row.load.row_ms(row.mode, capability, full)
        # Against what was measured of one row, so that its error is not counted twice.
        added = (row.prefill_ms - row.pass_ms) / (row.prompt - 1)
        shares.setdefault(capability, []).append(least / added)
    return {name: float(np.median(found)) for name, found in shares.items()}


@dataclass(frozen=True)
class Error:
    """How far a row's prediction is off, by constants fitted on the other rows.

    Relative, of the speed at width 1, of the time at width `prompt`, and of the memory.
    """

    row: Row
    speed: float
    prefill: float | None
    memory: float | None


def leave_one_out(rows: Sequence[Row], capacity: int) -> list[Error]:
    """Each row predicted without itself."""
    return [_error(row, [r for r in rows if r is not row], capacity) for row in rows]


def _error(row: Row, others: Sequence[Row], capacity: int) -> Error:
    known = fit(others)
    prefill = None
    if row.device.compute_capability in known.compute:
        prefill = row.predict_ms(known, row.prompt) / row.prefill_ms - 1
    memory = None
    if row.memory_mb is not None:
        mb = row.load.memory_mb(capacity) + runtime_mb(others, capacity)
        memory = mb / row.memory_mb - 1
    return Error(row, row.pass_ms / row.predict_ms(known) - 1, prefill, memory)


def runtime_mb(rows: Sequence[Row], capacity: int) -> float:
    """What is resident beside weights and KV: the median of the rows that say."""
    return float(
        np.median(
            [
                row.memory_mb - row.load.memory_mb(capacity)
                for row in rows
                if row.memory_mb is not None
            ]
        )
    )
