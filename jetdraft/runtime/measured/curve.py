"""What passes and drafts cost on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from jetdraft.runtime.measured.stats import Round

LEAST_PROBE_MS = 1e-3
"""From nothing an estimate could not grow again."""


@dataclass
class Costs:
    """Milliseconds: `target[w]` of a pass of w rows, `draft[name]` per drafted token.

    `probe` is what a probe adds to a pass. Widths between measured ones are
    interpolated, beyond them extrapolated. `tree[w]` is that of a pass whose rows
    branch, where that was measured, and `compaction` of moving a branch together.
    """

    target: dict[int, float]
    draft: dict[str, float]
    probe: float = 0.0
    tree: dict[int, float] = field(default_factory=dict)
    compaction: float = 0.0

    def tree_ms(self, width: int, exact: bool) -> float:
        """A branching pass; exact generations leave gaps, others close them."""
        ms = max(self.tree.get(width, 0.0), self.pass_ms(width))
        return ms if exact else ms + self.compaction

    def pass_ms(self, width: int) -> float:
        """The target's pass time at `width`."""
        if width in self.target:
            return self.target[width]
        below = [w for w in self.target if w < width]
        above = [w for w in self.target if w > width]
        if below and above:
            low, high = max(below), min(above)
        elif len(self.target) > 1:
            low, high = sorted(self.target)[-2:] if below else sorted(self.target)[:2]
        else:
            return next(iter(self.target.values()))
        slope = (self.target[high] - self.target[low]) / (high - low)
        return self.target[low] + slope * (width - low)

    def learn(self, round_: Round) -> None:
        """Follow the machine slowly; a single stall says little."""
        if round_.probes:
            added = round_.target_seconds * 1e3 - self.pass_ms(round_.width)
            each = max(added / round_.probes, LEAST_PROBE_MS)
            self.probe = _follow(max(self.probe, LEAST_PROBE_MS), each)
        elif round_.width in self.target:
            self.target[round_.width] = _follow(
                self.target[round_.width], round_.target_seconds * 1e3
            )
        for name in round_.asked.keys() & self.draft.keys():
            drafted, seconds = round_.asked[name]
            if drafted:
                each = seconds * 1e3 / drafted
                # What nobody has timed yet is believed at once.
                self.draft[name] = _follow(self.draft[name] or each, each)


def _follow(known: float, seen: float) -> float:
    return known + 0.05 * (min(seen, 1.5 * known) - known)
