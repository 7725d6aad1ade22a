"""Constraints on a text: a JSON schema, a regular expression or a grammar.

The work is done by the library llguidance, which is an optional dependency, in a
process apart; see worker.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jetdraft.errors import OptionError
from jetdraft.untrusted.json_text import JsonError, read_json, rounded


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
            try:
                json_schema = json.dumps(json_schema)
            except (TypeError, ValueError, RecursionError) as error:
                raise _no_json(error) from error
        options = {"JSON schema": json_schema, "regex": regex, "grammar": grammar}
        sources = {kind: text for kind, text in options.items() if text is not None}
        for kind, source in sources.items():
            field = kind.lower().replace(" ", "_")
            if len(sources) > 1:
                names = " and ".join(sources)
                raise OptionError(f"{names} exclude each other; give one", field)
            return cls(kind, source)
        return None

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
    if (found := rounded(schema)) is not None:
        raise OptionError(
            f"the schema's number {found} cannot be kept exactly; give a number below "
            "2^53 or a text",
            field,
        )


def _no_json(problem: object) -> OptionError:
    return OptionError(
        f"the JSON schema is not JSON ({problem}); fix it", "json_schema"
    )


def _is_encodable(text: str) -> bool:
    """Whether the text has no lone surrogate, which UTF-8 cannot encode."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
