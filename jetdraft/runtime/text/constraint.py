"""Constraints on a text, by llguidance in another process, see worker_process.py."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from jetdraft.errors import ConstraintError, OptionError, as_error, refusing
from jetdraft.parsing import read_json
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processors import Mask, apply_changes
from jetdraft.runtime.text.codec import TextCodec
from jetdraft.runtime.text.stops import Thinking, ThoughtReader
from jetdraft.runtime.text.worker_process import EndedError, MustEnd, Pipe, Vocabulary

# To compile, and for each look at a text; useful constraints take at most 0.2 s.
COMPILE_SECONDS, STEP_SECONDS = 5.0, 2.0
MAX_ITEMS, MAX_STATES = 500, 50_000  # Parser and lexer; a state takes 2 kB.
TOO_MUCH = "it takes too much time or memory"

# Keywords of a JSON schema whose numbers are limits.
_LIMITS = ("const", "enum", "minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_NAMED_PARTS = {"properties", "patternProperties", "$defs", "definitions"}
_NAMED_PARTS |= {"dependentSchemas", "dependencies"}
"""Keywords of a JSON schema whose objects have names for keys."""
_DATA = ("default", "examples")  # Keywords whose values are no schemas.


@dataclass(frozen=True)
class Constraint:
    """A `kind` ("JSON schema", "regex", "grammar" in Lark's syntax) and its source."""

    kind: str
    source: str

    def __post_init__(self) -> None:
        # A lone surrogate cannot be encoded.
        is_text = isinstance(self.source, str)
        if not is_text or re.search("[\ud800-\udfff]", self.source):
            more = ", a dict, or a class of pydantic" * (self.kind == "JSON schema")
            fact = f"the {self.kind} {self.source!a:.80} is not a text"
            raise OptionError(f"{fact}; give a text{more}", self.field)
        if self.kind == "JSON schema":
            with _reading_schema():
                schema = read_json(self.source)
            fact = "the JSON schema is not an object; give an object, for example {} "
            if not isinstance(schema, dict):
                raise OptionError(f"{fact}for any JSON", self.field)
            check_exact_numbers(schema, self.field)
            if not isinstance(schema.get("x-guidance", {}), dict):
                fact = 'the "x-guidance" of the JSON schema is not an object; fix it'
                raise OptionError(fact, self.field)
        if self.kind == "grammar":
            for place in re.finditer(r"%json\s*", self.source):
                with suppress(ValueError, RecursionError):  # the compiler refuses it
                    schema, _ = json.JSONDecoder().raw_decode(self.source, place.end())
                    check_exact_numbers(schema, self.field)

    @property
    def field(self) -> str:
        """The name of the option: json_schema, regex or grammar."""
        return _field(self.kind)

    @classmethod
    def of(
        cls,
        json_schema: str | Mapping[str, Any] | type[Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> "Constraint | None":
        """The constraint of the option that is set, or None; raises `OptionError`."""
        json_schema = getattr(json_schema, "model_json_schema", lambda: json_schema)()
        if isinstance(json_schema, Mapping):
            with _reading_schema():
                json_schema = json.dumps(json_schema)
        options = {"JSON schema": json_schema, "regex": regex, "grammar": grammar}
        kinds = [kind for kind, source in options.items() if source is not None]
        if len(kinds) > 1:
            fact = f"{' and '.join(kinds)} exclude each other; give one"
            raise OptionError(fact, _field(kinds[0]))
        return cls(kinds[0], cast(str, options[kinds[0]])) if kinds else None


def _field(kind: str) -> str:
    return kind.lower().replace(" ", "_")


def check_exact_numbers(schema: Any, field: str) -> None:
    """Raise `OptionError` for a number of a schema that llguidance would round."""
    if (found := _find_rounded(schema)) is not None:
        fact = f"the schema's number {found} cannot be kept exactly"
        raise OptionError(f"{fact}; give a number below 2^53 or a text", field)


def _find_rounded(part: Any, keyword: str = "", is_named: bool = False) -> float | None:
    """The first whole number of a JSON schema that llguidance does not keep exactly.

    It reads limits as float64 and then as int64, and adds 1 to exclusive limits. The
    `keyword` limits numbers by `part`, whose keys are names if `is_named`.
    """
    if isinstance(part, int) and keyword:
        is_limit_kept = min(int(float(part)), 2**63 - 1) == part > -(2**63)
        is_kept = abs(part) < 2**53 if keyword in _EXCLUSIVE else is_limit_kept
        return None if is_kept else part
    if isinstance(part, float) and keyword and part.is_integer():
        return None if abs(part) < 2**53 else part  # its last digits are lost already
    inner: Iterable[tuple[Any, Any]] = part.items() if isinstance(part, dict) else ()
    if isinstance(part, list):
        inner, is_named = enumerate(part), True
    for name, item in inner:
        key = "" if is_named else name
        limit = keyword or (key if key in (*_LIMITS, *_EXCLUSIVE) else "")
        number = _find_rounded(item, limit, not limit and key in _NAMED_PARTS)
        if number is not None and key not in _DATA:
            return number
    return None


def _reading_schema() -> AbstractContextManager[None]:
    causes = TypeError, ValueError, RecursionError
    fact = "the JSON schema is not JSON"
    return as_error(OptionError, causes, fact, "fix it", "json_schema")


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
        must_end: MustEnd = lambda: False,
    ) -> None:
        self._vocabulary, self._constraint = vocabulary, constraint
        self._must_end = must_end
        self._pipe: Pipe | None = None
        # The rows or the path of a request without a reply yet.
        self._asked: Rows | list[int] | None = None
        # The process has read `_committed` tokens for good.
        self._start = self._committed = start
        self._has_read_drafts, self._may_read_drafts = False, True
        self._masked_rows = 1  # How many rows the last masks are for.

    def prepare(self) -> Pipe:
        """Start the worker and compile, once; returns the pipe to the worker.

        Raises `OptionError` or `ConstraintError`.
        """
        if self._pipe is not None:
            return self._pipe
        kind, field = self._constraint.kind, self._constraint.field
        fact = f"the {kind} takes too much time or memory; make it simpler"
        costly = ConstraintError(fact, field)
        limits = {"max_items_in_row": MAX_ITEMS, "max_lexer_states": MAX_STATES}
        request = ("compile", limits, kind, self._constraint.source)
        with refusing(costly, EndedError):
            pipe = self._vocabulary.start_worker(self._must_end)
            pipe.send(COMPILE_SECONDS, self._must_end, *request)
            reply, _ = pipe.receive_reply(COMPILE_SECONDS, self._must_end)
        if reply and "limits." in reply["error"]:
            raise costly
        if reply:
            unknown = "Unimplemented keys" in reply["error"]
            fix = "leave these keys out" if unknown else "fix it"
            fact = f"the {kind} is refused at {reply['error']}"
            raise OptionError(f"{fact}; {fix}", field)
        self._pipe = pipe
        return pipe

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with forbidden tokens masked; `context` ends with the root."""
        counts, bits = self._get_masks(rows, context)
        self._masked_rows, size = len(counts), self._vocabulary.size
        masked = sum(n >= 0 for n in counts)
        masks = iter(np.frombuffer(bits, np.uint8).reshape(masked, -1))
        # Nothing depends on what follows a row that is forbidden or unseen.
        changes = [Mask(next(masks), size, n) if n >= 0 else None for n in counts]
        return apply_changes(answer, changes + [None] * (len(rows) - self._masked_rows))

    def rows_with_masks(self, path: list[int]) -> list[int]:
        """The rows of a path that had a mask in the last `process`."""
        return [row for row in path if row < self._masked_rows]

    def request_masks(self, rows: Rows, context: Sequence[int]) -> None:
        """Ask the worker for the masks of `process`, to compute while a pass runs."""
        with suppress(ConstraintError):  # `process` meets it too
            self._send_masks_request(rows, context)

    def forced(self, context: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that the constraint forces after `context`."""
        if self._asked != list(context[self._committed :]):
            self.request_forced(context, [])
        return list(self._reply_about_draft() or [])[:count]

    def request_forced(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Ask the worker ahead for the tokens forced after `context` and `tokens`."""
        path = [*context[self._committed :], *tokens]
        self._ask_about_draft(path, "forced", path)

    def allowed(self, rows: Rows, context: Sequence[int]) -> Rows:
        """Return the rows of a draft after `context` that the constraint allows."""
        if not rows.drafted:
            return rows
        path = list(context[self._committed :])
        self._ask_about_draft(rows, "allowed", path, rows.tokens, rows.parents)
        return rows.only(self._reply_about_draft() or [0])

    def _get_masks(self, rows: Rows, context: Sequence[int]) -> tuple[list[int], bytes]:
        """Return how many tokens may follow each of the first rows, and the masks."""
        try:
            if self._asked is not rows:
                self._send_masks_request(rows, context)
            return self._receive_reply()
        except ConstraintError:
            if not self._has_read_drafts or self._must_end():
                raise
        # Another process: a copy of the library's matcher would share the limits.
        self.close()
        self._pipe = self._asked = None
        self._has_read_drafts = self._may_read_drafts = False
        for fresh in ([], *([token] for token in context[self._start :])):
            self._ask(fresh, "masks", fresh, [context[-1]], [-1])
            masks = self._receive_reply()
        self._committed = len(context)
        return masks

    def _send_masks_request(self, rows: Rows, context: Sequence[int]) -> None:
        """Request the masks of the rows, or of the root alone; commits the context."""
        count = len(rows) if self._may_read_drafts else 1
        fresh = context[self._committed :]
        self._has_read_drafts |= count > 1
        self._ask(rows, "masks", list(fresh), rows.tokens[:count], rows.parents[:count])
        self._committed += len(fresh)

    def _ask_about_draft(self, asked: Rows | list[int], *request: Any) -> None:
        """Send a request about a draft, unless such requests reached the limits."""
        if self._may_read_drafts:
            self._has_read_drafts = True
            try:
                self._ask(asked, *request)
            except ConstraintError:
                self._may_read_drafts = False

    def _reply_about_draft(self) -> Any:
        """The reply to `_ask_about_draft`; None where requests reached the limits."""
        try:
            return self._receive_reply()[0] if self._may_read_drafts else None
        except ConstraintError:
            self._may_read_drafts = False
        return None

    def _ask(self, asked: Rows | list[int], *request: Any) -> None:
        """Send a request, and drop the reply to an earlier request if it is unread."""
        pipe = self.prepare()
        if self._asked is not None:
            self._receive_reply()
        try:
            pipe.send(STEP_SECONDS, self._must_end, *request)
        except EndedError as error:
            raise self._follow_error(TOO_MUCH) from error
        self._asked = asked

    def _receive_reply(self) -> tuple[Any, bytes]:
        self._asked = None
        try:
            value, masks = self.prepare().receive_reply(STEP_SECONDS, self._must_end)
        except EndedError as error:
            raise self._follow_error(TOO_MUCH) from error
        if isinstance(value, dict):
            raise self._follow_error(value["error"])
        return value, masks

    def _follow_error(self, problem: str) -> ConstraintError:
        fact = f"the constraint cannot be followed ({problem}); make it simpler"
        return ConstraintError(fact, self._constraint.field)


class Place:
    """A place in a text: the tokens `forced` next, and where the `answer` begins.

    With a `free` answer only the thought matters, which ends after `most` tokens. The
    answer of a text that has just begun is a guess: the token `opening` would begin a
    thought.
    """

    def __init__(
        self,
        marks: Thinking,
        codec: TextCodec,
        prompt: Sequence[int],
        most: int | None,
        free: bool,
    ) -> None:
        texts = marks.begin, marks.lead + marks.end + marks.rest, marks.rest
        ids = (tuple(codec.encode(text, add_special=False)) for text in texts)
        self._begin, self._end, self._rest = ids
        self._codec, self._most, self.free = codec, most, free
        state = marks.state(codec, prompt)
        self._reader = ThoughtReader(marks, state)
        self.start = self.length = len(prompt)
        self.answer = None if state else self.start
        self.opening: int | None = None
        self.forced: tuple[int, ...] = ()
        self._thought_tokens, self._is_ending = 0, False
        if not free and state is None:
            if marks.always:
                self.forced, self.answer = self._begin, None
            elif len(codec.decode(self._begin[:1])) > 2:  # no letter of another text
                self.opening = self._begin[0]
        self._end_thought()

    @property
    def has_answer(self) -> bool:
        """Whether the next token is the answer's."""
        return self.answer is not None and self.length >= self.answer

    def after(self, tokens: Sequence[int]) -> "Place":
        """The place after some tokens."""
        place = copy(self)
        place._reader = copy(self._reader)
        for token in tokens:
            place._read(token)
            place._end_thought()
        return place

    def _read(self, token: int) -> None:
        if self.has_answer and not self.free:
            if self.length > self.start or token != self.opening:
                self.length += 1
                return
            self.forced, self.answer = self._begin, None
        self.length, self.forced = self.length + 1, self.forced[1:]
        was_thought = self._reader.in_thought
        self._thought_tokens += was_thought
        text = self._codec.decode([token])
        self._reader.read(text, bytes(len(text)))
        if was_thought and not self._reader.in_thought:
            if not (self.free or self._is_ending):
                self.forced = self._rest
            self._is_ending = False
            self.answer = self.length + len(self.forced)

    def _end_thought(self) -> None:
        """Force the end of a thought that is long enough."""
        most, in_thought = self._most, self._reader.in_thought and not self._is_ending
        if in_thought and most is not None and self._thought_tokens >= most:
            self.forced, self._is_ending = self._end, True


class ThoughtRules:
    """Forces tokens from the `start` of a text on; a `LogitsProcessor`.

    No token of `ends` may come before the answer, unless that is free.
    """

    def __init__(self, start: Place, ends: Sequence[int]) -> None:
        self.rows = [start]
        self._ends = [] if start.free else list(ends)
        self._without_ends: Mask | None = None

    def after(self, context: Sequence[int]) -> Place:
        """The place after the prompt and the text so far."""
        return self.rows[0].after(context[self.rows[0].length :])

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with all tokens masked but forced tokens."""
        places = [self.after(context)]
        for token, parent in zip(rows.tokens[1:], rows.parents[1:], strict=True):
            places.append(places[parent].after([token]))
        self.rows = places
        changes = [self._mask(place, answer.vocab_size) for place in places]
        return apply_changes(answer, changes) if any(changes) else answer

    def _mask(self, place: Place, size: int) -> Mask | None:
        if place.forced:
            return Mask.of(np.arange(size) == place.forced[0])
        if place.has_answer or not self._ends:
            return None
        if self._without_ends is None:
            self._without_ends = Mask.of(~np.isin(np.arange(size), self._ends))
        return self._without_ends


class AnswerMatcher(Matcher):
    """A matcher of the answer alone, whose place the `rules` know."""

    def __init__(self, rules: ThoughtRules, *given: Any) -> None:
        super().__init__(*given)
        self._rules = rules

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        if self._is_on(self._rules.rows[0]):
            return super().process(answer, rows, context)
        self._masked_rows = len(rows)
        return answer

    def rows_with_masks(self, path: list[int]) -> list[int]:
        """The rows in the same part of the text, thought or answer, as the root."""
        begins = [row.answer if row.has_answer else None for row in self._rules.rows]
        path = super().rows_with_masks(path)
        return [row for row in path if begins[row] == begins[0]]

    def request_masks(self, rows: Rows, context: Sequence[int]) -> None:
        if self._is_on(self._rules.after(context)):
            super().request_masks(rows, context)

    def forced(self, context: Sequence[int], count: int) -> list[int]:
        if self._is_on(self._rules.rows[0]):
            return super().forced(context, count)
        return list(self._rules.after(context).forced[:count])

    def request_forced(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        if self._is_on(self._rules.rows[0]):
            super().request_forced(context, tokens)

    def allowed(self, rows: Rows, context: Sequence[int]) -> Rows:
        is_on = self._is_on(self._rules.rows[0])
        return super().allowed(rows, context) if is_on else rows

    def _is_on(self, place: Place) -> bool:
        """Whether the answer has begun; then the constraint is for what follows."""
        if place.has_answer and self._start != place.answer:
            self._start = self._committed = cast(int, place.answer)
        return place.has_answer

    def _get_masks(self, rows: Rows, context: Sequence[int]) -> tuple[list[int], bytes]:
        counts, bits = super()._get_masks(rows, context)
        root = self._rules.rows[0]
        if root.opening is None or root.length > root.start:
            return counts, bits
        place, bit = root.opening >> 3, 1 << (root.opening & 7)
        is_new = not bits[place] & bit
        mask = bits[:place] + bytes([bits[place] | bit]) + bits[place + 1 :]
        return [counts[0] + is_new, *counts[1:]], mask
