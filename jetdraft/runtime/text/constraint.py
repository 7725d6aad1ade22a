"""Constraints on a text: a JSON schema, a regular expression or a grammar.

The work is done by the library llguidance, which is an optional dependency, in a
process apart; see worker_process.py.

Which tokens may follow a row depends on the row's prefix alone, and the prefix of a
drafted row is known. So each row is masked as plain decoding would mask it, and the
same seed gives the same text with every draft.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.errors import ConstraintError, OptionError
from jetdraft.parsing import JsonError, read_json
from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processors import MIN_CANDIDATES, changed, ordered
from jetdraft.runtime.text.worker_process import EndedError, MustEnd, Pipe, Vocabulary

COMPILE_SECONDS, STEP_SECONDS = 5.0, 2.0
"""How long the compilation of a constraint may compute, and then each look at a text.
Useful constraints take milliseconds, or 200 for 1000 optional properties."""

MOST_ITEMS, MOST_STATES = 500, 50_000
"""Limits of the library's parser and lexer; a state takes up to 2 kB."""

NEVER = np.float32(-1e30)
"""The logit of a forbidden token: finite, but so low that no noise makes it win."""

FEW_TOKENS, MANY_TOKENS = 512, 4096
"""Up to `FEW_TOKENS` allowed tokens it is cheap to look at each; with more than
`MANY_TOKENS` it costs as much as to search the whole row."""

TOO_MUCH = "it takes too much time or memory"

_LIMITS = ("const", "enum", "minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_NAMED = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependencies"),
)
"""Keywords of a JSON schema whose objects have names for keys."""
_DATA = ("default", "examples")


@dataclass(frozen=True)
class Constraint:
    """A `kind` ("JSON schema", "regex", or "grammar" in Lark's syntax) and its source.

    Constraint("regex", "[0-9]+ km")
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not _is_encodable(self.source):
            texts = "text"
            if self.kind == "JSON schema":
                texts += " or a dict, for example model_json_schema() of a class"
            raise OptionError(
                f"the {self.kind} {self.source!a:.80} is not a text; give a {texts}",
                self.field,
            )
        if self.kind == "JSON schema":
            self._check_schema()
        if self.kind == "grammar":
            for place in re.finditer(r"%json\s*", self.source):
                with suppress(ValueError, RecursionError):  # the compiler refuses it
                    schema, _ = json.JSONDecoder().raw_decode(self.source, place.end())
                    check_kept(schema, self.field)

    @property
    def field(self) -> str:
        """The name of the option: json_schema, regex or grammar."""
        return _field(self.kind)

    @classmethod
    def of(
        cls,
        json_schema: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> Constraint | None:
        """The constraint of the one option that is set; None if no option is set.

        Raises `OptionError` if several are set or the source is not a text.
        """
        if isinstance(json_schema, Mapping):
            try:
                json_schema = json.dumps(json_schema)
            except (TypeError, ValueError, RecursionError) as error:
                raise _no_json(error) from error
        options = {"JSON schema": json_schema, "regex": regex, "grammar": grammar}
        sources = {kind: text for kind, text in options.items() if text is not None}
        if len(sources) > 1:
            names = " and ".join(sources)
            field = _field(next(iter(sources)))
            raise OptionError(f"{names} exclude each other; give one", field)
        return next((cls(kind, source) for kind, source in sources.items()), None)

    def _check_schema(self) -> None:
        try:
            schema = read_json(self.source)
        except JsonError as error:
            raise _no_json(error) from error
        if not isinstance(schema, dict):
            raise OptionError(
                "the JSON schema is not an object; give an object, for example {} for "
                "any JSON",
                self.field,
            )
        check_kept(schema, self.field)
        if not isinstance(schema.get("x-guidance", {}), dict):
            raise OptionError(
                'the "x-guidance" of the JSON schema is not an object; fix it',
                self.field,
            )


def check_kept(schema: Any, field: str) -> None:
    """Raise `OptionError` for a number that llguidance would not keep."""
    if (found := _rounded(schema)) is not None:
        raise OptionError(
            f"the schema's number {found} cannot be kept exactly; give a number below "
            "2^53 or a text",
            field,
        )


def _rounded(part: Any, keyword: str = "", is_named: bool = False) -> float | None:
    """The first whole number of a JSON schema that llguidance does not keep exactly.

    It reads limits as float64 and then as int64, and adds 1 to exclusive ones.
    `keyword` is what limits numbers by `part`, if anything does; the keys of `part`
    are names and not keywords if `is_named`.
    """
    if isinstance(part, int) and keyword:
        kept = min(int(float(part)), 2**63 - 1)
        is_limit_kept = kept == part > -(2**63)
        is_kept = abs(part) < 2**53 if keyword in _EXCLUSIVE else is_limit_kept
        return None if is_kept else part
    if isinstance(part, float) and keyword and part.is_integer():
        return None if abs(part) < 2**53 else part  # its last digits are lost already
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(part, dict):
        inner = (("" if is_named else key, item) for key, item in part.items())
    elif isinstance(part, list):
        inner = (("", item) for item in part)
    for key, item in inner:
        if key in _DATA:
            continue
        limit = keyword or (key if key in (*_LIMITS, *_EXCLUSIVE) else "")
        number = _rounded(item, limit, not limit and key in _NAMED)
        if number is not None:
            return number
    return None


def _field(kind: str) -> str:
    return kind.lower().replace(" ", "_")


def _no_json(problem: object) -> OptionError:
    return OptionError(
        f"the JSON schema is not JSON ({problem}); fix it", "json_schema"
    )


def _is_encodable(text: str) -> bool:
    """Whether the text has no lone surrogate, which UTF-8 cannot encode."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _never() -> bool:
    return False


