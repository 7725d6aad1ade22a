"""Prompt lookup: propose what followed the last time the sequence ended like this."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from jetdraft.runtime.graph import Answer
from jetdraft.runtime.rows import Kind, Rows
from jetdraft.runtime.sampling import Chooser

_ENCODING = f"utf-32-{sys.byteorder[0]}e"


class LookupProposer:
    """Longest suffix match in prompt and output, no model.

    The latest of the longest matches wins, up to `max_match` tokens. A draft is no
    longer than its match, since longer matches hold for longer, and where it reaches
    the end of the sequence it repeats from the match on.

        LookupProposer().propose([1, 2, 3, 1, 2], budget=2)   # drafts 3, 1
    """

    name = "lookup"
    kind = Kind.DETERMINISTIC
    session_seconds = 0.0
    ms_per_token = 0.0
    streams = 0
    branches = False

    def __init__(self, max_match: int = 16) -> None:
        self.max_draft_tokens = max_match

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Nothing to forget: the context is all it knows."""

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """The tokens after the best match."""
        # One character per token makes the search one of a text, which is fast.
        text = array("I", context).tobytes().decode(_ENCODING, "surrogatepass")
        end, size = self._match(text)
        count = min(budget, size)
        tail = context[end : end + count]
        draft = [tail[i % len(tail)] for i in range(count)]
        return Rows.chain([context[-1], *draft])

    def _match(self, text: str) -> tuple[int, int]:
        """Where the best earlier occurrence of the suffix ends, and its length."""
        length = len(text)
        end, matched = length, 0
        for size in range(1, min(self.max_draft_tokens, length - 1) + 1):
            at = text.rfind(text[length - size :], 0, length - 1)
            if at < 0:
                break
            end, matched = at + size, size
        return end, matched

    def observe(self, length: int, answer: Answer, row: int) -> None:
        """Nothing to learn: the context is all it knows."""
