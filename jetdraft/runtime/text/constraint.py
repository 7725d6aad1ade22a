"""Constraints on a text: a JSON schema, a regular expression or a grammar.

The library llguidance, an optional dependency, does the work in a process apart; see
worker_process.py. Each row is masked by its own prefix, as plain decoding would mask
it, so the same seed gives the same text with every draft.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from jetdraft.errors import ConstraintError, OptionError
from jetdraft.parsing import JsonError, read_json
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processors import Mask, changed
from jetdraft.runtime.text.worker_process import (
    EndedError,
    MustEnd,
    Pipe,
    Vocabulary,
    never,
)

COMPILE_SECONDS, STEP_SECONDS = 5.0, 2.0
"""How long the compilation of a constraint may compute, and then each look at a text.
Useful constraints take milliseconds, or 200 for 1000 optional properties."""

MOST_ITEMS, MOST_STATES = 500, 50_000
"""Limits of the library's parser and lexer; a state takes up to 2 kB."""

TOO_MUCH = "it takes too much time or memory"

_LIMITS = ("const", "enum", "minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
_NAMED |= {"dependentSchemas", "dependencies"}
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
        # A lone surrogate cannot be encoded.
        if not isinstance(self.source, str) or re.search(
            "[\ud800-\udfff]", self.source
        ):
            texts = "text"
            if self.kind == "JSON schema":
                texts += " or a dict, for example model_json_schema() of a class"
            raise OptionError(
                f"the {self.kind} {self.source!a:.80} is not a text; give a {texts}",
                self.field,
            )
        if self.kind == "JSON schema":
            try:
                schema = read_json(self.source)
            except JsonError as error:
                raise _no_json(error) from error
            fact = "the JSON schema is not an object; give an object, for example {} "
            if not isinstance(schema, dict):
                raise OptionError(f"{fact}for any JSON", self.field)
            check_kept(schema, self.field)
            if not isinstance(schema.get("x-guidance", {}), dict):
                fact = 'the "x-guidance" of the JSON schema is not an object; fix it'
                raise OptionError(fact, self.field)
        if self.kind == "grammar":
            for place in re.finditer(r"%json\s*", self.source):
                with suppress(ValueError, RecursionError):  # the compiler refuses it
                    schema, _ = json.JSONDecoder().raw_decode(self.source, place.end())
                    check_kept(schema, self.field)

    @property
    def field(self) -> str:
        """The name of the option: json_schema, regex or grammar."""
        return self.kind.lower().replace(" ", "_")

    @classmethod
    def of(
        cls,
        json_schema: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> Constraint | None:
        """The constraint of the one option that is set; raises `OptionError`."""
        if isinstance(json_schema, Mapping):
            try:
                json_schema = json.dumps(json_schema)
            except (TypeError, ValueError, RecursionError) as error:
                raise _no_json(error) from error
        options = {"JSON schema": json_schema, "regex": regex, "grammar": grammar}
        sources = {kind: text for kind, text in options.items() if text is not None}
        if len(sources) > 1:
            names = " and ".join(sources)
            field = next(iter(sources)).lower().replace(" ", "_")
            raise OptionError(f"{names} exclude each other; give one", field)
        return next((cls(kind, source) for kind, source in sources.items()), None)


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

    It reads limits as float64 and then as int64, and adds 1 to exclusive ones. The
    `keyword` limits numbers by `part`, whose keys are names if `is_named`.
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
        limit = keyword or (key if key in (*_LIMITS, *_EXCLUSIVE) else "")
        number = _rounded(item, limit, not limit and key in _NAMED)
        if number is not None and key not in _DATA:
            return number
    return None


def _no_json(problem: object) -> OptionError:
    return OptionError(
        f"the JSON schema is not JSON ({problem}); fix it", "json_schema"
    )


class Matcher:
    """Follows one generation whose prompt has `start` tokens; a `LogitsProcessor`.

    Its worker process ends with this object. Methods raise `ConstraintError` if no text
    can follow, if the limits of time or memory are reached, or if `must_end` says so.

    A look below a draft uses up the limits too. Where they are reached after such a
    look, another process reads the text as plain decoding does, and no draft is looked
    at any more. So a draft never decides whether a text ends.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        constraint: Constraint,
        start: int,
        must_end: MustEnd = never,
    ) -> None:
        self._vocabulary, self._constraint = vocabulary, constraint
        self._must_end = must_end
        self._pipe: Pipe | None = None
        self._asked: Rows | list[int] | None = None
        """The rows or the path of a request without a reply yet."""
        # The process has read `_committed` tokens for good.
        self._start = self._committed = start
        self._has_looked, self._may_look = False, True
        self._seen = 1
        """How many rows of the last masks the process looked at."""

    def prepare(self) -> Pipe:
        """The process, which compiles the constraint first; raises `OptionError`."""
        if self._pipe is not None:
            return self._pipe
        kind, field = self._constraint.kind, self._constraint.field
        costly = f"the {kind} takes too much time or memory; make it simpler"
        limits = {"max_items_in_row": MOST_ITEMS, "max_lexer_states": MOST_STATES}
        request = ("compile", limits, kind, self._constraint.source)
        try:
            pipe = self._vocabulary.worker(self._must_end)
            pipe.send(COMPILE_SECONDS, self._must_end, *request)
            reply, _ = pipe.reply(COMPILE_SECONDS, self._must_end)
        except EndedError as error:
            raise ConstraintError(costly, field) from error
        # llguidance's own limits, by the names of its settings.
        if reply and "limits." in reply["error"]:
            raise ConstraintError(costly, field)
        if reply:
            where = f"the {kind} is refused at {reply['error']}; fix it"
            raise OptionError(where, field)
        self._pipe = pipe
        return pipe

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
        # Nothing depends on what follows a row that is forbidden or unseen.
        changes = [Mask(next(masks), size, n) if n >= 0 else None for n in counts]
        return changed(answer, changes + [None] * (len(rows) - self._seen))

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
        # Another process, which looks at nothing below the root: a copy of the
        # library's matcher would share the states that count for limits.
        self.close()
        self._pipe = self._asked = None
        self._has_looked = self._may_look = False
        for fresh in ([], *([token] for token in context[self._start :])):
            self._ask(fresh, "masks", fresh, [context[-1]], [-1])
            masks = self._reply()
        self._committed = len(context)
        return masks

    def _ask_masks(self, rows: Rows, context: Sequence[int]) -> None:
        count, fresh = len(rows) if self._may_look else 1, context[self._committed :]
        self._has_looked |= count > 1
        self._ask(rows, "masks", list(fresh), rows.tokens[:count], rows.parents[:count])
        self._committed += len(fresh)

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
