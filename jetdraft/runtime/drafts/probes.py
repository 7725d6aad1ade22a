"""Probes: rows of a pass that draft further tokens while other rows are verified.

A graph trained for Speculative Streaming (2402.11131) has several learned streams. Each
stream that a row carries is one probe: it predicts one more token ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Probes:
    """The probes of one pass: each row in `carriers` carries streams 0..`streams`-1.

    Probes((3,), streams=4)   # four probes, all carried by row 3
    """

    carriers: tuple[int, ...] = ()
    streams: int = 0

    @property
    def total(self) -> int:
        """The number of probes."""
        return len(self.carriers) * self.streams

    @property
    def rows(self) -> list[int]:
        """The carrier of each probe."""
        return [row for row in self.carriers for _ in range(self.streams)]

    @property
    def ids(self) -> list[int]:
        """The stream of each probe."""
        return list(range(self.streams)) * len(self.carriers)

    def seen(self, ancestors: Sequence[Sequence[int]]) -> list[list[int]]:
        """Per probe, the rows and probes that it attends to, itself left out.

        They are its carrier, the carrier's `ancestors`, and the lower streams of the
        same carrier. Probes are numbered after the rows.
        """
        rows = len(ancestors)
        return [
            [*ancestors[row], row, *range(rows + first, rows + first + stream)]
            for first, row in zip(
                range(0, self.total, self.streams or 1), self.carriers, strict=True
            )
            for stream in range(self.streams)
        ]


NO_PROBES = Probes()


@dataclass(frozen=True)
class Probing:
    """Which rows of the coming passes carry probes: all rows, or the last row only.

    If all do, the row that is accepted last has drafted. The last row alone is cheaper,
    but drafts nothing after a wrong guess.

        Probing(streams=4, last_only=True).of(rows=3)    # Probes((2,), streams=4)
    """

    streams: int = 0
    last_only: bool = False

    def of(self, rows: int) -> Probes:
        """The probes of a pass over `rows` rows."""
        if not self.streams:
            return NO_PROBES
        first = rows - 1 if self.last_only else 0
        return Probes(tuple(range(first, rows)), self.streams)


NO_PROBING = Probing()
