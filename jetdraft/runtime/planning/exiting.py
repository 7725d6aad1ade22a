"""Whether a head may stop a text early, or let it leave layers out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jetdraft.devices.providers import HALVES, cpu_only
from jetdraft.errors import OptionError
from jetdraft.ranges import Range, check_ranges
from jetdraft.runtime.passes.split.exit_head import FIELD, ExitHead, ExitRule
from jetdraft.runtime.proposers.parts import Parts

_PROBABILITY = Range(lambda p: 0.0 <= p <= 1.0, "0 to 1 (never)", optional=True)
_RANGES = {"stop_threshold": _PROBABILITY, "exit_threshold": _PROBABILITY}


THRESHOLD = 0.7
"""The threshold of a generation that gives none."""


@dataclass(frozen=True)
class Exiting:
    """Stop and Exit (SEC, 2401.09964), which is lossy and off by default.

    `stop_and_exit` is the folder of a head that `jetdraft train exit` wrote. It stops
    the text where it is surer than `stop_threshold` that the next token will be wrong,
    and leaves the upper layers out where it is surer than `exit_threshold` that the
    lower layers know the token; without them it is `THRESHOLD`. Raises `OptionError`
    for wrong values.

        Exiting("exit-head", stop_threshold=0.8, exit_threshold=0.9)
    """

    stop_and_exit: str | Path | None = None
    stop_threshold: float | None = None
    exit_threshold: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.stop_and_exit, (str, Path, type(None))):
            raise OptionError(
                f"stop and exit {self.stop_and_exit!r} is not a path; give the folder "
                "of a head",
                FIELD,
            )
        check_ranges(self, _RANGES)
        for field in _RANGES if self.stop_and_exit is None else ():
            if getattr(self, field) is not None:
                raise OptionError(
                    f"{field.replace('_', ' ')} has no meaning without a head; give "
                    "stop and exit too, or leave it out",
                    field,
                )

    def rule(self, parts: Parts) -> ExitRule | None:
        """What decides after the lower layers; None if nothing does.

        Raises `OptionError` or `PairError` for a head that does not fit the bundle.
        """
        if self.stop_and_exit is None:
            return None
        halves = parts.bundle.target.halves
        if halves is None or halves.exit is None:
            raise OptionError(
                "the bundle has no exit; export with --exit-after, or leave stop and "
                "exit out",
                FIELD,
            )
        fix = "choose --provider cpu, or leave stop and exit out"
        if refusal := cpu_only(HALVES, parts.provider, fix):
            raise OptionError(refusal, FIELD)
        layer = len(parts.bundle.target.contract.kv_shapes) - halves.layers
        head = ExitHead.load(
            Path(self.stop_and_exit), halves.base, layer, halves.hidden_size
        )
        thresholds = (self.stop_threshold, self.exit_threshold)
        return ExitRule(head, *(THRESHOLD if t is None else t for t in thresholds))
