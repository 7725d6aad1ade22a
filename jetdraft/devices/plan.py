"""What a model would do on a device that is not there: does it fit, how fast, and how.

Everything follows from config files, a device's rates and an assumed acceptance p. A
node's n-th child is taken to be right with probability p (1 - p)^(n - 1), a chain being
a tree of first children.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetdraft.contract import WIDEST
from jetdraft.devices.device import Device, PowerMode
from jetdraft.devices.dimensions import Dimensions
from jetdraft.devices.roofline import FITTED, RUNTIME_MB, Load
from jetdraft.errors import DeviceError, OptionError

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 60, 64)
SYSTEM_MB = 1500.0
"""What the system keeps for itself, without a desktop; an assumption."""

OFF, CHAIN, TREE = "none", "chain", "tree"
DRAFT, LOOKUP = "draft", "lookup"
PLANNED = ("none", "int8", "int4")
"""Quantizations that can be exported; a device may have arithmetic for others."""

STREAM_LAYERS = 2
"""Top layers that streams pass through, as `jetdraft train streams` has them."""


@dataclass(frozen=True)
class Choice:
    """A way to decode: `width` rows a pass, `tokens_per_pass` expected of them."""

    method: str
    shape: str
    width: int
    tokens_per_pass: float
    tokens_per_second: float
    speedup: float


@dataclass(frozen=True)
class Plan:
    """A prediction; memory in 10^6 bytes, times in ms.

    `memory_mb` says where it goes, `available_mb` what the device has for it.
    """

    device: str
    power_mode: str
    quantization: str
    context: int
    acceptance: float
    memory_mb: dict[str, float]
    available_mb: float
    pass_ms_by_width: dict[int, float]
    rows: list[Choice]

    @property
    def needed_mb(self) -> float:
        """All of it."""
        return sum(self.memory_mb.values())

    @property
    def fits(self) -> bool:
        """Whether the device has that much."""
        return self.needed_mb <= self.available_mb

    @property
    def best(self) -> Choice:
        """The fastest way, plain decoding included, of those that this runtime has.

        With a drafter, lookup is no contender: the acceptance is the drafter's.
        """
        drafts = any(choice.method == DRAFT for choice in self.rows)
        known = [
            choice
            for choice in self.rows
            if choice.width <= WIDEST and not (drafts and choice.method == LOOKUP)
        ]
        return max(known, key=lambda choice: choice.tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        parts = {name: round(mb, 1) for name, mb in self.memory_mb.items()}
        return {
            "device": self.device,
            "power_mode": self.power_mode,
            "quantization": self.quantization,
            "context": self.context,
            "acceptance": self.acceptance,
            "fits": self.fits,
            "memory_mb": round(self.needed_mb, 1),
            "memory_parts_mb": parts,
            "available_mb": round(self.available_mb, 1),
            "plain_tokens_per_second": round(self.rows[0].tokens_per_second, 2),
            "pass_ms_by_width": {
                str(width): round(ms, 3) for width, ms in self.pass_ms_by_width.items()
            },
            "best": _rounded(self.best),
            "rows": [_rounded(choice) for choice in self.rows],
        }


@dataclass(frozen=True)
class Question:
    """What is to be planned; raises `OptionError` or `DeviceError`.

        plan(Question(Path("target"), Device.named("orin-nx-16gb"))).best.method

    `target` and `drafter` are config files or their folders.
    """

    target: Path
    device: Device
    drafter: Path | None = None
    quantization: str = "int4"
    context: int = 2048
    acceptance: float = 0.6
    power_mode: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance < 1.0:
            raise OptionError(
                f"acceptance {self.acceptance} is out of range; give 0 to below 1"
            )
        if self.context < 1:
            raise OptionError(f"context {self.context} is out of range; give 1 or more")
        known = [each for each in self.device.quantizations if each in PLANNED]
        if self.quantization not in known:
            raise DeviceError(
                f"{self.quantization!r} cannot be planned on {self.device.name}; "
                f"choose {', '.join(known)}"
            )


def plan(question: Question) -> Plan:
    """Predict; nothing is run and no weights are read."""
    device = question.device
    mode = device.power_mode(question.power_mode)
    target = Load.of(Dimensions.read(question.target), question.quantization)
    drafter = None
    if question.drafter is not None:
        # Drafters keep more bits, see `Recipe.for_drafter`.
        kept = "none" if question.quantization == "none" else "int8"
        drafter = Load.of(Dimensions.read(question.drafter), kept)
    board = Board(device, mode, question.context, target, drafter)
    memory = {"target": target.memory_mb(question.context), "runtime": RUNTIME_MB}
    if drafter is not None:
        memory["drafter"] = drafter.memory_mb(question.context)
    return Plan(
        device=device.name,
        power_mode=mode.name,
        quantization=question.quantization,
        context=question.context,
        acceptance=question.acceptance,
        memory_mb=memory,
        available_mb=device.memory_gb * 1.024**3 * 1e3 - SYSTEM_MB,
        pass_ms_by_width={width: board.pass_ms(width) for width in WIDTHS},
        rows=list(board.choices(question.acceptance)),
    )


@dataclass(frozen=True)
class Board:
    """A target and its drafter on a device in a power mode."""

    device: Device
    mode: PowerMode
    context: int
    target: Load
    drafter: Load | None

    def pass_ms(self, width: int) -> float:
        """A pass of the target."""
        return self._ms(self.target, width)

    def choices(self, acceptance: float) -> Iterator[Choice]:
        """Plain decoding first, then every method at every width."""
        plain = 1e3 / self.pass_ms(1)
        yield Choice(OFF, CHAIN, 1, 1.0, plain, 1.0)
        for width in WIDTHS[1:]:
            for shape in (CHAIN, TREE):
                levels = expected(width - 1, acceptance, branching=shape == TREE)
                tokens = 1.0 + sum(rate for _, rate in levels)
                for method, extra in self._drafting_ms(levels, shape).items():
                    speed = 1e3 * tokens / (self.pass_ms(width) + extra)
                    yield Choice(method, shape, width, tokens, speed, speed / plain)

    def _drafting_ms(
        self, levels: list[tuple[int, float]], shape: str
    ) -> dict[str, float]:
        """What a draft costs beside the pass that verifies it, by method.

        The acceptance is the drafter's if there is one.
        """
        lookup = {LOOKUP: 0.0} if shape == CHAIN else {}
        if self.drafter is not None:
            spent = sum(self._ms(self.drafter, rows) for rows, _ in levels)
            return {DRAFT: spent, **lookup}
        return {"stream": self._probes_ms(levels), **lookup}

    def _probes_ms(self, levels: list[tuple[int, float]]) -> float:
        """Every row carries a stream for each level, through the top layers."""
        sizes = self.target.sizes
        share = min(1.0, STREAM_LAYERS / sizes.layers)
        part = (share * sizes.matrices + sizes.head) / (sizes.matrices + sizes.head)
        rows = 1 + sum(rows for rows, _ in levels)
        return rows * len(levels) * part * self._row_ms(self.target)

    def _ms(self, load: Load, width: int) -> float:
        capability = self.device.compute_capability
        return load.pass_ms(width, self.context, self.mode, capability, FITTED)

    def _row_ms(self, load: Load) -> float:
        return load.row_ms(self.mode, self.device.compute_capability, FITTED)


def expected(rows: int, acceptance: float, branching: bool) -> list[tuple[int, float]]:
    """The likeliest tree of so many rows: per level, its rows and tokens expected.

    Greedy insertion is optimal where a node's probability is its path's product.

        expected(2, 0.5, branching=False)  # [(1, 0.5), (1, 0.25)]
    """
    levels: list[tuple[int, float]] = []
    count = itertools.count()
    waiting = [(-acceptance, next(count), 0, 0)]
    for _ in range(rows):
        negative, _, level, rank = heapq.heappop(waiting)
        rate = -negative
        if level == len(levels):
            levels.append((0, 0.0))
        levels[level] = (levels[level][0] + 1, levels[level][1] + rate)
        heapq.heappush(waiting, (-rate * acceptance, next(count), level + 1, 0))
        if branching:
            sibling = (-rate * (1 - acceptance), next(count), level, rank + 1)
            heapq.heappush(waiting, sibling)
    return levels


def refusal(question: Question, found: Plan) -> DeviceError:
    """By how much it does not fit, and what would."""
    over = (found.needed_mb - found.available_mb) / 1e3
    return DeviceError(
        f"the model needs {found.needed_mb / 1e3:.1f} GB, {found.device} has "
        f"{found.available_mb / 1e3:.1f} GB beside the system: {over:.1f} GB too much; "
        f"{_what_fits(question)}"
    )


def _what_fits(question: Question) -> str:
    """Fewer bits on this device, or other devices."""
    for bits in ("int8", "int4"):
        smaller = _with(question, quantization=bits)
        if bits != question.quantization and plan(smaller).fits:
            return f"--quantize {bits} would fit"
    names = []
    devices = map(Device.named, Device.names())
    for device in sorted(devices, key=lambda device: device.memory_gb):
        if question.quantization not in device.quantizations:
            continue
        if plan(_with(question, device=device, power_mode=None)).fits:
            names.append(device.name)
    if names:
        return f"it fits {', '.join(names)}"
    return "choose a smaller model or context"


def _with(question: Question, **changed: Any) -> Question:
    return Question(**{**question.__dict__, **changed})


def _rounded(choice: Choice) -> dict[str, Any]:
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in asdict(choice).items()
    }
