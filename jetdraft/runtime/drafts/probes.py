"""Which rows of a pass draft as they are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Probes:
    """Rows that carry streams, and how many each: streams 0..`streams`-1.

    Probes((3,), streams=4)   # four probes, all carried by row 3
    """

    carriers: tuple[int, ...] = ()
    streams: int = 0

    @property
    def total(self) -> int:
        """How many probes there are."""
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
        """What each probe sees of a pass's rows and probes, itself aside.

        Its carrier, the carrier's `ancestors`, and the streams below its own.
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
    """Who carries how many streams in the coming passes.

    All rows, so that whichever is accepted last has drafted; or the last row only,
    which is cheaper and drafts nothing after a wrong guess.
    """

    streams: int = 0
    last_only: bool = False

    def of(self, rows: int) -> Probes:
        """The probes of a pass over so many rows."""
        if not self.streams:
            return NO_PROBES
        first = rows - 1 if self.last_only else 0
        return Probes(tuple(range(first, rows)), self.streams)


NO_PROBING = Probing()
