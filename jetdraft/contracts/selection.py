"""Which rows a pass reads that does not read all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from jetdraft.contracts.constants import MIN_SELECTED
from jetdraft.parsing import MOST_SIZE, Size, in_range


class Reading(IntEnum):
    """Which committed rows a pass reads, and whether the keys of selected rows turn.

    `TURNED` is for texts beyond the trained length: the keys turn to adjoining
    positions there. A draft must guess what a pass over `ALL` rows says, so the keys of
    `SELECTED` rows stay as they are.
    """

    ALL = 0
    SELECTED = 1
    TURNED = 2


@dataclass(frozen=True)
class Selection:
    """Which committed rows a selecting pass reads (TokenSelect, 2411.02886).

    In each layer and for each KV head it reads `rows` rows: the `first` of the buffer,
    the most `recent`, and between them those that the KV head's query heads voted for.
    A layer has `query_heads` in all.

        Selection(rows=1024, query_heads=14).voted    # 704
    """

    rows: Annotated[int, in_range(MIN_SELECTED, MOST_SIZE)]
    query_heads: Size

    @property
    def first(self) -> int:
        """The first rows of a text, which take much of the attention."""
        return self.rows // 16

    @property
    def recent(self) -> int:
        """The rows just before those of the pass."""
        return self.rows // 4

    @property
    def voted(self) -> int:
        """The rows that a vote selects."""
        return self.rows - self.first - self.recent
