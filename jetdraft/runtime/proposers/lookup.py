"""Prompt lookup: propose what followed the last time the sequence ended like this."""

from __future__ import annotations

import numpy as np

from jetdraft.runtime.rows import Int64s, Rows
from jetdraft.runtime.sampling import Chooser


class LookupProposer:
    """Longest suffix match in prompt and output, no model.

    The longest match of `min_match` to `max_match` tokens wins, the latest of equals.

        LookupProposer().propose(np.array([1, 2, 3, 1, 2]), budget=1)   # drafts 3
    """

    name = "lookup"
    session_seconds = 0.0
    ms_per_token = 0.0

    def __init__(
        self, min_match: int = 2, max_match: int = 16, max_draft_tokens: int = 16
    ) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self.max_draft_tokens = max_draft_tokens

    def begin(self, prompt: Int64s, chooser: Chooser) -> None:
        """Nothing to forget: the context is all it knows."""

    def propose(self, context: Int64s, budget: int) -> Rows:
        """The tokens after the best match."""
        end = self._match(context)
        return Rows.chain(np.append(context[-1:], context[end : end + budget]))

    def _match(self, context: Int64s) -> int:
        """Where the best earlier occurrence of the suffix ends; the length if none."""
        length = len(context)
        best, ends = length, np.arange(1, length)
        for size in range(1, min(self.max_match, length - 1) + 1):
            ends = ends[ends >= size]
            ends = ends[context[ends - size] == context[length - size]]
            if not len(ends):
                break
            if size >= self.min_match:
                best = int(ends[-1])
        return best

    def observe(self, committed: Int64s) -> None:
        """Nothing to learn: the context is all it knows."""
