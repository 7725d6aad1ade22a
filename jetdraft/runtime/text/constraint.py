"""Constraints on a text: a JSON schema, a regular expression or a grammar.

The work is done by the library llguidance, which is an optional dependency.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetdraft.errors import OptionError
from jetdraft.runtime.text.matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_ITEMS, MOST_STATES = 500, 50_000
"""Limits of the library's parser and lexer; a state takes up to 2 kB."""

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, with the spaces that are usual. The "x-guidance" of a schema
overrides this."""


@dataclass(frozen=True)
class Constraint:
    """A `kind` ("JSON schema", "regex", or "grammar" in Lark's syntax) and its source.

    Constraint("regex", "[0-9]+ km")
    """

    kind: str
    source: str

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
        """The constraint of the one option that is set; None if no option is set.

        Raises `OptionError` if several are set or the source is not a text.
        """
        if isinstance(json_schema, Mapping):
            json_schema = json.dumps(json_schema)
        options = {"JSON schema": json_schema, "regex": regex, "grammar": grammar}
        sources = {kind: text for kind, text in options.items() if text is not None}
        for kind, source in sources.items():
            field = kind.lower().replace(" ", "_")
            if len(sources) > 1:
                names = " and ".join(sources)
                raise OptionError(f"{names} exclude each other; give one", field)
            if not isinstance(source, str) or not _is_encodable(source):
                raise OptionError(
                    f"the {kind} {source!r} is not a text; give a text", field
                )
            return cls(kind, source)
        return None


class Vocabulary:
    """The tokenizer as the library needs it; `ends` are the ids that end a text.

    Raises `OptionError` if the library is missing or cannot use the tokenizer.

        Vocabulary(bundle.tokenizer, 4096, [0]).matcher(constraint, len(prompt))
    """

    def __init__(self, tokenizer: Path | None, size: int, ends: list[int]) -> None:
        self.size, self.ends = size, frozenset(ends)
        if tokenizer is None or not ends:
            missing = "tokenizer" if tokenizer is None else "end-of-text token"
            raise OptionError(
                f"the bundle has no {missing}, so its texts cannot be constrained; "
                f"export a checkpoint with a {missing}",
                "constraint",
            )
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise OptionError(
                "constraints need llguidance; pip install 'jetdraft[structured]'",
                "constraint",
            ) from error
        try:
            text = tokenizer.read_text(encoding="utf-8")
            self._tokenizer: LLTokenizer = LLTokenizer(text, size, ends)
        except (OSError, ValueError) as error:
            raise OptionError(
                f"texts of this tokenizer cannot be constrained ({error}); use a "
                "model with a byte-level or sentencepiece tokenizer",
                "constraint",
            ) from error

    def matcher(self, constraint: Constraint, start: int) -> Matcher:
        """A matcher for the text after a prompt of `start` tokens.

        Raises `OptionError` if the library refuses the constraint.
        """
        inner = self._library_matcher(constraint)
        if problem := inner.get_error():
            raise OptionError(self._explained(constraint, problem), constraint.field)
        return Matcher(inner, self.size, self.ends, start)

    def _library_matcher(self, constraint: Constraint) -> LLMatcher:
        """The library's matcher; its `get_error` says what is wrong with the source."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=MOST_ITEMS,
            max_lexer_states=MOST_STATES,
            verbose_errors=False,
        )
        return LLMatcher(
            self._tokenizer, _compiled(constraint), log_level=0, limits=limits
        )

    def _explained(self, constraint: Constraint, problem: str) -> str:
        """One line that says what is wrong, and where."""
        if constraint.kind == "JSON schema":
            where = self._path(json.loads(constraint.source), problem) or "its root"
            return f"the JSON schema is refused at {where}: {_line(problem)}; change it"
        lines = problem.splitlines()
        where = lines[0].rstrip(":").removeprefix("at ")
        caret_lines = (line for line in lines[1:] if line and not line.strip(" ^"))
        caret = next(caret_lines, None)
        if constraint.kind == "regex" and caret is not None:
            # The library indents the expression by four spaces.
            where = f"character {caret.index('^') - 3}: {_line(problem)}"
        return f"the {constraint.kind} is refused at {where}; fix it"

    def _path(self, schema: Any, problem: str) -> str:
        """The path to the innermost part of a schema that has the same problem."""
        for path, part in _parts(schema):
            inner = self._library_matcher(Constraint("JSON schema", json.dumps(part)))
            if inner.get_error() == problem:
                return path + self._path(part, problem)
        return ""


def _is_encodable(text: str) -> bool:
    """Whether the text has no lone surrogate, which UTF-8 cannot encode."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _compiled(constraint: Constraint) -> str:
    """The grammar of a constraint, in the library's form."""
    from llguidance import LLMatcher

    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.source)
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(constraint.source)
    try:
        schema = json.loads(constraint.source)
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"the JSON schema is not JSON ({error}); fix it", constraint.field
        ) from error
    if not isinstance(schema, dict):
        raise OptionError(
            "the JSON schema is not an object; give an object, for example {} for any "
            "JSON",
            constraint.field,
        )
    guidance = schema.get("x-guidance", {})
    if not isinstance(guidance, dict):
        raise OptionError(
            'the "x-guidance" of the JSON schema is not an object; fix it',
            constraint.field,
        )
    schema = {**schema, "x-guidance": {**SPACING, **guidance}}
    return LLMatcher.grammar_from_json_schema(schema)


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, as pairs of a path and a schema."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        has_names = key in ("properties", "$defs", "definitions", "patternProperties")
        if isinstance(value, list):
            parts = {f"/{key}/{index}": part for index, part in enumerate(value)}
        elif has_names and isinstance(value, dict):
            parts = {f"/{key}/{name}": part for name, part in value.items()}
        else:
            parts = {f"/{key}": value}
        yield from (item for item in parts.items() if isinstance(item[1], dict))


def _line(problem: str) -> str:
    """The line of the library's message that says what is wrong."""
    lines = problem.splitlines()
    return next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
