"""Masks the tokens that a constraint forbids after each row.

Which tokens may follow a row depends on the row's prefix alone, and the prefix of a
drafted row is known. So each row is masked as plain decoding would mask it, and the
same seed gives the same text with every draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.errors import ConstraintError, OptionError
from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processor import ENOUGH, changed, ordered
from jetdraft.runtime.text.constraint import Constraint
from jetdraft.runtime.text.link import EndedError, Link, MustEnd

COMPILE_SECONDS, STEP_SECONDS = 5.0, 2.0
"""How long the compilation of a constraint may compute, and then each look at a text.
Useful constraints take milliseconds, or 200 for 1000 optional properties."""

MOST_ITEMS, MOST_STATES = 500, 50_000
"""Limits of the library's parser and lexer; a state takes up to 2 kB."""

NEVER = np.float32(-1e30)
"""The logit of a forbidden token: finite, but so low that no noise makes it win."""


FEW, MANY = 512, 4096
"""Up to FEW allowed tokens it is cheap to look at each; with more than MANY it costs as
much as to search the whole row."""


class Matcher:
    """Follows one generation whose prompt has `start` tokens; a `LogitsProcessor`.

    `size` is the size of the vocabulary; `connect` gives the process that does the
    work, which ends with this object. Methods raise `ConstraintError` if no text can
    follow, if the limits of time or memory are reached, or if `must_end` says so while
    the process starts or works.

    A look below a draft uses up the limits too. Where they are reached after such a
    look, another process reads the text as plain decoding does, and no draft is looked
    at any more. So a draft never decides whether a text ends.

        matcher.process(answer, rows, context)   # forbidden tokens get `NEVER`
        matcher.forced(context, 8)               # the tokens that must come
    """

    def __init__(
        self,
        connect: Callable[[MustEnd], Link],
        constraint: Constraint,
        size: int,
        start: int,
        must_end: MustEnd,
    ) -> None:
        self._connect, self._constraint = connect, constraint
        self._size, self._must_end = size, must_end
        self._link: Link | None = None
        self._asked: Rows | list[int] | None = None
        """Rows or a path that the process was asked about, and has not told of yet."""
        # The process has read `_committed` tokens for good.
        self._start = self._committed = start
        self._has_looked, self._may_look = False, True
        self._seen = 1
        """How many rows of the last masks the process looked at."""

    def prepare(self) -> Link:
        """The process, which compiles the constraint first; raises `OptionError`."""
        if self._link is not None:
            return self._link
        kind = self._constraint.kind
        limits = {"max_items_in_row": MOST_ITEMS, "max_lexer_states": MOST_STATES}
        request = ("compile", limits, kind, self._constraint.source)
        try:
            link = self._connect(self._must_end)
            link.send(COMPILE_SECONDS, self._must_end, *request)
            reply, _ = link.reply(COMPILE_SECONDS, self._must_end)
        except EndedError as error:
            raise self._too_much() from error
        # llguidance's own limits, by the names of its settings.
        if reply and "limits." in reply["error"]:
            raise self._too_much()
        if reply:
            where = f"the {kind} is refused at {reply['error']}; fix it"
            raise OptionError(where, self._constraint.field)
        self._link = link
        return link

    def _too_much(self) -> ConstraintError:
        words = f"the {self._constraint.kind} takes too much time or memory"
        return ConstraintError(f"{words}; make it simpler", self._constraint.field)

    def close(self) -> None:
        """End the process."""
        if self._link is not None:
            self._link.close()

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with forbidden tokens masked; `context` ends with the root."""
        counts, bits = self._masks(rows, context)
        self._seen, size = len(counts), self._size
        masked = sum(n >= 0 for n in counts)
        masks = iter(np.frombuffer(bits, np.uint8).reshape(masked, -1))
        changes = [Mask(next(masks), size, n) if n >= 0 else _FREE for n in counts]
        return changed(answer, changes + [_FREE] * (len(rows) - self._seen))

    def seen(self, path: list[int]) -> list[int]:
        """The rows of a path whose mask is known."""
        return [row for row in path if row < self._seen]

    def process_soon(self, rows: Rows, context: Sequence[int]) -> None:
        """Make the masks of `process` while a pass verifies the rows."""
        with suppress(ConstraintError):  # `process` meets it too
            self._ask_masks(rows, context)

    def forced(self, context: Sequence[int], count: int) -> list[int]:
        """The next tokens while only one token is allowed; at most `count`."""
        if self._asked != list(context[self._committed :]):
            self.forced_soon(context, [])
        tokens: list[int] = self._reply_below() or []
        return tokens[:count]

    def forced_soon(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Look for the tokens of `forced` after `context` and `tokens` meanwhile."""
        path = [*context[self._committed :], *tokens]
        self._ask_below(path, "forced", path)

    def allowed(self, rows: Rows, context: Sequence[int]) -> Rows:
        """The rows that the constraint allows, in a tree below the end of `context`."""
        if not rows.drafted:
            return rows
        path = list(context[self._committed :])
        self._ask_below(rows, "allowed", path, rows.tokens, rows.parents)
        return rows.only(self._reply_below() or [0])

    def _masks(self, rows: Rows, context: Sequence[int]) -> tuple[list[int], bytes]:
        """How many tokens may follow each of the first rows, and which."""
        try:
            if self._asked is not rows:
                self._ask_masks(rows, context)
            return self._reply()
        except ConstraintError:
            if not self._has_looked or self._must_end():
                raise
        return self._root_mask_anew(context)

    def _ask_masks(self, rows: Rows, context: Sequence[int]) -> None:
        count, fresh = len(rows) if self._may_look else 1, context[self._committed :]
        self._has_looked |= count > 1
        self._ask(rows, "masks", list(fresh), rows.tokens[:count], rows.parents[:count])
        self._committed += len(fresh)

    def _root_mask_anew(self, context: Sequence[int]) -> tuple[list[int], bytes]:
        """The mask of the root from another process, which looks at nothing else.

        A copy of the library's matcher would share the states that count for limits.
        """
        self.close()
        self._link = self._asked = None
        self._has_looked = self._may_look = False
        for fresh in ([], *([token] for token in context[self._start :])):
            self._ask(fresh, "masks", fresh, [context[-1]], [-1])
            masks = self._reply()
        self._committed = len(context)
        return masks

    def _ask_below(self, asked: Rows | list[int], *request: Any) -> None:
        """Ask for a look below a draft, unless such looks have reached the limits."""
        if self._may_look:
            self._has_looked = True
            try:
                self._ask(asked, *request)
            except ConstraintError:
                self._may_look = False

    def _reply_below(self) -> Any:
        """The reply to `_ask_below`; None where such looks have reached the limits."""
        try:
            return self._reply()[0] if self._may_look else None
        except ConstraintError:
            self._may_look = False
        return None

    def _ask(self, asked: Rows | list[int], *request: Any) -> None:
        """Send a request; a reply that nobody waits for any more is left out."""
        link = self.prepare()
        if self._asked is not None:
            self._reply()
        try:
            link.send(STEP_SECONDS, self._must_end, *request)
        except EndedError as error:
            raise self._unfollowed(TOO_MUCH) from error
        self._asked = asked

    def _reply(self) -> tuple[Any, bytes]:
        self._asked = None
        try:
            value, masks = self.prepare().reply(STEP_SECONDS, self._must_end)
        except EndedError as error:
            raise self._unfollowed(TOO_MUCH) from error
        if isinstance(value, dict):
            raise self._unfollowed(value["error"])
        return value, masks

    def _unfollowed(self, problem: str) -> ConstraintError:
        return ConstraintError(
            f"the constraint cannot be followed ({problem}); make it simpler",
            self._constraint.field,
        )


