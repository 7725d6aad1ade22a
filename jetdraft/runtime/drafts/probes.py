"""Probes: rows of a pass that draft further tokens while other rows are verified.

A graph trained for it has several learned *streams* (Speculative Streaming, 2402.11131;
prompt tokens, 2405.18628). Each stream that a row carries is one probe: it predicts one
more token ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Probes:
    """The probes of one pass: row i carries the first `counts[i]` streams.

    Probes((0, 0, 4))   # four probes, all carried by row 2
    """

    counts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """The number of probes."""
        return sum(self.counts)

    @property
    def carriers(self) -> list[int]:
        """The rows that carry probes."""
        return [row for row, count in enumerate(self.counts) if count]

    @property
    def rows(self) -> list[int]:
        """The carrier of each probe."""
        return [row for row, count in enumerate(self.counts) for _ in range(count)]

    @property
    def ids(self) -> list[int]:
        """The stream of each probe."""
        return [stream for count in self.counts for stream in range(count)]

    def seen(
        self, ancestors: Sequence[Sequence[int]], members: int = 1, prefix: int = 0
    ) -> list[list[int]]:
        """Per slot behind the rows, the slots that it attends to, itself left out.

        Behind the rows lie the `prefix` slots of the graph, which see nothing, and then
        the probes: each takes `members` slots. A member sees the prefix, its carrier,
        the carrier's `ancestors`, and the same member of the carrier's lower streams
        (2405.18628, figure 4).
        """
        if not self.total:
            return []
        rows = len(ancestors)
        known, first = list(range(rows, rows + prefix)), rows + prefix
        seen: list[list[int]] = [[] for _ in known]
        for row, count in enumerate(self.counts):
            above = [*ancestors[row], row, *known]
            for slot in range(count * members):
                below = range(first + slot % members, first + slot, members)
                seen.append([*above, *below])
            first += count * members
        return seen


NO_PROBES = Probes()


@dataclass(frozen=True)
class Probing:
    """Which rows of the coming passes carry probes: all rows, or the last row only.

    If all do, the row that is accepted last has drafted. The last row alone is cheaper,
    but drafts nothing after a wrong guess. A draft can also say how many `counts` its
    rows carry, one by one.

        Probing(streams=4, last_only=True).of(rows=3)    # Probes((0, 0, 4))
    """

    streams: int = 0
    last_only: bool = False
    counts: tuple[int, ...] = ()

    def of(self, rows: int) -> Probes:
        """The probes of a pass over `rows` rows."""
        if self.counts:
            return Probes(self.counts[:rows])
        if not self.streams:
            return NO_PROBES
        counts = [0 if self.last_only else self.streams] * (rows - 1)
        return Probes((*counts, self.streams))


NO_PROBING = Probing()
