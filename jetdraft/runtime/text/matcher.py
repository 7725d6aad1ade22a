"""Masks the tokens that a constraint forbids after each row.

Which tokens may follow a row depends on the row's prefix alone, and the prefix of a
drafted row is known. So each row is masked as plain decoding would mask it, and the
same seed gives the same text with every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processor import ENOUGH, changed, ordered

if TYPE_CHECKING:
    from llguidance import LLMatcher

NEVER = np.float32(-1e30)
"""The logit of a forbidden token: finite, but so low that no noise makes it win."""


FEW, MANY = 512, 4096
"""Up to FEW allowed tokens it is cheap to look at each; with more than MANY it costs as
much as to search the whole row."""


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
        # The library has read `_committed` tokens, and after them the tokens `_path`.
        self._committed = start
        self._path: list[int] = []
        self._bits = allocate_token_bitmask(1, size)

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with forbidden tokens masked; `context` ends with the root."""
        self._commit(context)
        masks = [self._mask() if self._reach(p) else _FREE for p in rows.paths]
        return changed(answer, masks)

    def forced(self, context: Sequence[int], count: int) -> list[int]:
        """The next tokens while only one token is allowed; at most `count`."""
        if not self._reach(context[self._committed :]):
            return []
        return list(self._inner.compute_ff_tokens())[:count]

    def allowed(self, rows: Rows, context: Sequence[int]) -> Rows:
        """The rows that the constraint allows, in a tree below the end of `context`."""
        fresh, paths, kept_rows = context[self._committed :], rows.paths, [0]
        for row in range(1, len(rows)):
            parent = rows.parents[row]
            if parent in kept_rows and self._reach([*fresh, *paths[parent]]):
                kept_rows += [row] * self._allows(rows.tokens[row])
        return rows.only(kept_rows)

    def _allows(self, token: int) -> bool:
        """Whether a token may come after the tokens that the library has read."""
        if token in self._ends:
            return bool(self._inner.is_accepting())
        return bool(self._inner.validate_tokens([token]))

    def _commit(self, context: Sequence[int]) -> None:
        """Read the newly committed tokens, which are never taken back."""
        fresh = context[self._committed :]
        if not self._reach(fresh):
            raise self._error()
        self._committed += len(fresh)
        self._path.clear()

    def _check(self) -> None:
        """Raise `OptionError` if the library has reached its limits.

        Its masks would end the text then.
        """
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
        """Read `path` after the committed tokens; whether the constraint allows it."""
        same, read = 0, self._path
        while same < min(len(path), len(read)) and path[same] == read[same]:
            same += 1
        if same < len(read):
            self._inner.rollback(len(read) - same)
            del read[same:]
            self._check()
        fresh = list(path[same:])
        if not self._ends.isdisjoint(fresh):
            return False  # nothing comes after the end
        count = self._inner.try_consume_tokens(fresh) if fresh else 0
        read += fresh[:count]
        return count == len(fresh)

    def _mask(self) -> Mask:
        """Which tokens may come next."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._inner, self._bits, 0)
        self._check()
        bits = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")
        return Mask(bits[: self._size].view(np.bool_))


@dataclass(frozen=True)
class Mask:
    """The tokens that are `allowed`, bool [vocab]; a `Change` of one row."""

    allowed: npt.NDArray[np.bool_]

    def apply(self, logits: Float32s) -> None:
        """Set the logits of forbidden tokens to `NEVER`."""
        np.maximum(logits, NEVER / 2, out=logits)
        logits[~self.allowed] = NEVER

    def at(self, ids: Int64s, values: Float32s) -> Float32s:
        """`NEVER` for the forbidden of the tokens."""
        return np.where(self.allowed[ids], np.maximum(values, NEVER / 2), NEVER)

    def best(self, answer: Answer, row: int) -> tuple[Int64s, Float32s] | None:
        """All allowed tokens if they are few, or else the candidates among them.

        After all allowed tokens come forbidden candidates, so that the last entry says
        how good a token can be that is not here.
        """
        ids, values = answer.candidates[row], answer.candidate_logits[row]
        kept, count = self.allowed[ids], np.count_nonzero(self.allowed)
        if count > FEW and np.count_nonzero(kept) >= ENOUGH:
            return ids[kept], values[kept]
        if count > MANY:
            return None
        inside = np.flatnonzero(self.allowed)
        logits = np.maximum(answer.logits[row, inside], NEVER / 2)
        best, forbidden = ordered(inside, logits), ids[~kept]
        never = np.full(len(forbidden), NEVER)
        return np.append(best[0], forbidden), np.append(best[1], never)


class _Free:
    """No change: nothing depends on what follows a row that is forbidden itself."""

    def apply(self, logits: Float32s) -> None:
        """Leave the row as it is."""

    def at(self, ids: Int64s, values: Float32s) -> Float32s:
        """The logits as they are."""
        return values

    def best(self, answer: Answer, row: int) -> tuple[Int64s, Float32s]:
        """The candidates as they are."""
        return answer.candidates[row], answer.candidate_logits[row]


_FREE = _Free()