TOO_MUCH = "it takes too much time or memory"


@dataclass(frozen=True)
class Mask:
    """The tokens that may come, a `Change` of one row: `count` of `size` tokens.

    `bits` is uint8 [size / 8 or more]; the lowest bit of a byte is the first token.
    """

    bits: npt.NDArray[np.uint8]
    size: int
    count: int

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """Whether each token may come, bool [vocab]."""
        return np.unpackbits(self.bits, count=self.size, bitorder="little").view(bool)

    def _holds(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        """Whether single tokens may come."""
        bits: npt.NDArray[np.uint8] = self.bits[ids >> 3] >> (ids & 7).astype(np.uint8)
        return (bits & 1).view(np.bool_)

    def apply(self, logits: Float32s) -> None:
        """Set the logits of forbidden tokens to `NEVER`."""
        np.maximum(logits, NEVER / 2, out=logits)
        logits[~self.allowed] = NEVER

    def at(self, ids: Int64s, values: Float32s) -> Float32s:
        """`NEVER` for the forbidden of the tokens."""
        return np.where(self._holds(ids), np.maximum(values, NEVER / 2), NEVER)

    def best(self, answer: Answer, row: int) -> tuple[Int64s, Float32s] | None:
        """All allowed tokens if they are few, or else the candidates among them.

        After all allowed tokens come forbidden candidates, so that the last entry says
        how good a token can be that is not here.
        """
        ids, values = answer.candidates[row], answer.candidate_logits[row]
        kept = self._holds(ids)
        if self.count > FEW and np.count_nonzero(kept) >= ENOUGH:
            return ids[kept], values[kept]
        if self.count > MANY:
            return None
        inside = np.flatnonzero(self.allowed)
        logits = np.maximum(answer.logits[row, inside], NEVER / 2)
        best, forbidden = ordered(inside, logits), ids[~kept]
        never = np.full(len(forbidden), NEVER)
        return np.append(best[0], forbidden), np.append(best[1], never)


class _Free:
    """No change: nothing depends on what follows a row that is forbidden or unseen."""

    def apply(self, logits: Float32s) -> None:
        """Leave the row as it is."""

    def at(self, ids: Int64s, values: Float32s) -> Float32s:
        """The logits as they are."""
        return values

    def best(self, answer: Answer, row: int) -> tuple[Int64s, Float32s]:
        """The candidates as they are."""
        return answer.candidates[row], answer.candidate_logits[row]


_FREE = _Free()
