"""Masks the tokens that a constraint forbids after each row.

Which tokens may follow a row depends on the row's prefix alone, and the prefix of a
drafted row is known. So each row is masked as plain decoding would mask it, and the
same seed gives the same text with every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processor import with_logits

if TYPE_CHECKING:
    from llguidance import LLMatcher

NEVER = np.float32(-1e30)
"""The logit of a forbidden token: no noise makes it win, and it is finite."""


class Matcher:
    """Follows one generation whose prompt has `start` tokens; a `LogitsProcessor`.

    `size` is the size of the vocabulary, `ends` are the ids that end a text. Methods
    raise `OptionError` if no text can follow or the library's limits are reached.

        matcher.process(answer, rows, context)   # forbidden tokens get `NEVER`
        matcher.forced(context, 8)               # the tokens that must come
    """

    def __init__(
        self, inner: LLMatcher, size: int, ends: frozenset[int], start: int
    ) -> None:
        from llguidance.numpy import allocate_token_bitmask

        self._inner, self._size, self._ends = inner, size, ends
        # The library's state is after `_committed` tokens and the tokens `_tried`.
        self._committed = start
        self._tried: list[int] = []
        self._bits = allocate_token_bitmask(1, size)

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with forbidden tokens masked; `context` ends with the root."""
        self._commit(context)
        masked = [
            self._masked(logits) if self._reach(path) else logits
            for logits, path in zip(answer.logits, rows.paths, strict=True)
        ]
        return with_logits(answer, masked)

    def forced(self, context: Sequence[int], count: int) -> list[int]:
        """The next tokens while only one token is allowed; at most `count`."""
        if not self._reach(context[self._committed :]):
            return []
        return list(self._inner.compute_ff_tokens())[:count]

    def allowed(self, rows: Rows, context: Sequence[int]) -> Rows:
        """The rows that the constraint allows, in a tree below the end of `context`."""
        fresh, paths, kept = context[self._committed :], rows.paths, [0]
        for row in range(1, len(rows)):
            parent = rows.parents[row]
            if parent in kept and self._reach([*fresh, *paths[parent]]):
                kept += [row] * self._allows(rows.tokens[row])
        return rows.only(kept)

    def _allows(self, token: int) -> bool:
        if token in self._ends:
            return bool(self._inner.is_accepting())
        return bool(self._inner.validate_tokens([token]))

    def _commit(self, context: Sequence[int]) -> None:
        """Move on by the newly committed tokens, never to go back."""
        fresh = context[self._committed :]
        if not self._reach(fresh):
            raise self._error()
        self._committed += len(fresh)
        self._tried.clear()

    def _check(self) -> None:
        """Beyond its limits the library gives a mask that would end the text."""
        if self._inner.is_error():
            raise self._error()

    def _error(self) -> OptionError:
        problem = self._inner.get_error() or "no token of the vocabulary fits"
        return OptionError(
            f"the constraint cannot be followed ({problem.splitlines()[0]}); make it "
            "simpler",
            "constraint",
        )

    def _reach(self, path: Sequence[int]) -> bool:
        """Move to the state after the committed tokens and `path`, if it is allowed."""
        same, tried = 0, self._tried
        while same < min(len(path), len(tried)) and path[same] == tried[same]:
            same += 1
        if same < len(tried):
            self._inner.rollback(len(tried) - same)
            del tried[same:]
            self._check()
        fresh = list(path[same:])
        if not self._ends.isdisjoint(fresh):
            return False  # nothing comes after the end
        count = self._inner.try_consume_tokens(fresh) if fresh else 0
        tried += fresh[:count]
        return count == len(fresh)

    def _masked(self, logits: Float32s) -> Float32s:
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._inner, self._bits, 0)
        self._check()
        bits = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")
        allowed = bits[: self._size].astype(bool)
        return np.where(allowed, np.maximum(logits, NEVER / 2), NEVER)
