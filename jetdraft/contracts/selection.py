"""Which rows a pass reads that does not read all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jetdraft.contracts.constants import MIN_SELECTED
from jetdraft.untrusted.record import MOST_SIZE, Size, in_range


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
