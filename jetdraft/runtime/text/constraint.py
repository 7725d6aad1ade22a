"""What a text must be: JSON of a schema, a regular expression's or a grammar's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetdraft.errors import ConstraintError, OptionError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from jetdraft.runtime.text.matcher import Matcher

MOST_ITEMS, MOST_STATES = 500, 50_000
"""Of the library's parser and lexer; the states take up to 2 kB each."""

SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""As most JSON is written on one line. A schema's own "x-guidance" goes before."""


@dataclass(frozen=True)
class Constraint:
    """A `kind` ("JSON schema", "regex" or "grammar", which is Lark's) and its source.

    Constraint("regex", "[0-9]+ km")
    """

    kind: str
    source: str

    @classmethod
    def of(
        cls,
        json_schema: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> Constraint | None:
        """The one that was asked for; `OptionError` where there are several."""
        if isinstance(json_schema, Mapping):
            json_schema = json.dumps(json_schema)
        asked = {"JSON schema": json_schema, "regex": regex, "grammar": grammar}
        given = {kind: text for kind, text in asked.items() if text is not None}
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} exclude each other; give one")
        for kind, source in given.items():
            if not isinstance(source, str) or not _is_whole(source):
                raise OptionError(f"the {kind} {source!r} is not a text; give one")
            return cls(kind, source)
        return None


class Vocabulary:
    """A tokenizer as the constraint library knows it; `ends` are end-of-text ids.

    Raises `ConstraintError` where it cannot, or where the library is missing.

        Vocabulary(bundle.tokenizer, 4096, [0]).matcher(constraint, len(prompt))
    """

    def __init__(self, tokenizer: Path | None, size: int, ends: list[int]) -> None:
        self.size, self.ends = size, frozenset(ends)
        if tokenizer is None or not ends:
            missing = "tokenizer" if tokenizer is None else "end-of-text token"
            raise ConstraintError(
                f"the bundle has no {missing}, so no text of it can be constrained; "
                "export a checkpoint that has one"
            )
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ConstraintError(
                "constraints need llguidance; pip install 'jetdraft[structured]'"
            ) from error
        try:
            text = tokenizer.read_text(encoding="utf-8")
            self._tokenizer: LLTokenizer = LLTokenizer(text, size, ends)
        except (OSError, ValueError) as error:
            raise ConstraintError(
                f"texts of this tokenizer cannot be constrained ({error}); use a "
                "model with a byte-level or sentencepiece one"
            ) from error

    def matcher(self, constraint: Constraint, start: int) -> Matcher:
        """For what follows a prompt of `start` tokens; raises `ConstraintError`."""
        from jetdraft.runtime.text.matcher import Matcher

        inner = self._inner(constraint)
        if wrong := inner.get_error():
            raise ConstraintError(self._explained(constraint, wrong))
        return Matcher(inner, self.size, self.ends, start)

    def _inner(self, constraint: Constraint) -> LLMatcher:
        """The library's own, which may be in error."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=MOST_ITEMS,
            max_lexer_states=MOST_STATES,
            verbose_errors=False,
        )
        return LLMatcher(
            self._tokenizer, _compiled(constraint), log_level=0, limits=limits
        )

    def _explained(self, constraint: Constraint, wrong: str) -> str:
        """One line that points at the place."""
        if constraint.kind == "JSON schema":
            where = self._place(json.loads(constraint.source), wrong) or "its root"
            return f"the JSON schema is refused at {where}: {_line(wrong)}; change it"
        lines = wrong.splitlines()
        what = lines[0].rstrip(":")
        caret = next((at for at in lines[1:] if at.strip(" ^") == "" and at), None)
        if constraint.kind == "regex" and caret is not None:
            # The library shows the expression four spaces in.
            what = f"character {caret.index('^') - 3}: {_line(wrong)}"
        return (
            f"the {constraint.kind} is refused at {what.removeprefix('at ')}; mend it"
        )

    def _place(self, schema: Any, wrong: str) -> str:
        """The path to the innermost part of a schema that is refused for this."""
        for path, part in _parts(schema):
            inner = self._inner(Constraint("JSON schema", json.dumps(part)))
            if inner.get_error() == wrong:
                return path + self._place(part, wrong)
        return ""


def _is_whole(text: str) -> bool:
    """Whether all of its characters are."""
    return text.isascii() or not any("\ud800" <= each <= "\udfff" for each in text)


def _compiled(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.source)
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(constraint.source)
    try:
        schema = json.loads(constraint.source)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(
            f"the JSON schema is not JSON ({error}); mend it"
        ) from error
    if not isinstance(schema, dict):
        raise ConstraintError("the JSON schema is no object; give one, as {} for any")
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise ConstraintError('the JSON schema\'s "x-guidance" is no object; mend it')
    schema = {**schema, "x-guidance": {**SPACING, **own}}
    return LLMatcher.grammar_from_json_schema(schema)


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas right inside of one, and the way to them."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        named = key in ("properties", "$defs", "definitions", "patternProperties")
        if isinstance(value, list):
            inside = {f"/{key}/{at}": part for at, part in enumerate(value)}
        elif named and isinstance(value, dict):
            inside = {f"/{key}/{name}": part for name, part in value.items()}
        else:
            inside = {f"/{key}": value}
        yield from ((at, part) for at, part in inside.items() if isinstance(part, dict))


def _line(wrong: str) -> str:
    """What a message of several lines comes down to."""
    lines = wrong.splitlines()
    return next((e[7:] for e in lines if e.startswith("error: ")), lines[0])
