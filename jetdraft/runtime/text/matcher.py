"""Where a text stands in what it must be, and the tokens that may come next.

What a row may be followed by depends on its prefix alone, and a drafted row's prefix is
known. So each row is masked as plain decoding would mask it, the state goes back as the
cursor does, and the same seed gives the same text with every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jetdraft.errors import ConstraintError
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.binding import Floats
from jetdraft.runtime.sampling.processor import with_logits

if TYPE_CHECKING:
    from llguidance import LLMatcher

NEVER = np.float32(-1e30)
"""The logit of what may not come: no noise lifts it, and no arithmetic breaks it."""


class Matcher:
    """Follows one generation whose prompt has `start` tokens.

    `size` is the vocabulary's, `ends` are the ids that end a text.

        matcher.process(answer, rows, context)     # what is not allowed at `NEVER`
        matcher.forced(context, 8)               # the tokens that must come
    """

    def __init__(
        self, inner: LLMatcher, size: int, ends: frozenset[int], start: int
    ) -> None:
        from llguidance.numpy import allocate_token_bitmask

        self._inner, self._size, self._ends = inner, size, ends
        self._said = start
        self._taken: list[int] = []
        self._bits = allocate_token_bitmask(1, size)

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer for rows below the end of `context`, the last being the root."""
        self._follow(context)
        shaped = [
            self._masked(logits) if self._reach(path) else logits
            for logits, path in zip(answer.logits, rows.paths, strict=True)
        ]
        return with_logits(answer, shaped)

    def forced(self, context: Sequence[int], count: int) -> list[int]:
        """The next tokens, where there is but one way to go on; at most `count`."""
        if not self._reach(context[self._said :]):
            return []
        return list(self._inner.compute_ff_tokens())[:count]

    def allowed(self, rows: Rows, context: Sequence[int]) -> Rows:
        """The rows that may come at all."""
        fresh, paths, kept = context[self._said :], rows.paths, [0]
        for row in range(1, len(rows)):
            parent = rows.parents[row]
            if parent in kept and self._reach([*fresh, *paths[parent]]):
                kept += [row] * self._fits(rows.tokens[row])
        return rows.only(kept)

    def _fits(self, token: int) -> bool:
        if token in self._ends:
            return bool(self._inner.is_accepting())
        return bool(self._inner.validate_tokens([token]))

    def _follow(self, context: Sequence[int]) -> None:
        """Take what was committed; `ConstraintError` where there is no such text."""
        fresh = context[self._said :]
        if not self._reach(fresh):
            raise self._error()
        self._said += len(fresh)
        self._taken.clear()

    def _check(self) -> None:
        """The library's limits leave a mask that would end the text."""
        if self._inner.is_error():
            raise self._error()

    def _error(self) -> ConstraintError:
        why = self._inner.get_error() or "no token of the vocabulary fits"
        what = why.splitlines()[0]
        return ConstraintError(
            f"the constraint cannot be followed ({what}); make it simpler"
        )

    def _reach(self, path: Sequence[int]) -> bool:
        """Go to the place after what was said and some tokens, if those may come."""
        same, taken = 0, self._taken
        while same < min(len(path), len(taken)) and path[same] == taken[same]:
            same += 1
        if same < len(taken):
            self._inner.rollback(len(taken) - same)
            del taken[same:]
            self._check()
        fresh = list(path[same:])
        if not self._ends.isdisjoint(fresh):
            return False  # nothing comes after the end
        count = self._inner.try_consume_tokens(fresh) if fresh else 0
        taken += fresh[:count]
        return count == len(fresh)

    def _masked(self, logits: Floats) -> Floats:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._inner, self._bits, 0)
        self._check()
        bits = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")
        allowed = bits[: self._size].astype(bool)
        return np.where(allowed, np.maximum(logits, NEVER / 2), NEVER)
