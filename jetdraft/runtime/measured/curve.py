"""What passes, drafts and probes cost on this machine: one curve, measured and learned.

The first generation measures a few passes, `jetdraft tune` measures with care, and
every round corrects the curve.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import Any

from jetdraft.contracts.constants import WIDEST
from jetdraft.runtime.measured.stats import Round
from jetdraft.untrusted.record import Size, read_record

LEAST_PROBE_MS = 1e-3
"""A lower bound: `_followed` could never raise an estimate of 0."""

LONGEST_MS = 1e6
"""A quarter of an hour; nothing that was measured takes as long."""

FOLLOWING = 0.05
"""The weight of one round in an estimate; one stall says little."""

IDLE = 32
"""Rounds after which a time that none of them took follows the times that they took."""

RECENT = 5
"""Rounds whose median is the time of a drafted token. It depends on how tokens are
chosen, so a new generation may need another time at once, and two stalls change it
little."""


@dataclass
class Curve:
    """Milliseconds on this machine; empty or 0 where nothing was measured.

    passes[w]       a pass of the target over a chain of w rows
    trees[w]        a pass of the target over w rows that branch
    compaction      moving the rows of an accepted branch together
    probe           what one probe adds to a pass
    probed[w]       a pass over w rows that all carry all their probes
    ended[w]        a pass over w rows of which the last one carries its probes
    drafter         a pass of the drafter over one row
    drafts[method]  one drafted token

        Curve({1: 20.0, 4: 26.0}).pass_ms(2)    # 22.0
    """

    passes: dict[Size, float]
    trees: dict[Size, float] = field(default_factory=dict)
    compaction: float = 0.0
    probe: float = 0.0
    drafter: float = 0.0
    drafts: dict[str, float] = field(default_factory=dict)
    probed: dict[Size, float] = field(default_factory=dict)
    ended: dict[Size, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        self._rounds = 0
        self._taken: dict[int | str, int] = {}  # the last round at a width, of a method

    def pass_ms(self, width: int) -> float:
        """The milliseconds of a chain pass, on a line through the nearest widths."""
        return _between(self.passes, width)

    def probed_ms(self, width: int, probes: int, streams: int) -> float:
        """The milliseconds of a branching pass in which rows carry `probes` probes.

        On the line through a pass of one row with all its `streams` and a pass where
        all rows have them: the first probe costs more than the others.
        """
        bare = self.tree_ms(width, exact=True)
        if not probes:
            return bare
        if not (self.ended and self.probed):
            return bare + probes * self.probe
        few, many = _between(self.ended, width), _between(self.probed, width)
        each = (many - few) / (streams * max(1, width - 1))
        return max(bare, few + (probes - streams) * max(0.0, each))

    def tree_ms(self, width: int, exact: bool) -> float:
        """The milliseconds of a branching pass.

        Inexact generations also move the rows of the accepted branch together.
        """
        ms = max(self.trees.get(width, 0.0), self.pass_ms(width))
        return ms if exact else ms + self.compaction

    def take(self, tuned: Curve) -> None:
        """Take the times that `jetdraft tune` has measured."""
        self.passes |= {w: ms for w, ms in tuned.passes.items() if w <= WIDEST}
        self.drafts |= tuned.drafts
        self._recent.clear()
        self.trees, self.compaction = dict(tuned.trees), tuned.compaction

    def learn(self, round_: Round) -> None:
        """Move the estimates a little towards the times of a round.

        A slow minute, the first perhaps, makes all times long. Then plain rounds would
        correct their own width alone, and drafts would seem dear for ever. So what no
        recent round took moves in proportion.
        """
        self._rounds += 1
        if round_.probes:
            added = round_.target_seconds * 1e3 - self.pass_ms(round_.width)
            per_probe = max(added / round_.probes, LEAST_PROBE_MS)
            self.probe = _followed(max(self.probe, LEAST_PROBE_MS), per_probe)
        elif round_.width in self.passes:
            before = self.passes[round_.width]
            after = _followed(before, round_.target_seconds * 1e3)
            self._taken[round_.width] = self._rounds
            self._move_idle(after / before)
            self.passes[round_.width] = after
        for method in round_.asked.keys() & self.drafts.keys():
            drafted, seconds = round_.asked[method]
            if drafted:
                if self._is_idle(method):
                    self._recent.pop(method, None)
                self._taken[method] = self._rounds
                recent = self._recent.setdefault(method, deque(maxlen=RECENT))
                if not recent and self.drafts[method]:  # 0 was never timed
                    recent.append(self.drafts[method])
                recent.append(seconds * 1e3 / drafted)
                self.drafts[method] = median_low(recent)

    def _move_idle(self, ratio: float) -> None:
        """Move the times that no recent round took by this factor."""
        for width in filter(self._is_idle, [*self.passes]):
            self.passes[width] *= ratio
        for method in filter(self._is_idle, [*self.drafts]):
            self.drafts[method] *= ratio

    def _is_idle(self, key: int | str) -> bool:
        return self._rounds - self._taken.get(key, -IDLE) >= IDLE

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> Curve:
        """Read `to_json`'s object; JSON turned the widths into text.

        Raises `ValueError` where it is malformed.
        """
        curve: Curve = read_record(cls, fields)
        passes = [
            ms
            for times in (curve.passes, curve.trees, curve.probed, curve.ended)
            for ms in times.values()
        ]
        others = [curve.compaction, curve.probe, curve.drafter, *curve.drafts.values()]
        plausible = [0 < ms < LONGEST_MS for ms in passes]
        plausible += [0 <= ms < LONGEST_MS for ms in others]
        if not curve.passes or not all(plausible):
            raise ValueError("its times are missing or out of range")
        return curve


def _between(times: Mapping[int, float], width: int) -> float:
    """The milliseconds of a width, on a line through the nearest measured widths."""
    if width in times:
        return times[width]
    below = [w for w in times if w < width]
    above = [w for w in times if w > width]
    if below and above:
        low, high = max(below), min(above)
    elif len(times) > 1:
        low, high = sorted(times)[-2:] if below else sorted(times)[:2]
    else:
        return next(iter(times.values()))
    slope = (times[high] - times[low]) / (high - low)
    return times[low] + slope * (width - low)


def _followed(estimate: float, ms: float) -> float:
    """An estimate after one more measurement, which counts as at most 1.5 times it."""
    return estimate + FOLLOWING * (min(ms, 1.5 * estimate) - estimate)
