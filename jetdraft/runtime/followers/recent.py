"""The tokens before a row, which some heads read beside the row's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jetdraft.runtime.drafts.arrays import Int64s
from jetdraft.runtime.passes.graph import Graph

Tail = tuple[int, ...]
"""The last tokens of a text."""


class Recent:
    """The tokens before its rows that a graph reads: `contract.recent` for each row.

    Where that is 0 a tail is empty, and the graph is given nothing.

        recent = Recent(graph)
        tail = recent.tail([5, 8, 9], 1)    # (0, 5)
        recent.before(tail, [8, 9])         # [[0, 5], [5, 8]]
        recent.after(tail, 8)               # (5, 8)
    """

    def __init__(self, graph: Graph) -> None:
        self.count = graph.contract.recent

    def tail(self, text: Sequence[int], end: int) -> Tail:
        """The last of the first `end` tokens of a text; token 0 stands before it."""
        last = text[max(end - self.count, 0) : end]
        return (*[0] * (self.count - len(last)), *last)

    def after(self, tail: Tail, token: int) -> Tail:
        """The tail behind one more token."""
        return (*tail, token)[1:] if self.count else tail

    def rows(self, tails: Sequence[Tail]) -> Int64s | None:
        """What the graph reads with rows behind these tails, int64 [n, q]."""
        return np.array(tails, np.int64) if self.count else None

    def before(self, tail: Tail, tokens: Sequence[int]) -> Int64s | None:
        """What the graph reads with tokens that follow this tail, int64 [n, q]."""
        if not self.count:
            return None
        return sliding_window_view(np.array([*tail, *tokens[:-1]]), self.count)