class Matcher:
    """Follows one generation whose prompt has `start` tokens; a `LogitsProcessor`.

    The process of the `vocabulary` that does the work ends with this object. Methods
    raise `ConstraintError` if no text can follow, if the limits of time or memory are
    reached, or if `must_end` says so while the process starts or works.

    A look below a draft uses up the limits too. Where they are reached after such a
    look, another process reads the text as plain decoding does, and no draft is looked
    at any more. So a draft never decides whether a text ends.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        constraint: Constraint,
        start: int,
        must_end: MustEnd = _never,
    ) -> None:
        self._vocabulary, self._constraint = vocabulary, constraint
        self._must_end = must_end
        self._pipe: Pipe | None = None
        self._asked: Rows | list[int] | None = None
        """Rows or a path that the process was asked about, and has not told of yet."""
        # The process has read `_committed` tokens for good.
        self._start = self._committed = start
        self._has_looked, self._may_look = False, True
        self._seen = 1
        """How many rows of the last masks the process looked at."""

    def prepare(self) -> Pipe:
        """The process, which compiles the constraint first; raises `OptionError`."""
        if self._pipe is not None:
            return self._pipe
        kind = self._constraint.kind
        limits = {"max_items_in_row": MOST_ITEMS, "max_lexer_states": MOST_STATES}
        request = ("compile", limits, kind, self._constraint.source)
        try:
            pipe = self._vocabulary.worker(self._must_end)
            pipe.send(COMPILE_SECONDS, self._must_end, *request)
            reply, _ = pipe.reply(COMPILE_SECONDS, self._must_end)
        except EndedError as error:
            raise self._too_much() from error
        # llguidance's own limits, by the names of its settings.
        if reply and "limits." in reply["error"]:
            raise self._too_much()
        if reply:
            where = f"the {kind} is refused at {reply['error']}; fix it"
            raise OptionError(where, self._constraint.field)
        self._pipe = pipe
        return pipe

    def _too_much(self) -> ConstraintError:
        words = f"the {self._constraint.kind} takes too much time or memory"
        return ConstraintError(f"{words}; make it simpler", self._constraint.field)

    def close(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with forbidden tokens masked; `context` ends with the root."""
        counts, bits = self._masks(rows, context)
        self._seen, size = len(counts), self._vocabulary.size
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
        self._pipe = self._asked = None
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
        """Send a request; drop the reply to an earlier request."""
        pipe = self.prepare()
        if self._asked is not None:
            self._reply()
        try:
            pipe.send(STEP_SECONDS, self._must_end, *request)
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
        if self.count > FEW_TOKENS and np.count_nonzero(kept) >= MIN_CANDIDATES:
            return ids[kept], values[kept]
        if self.count > MANY_TOKENS:
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
