"""Reads how a checkpoint says that its text is chosen: generation_config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import transformers

from jetdraft.bundle import Defaults
from jetdraft.checkpoints.reading.fields import (
    GENERATION,
    HEARING,
    SAMPLED,
    SOURCES,
    by_name,
    passed_over,
)
from jetdraft.errors import CheckpointError
from jetdraft.parsing import RecordError, read_json_file, read_record

FILE, CONFIG = "generation_config.json", "config.json"

NEVER = -1e30
"""The bias of a token that is never written."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1 - 1e-9),
    "repetition_penalty": (1e-9, 100.0),
}


def read_defaults(source: str) -> Defaults:
    """The defaults of a local folder or a hub id, see `Generation`.

    read_defaults("target/")  # {"temperature": 0.6, "top_k": 50, "top_p": 0.95}
    """
    return Generation.read(source).defaults()


@dataclass(frozen=True)
class Generation:
    """The fields of a checkpoint that choose its text, and the file that has them.

    Generation.read("target/").defaults()    # {"temperature": 0.6, "top_p": 0.95, ...}
    """

    source: str
    file: str = FILE
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, source: str) -> Generation:
        """The fields of a local folder or a hub id.

        As in transformers, config.json has them where generation_config.json is
        missing. Raises `CheckpointError` for a file that cannot be read, and for a
        value that is not a number in its range.
        """
        file = transformers.utils.cached_file(
            source, FILE, _raise_exceptions_for_missing_entries=False
        )
        if file is None:
            said, _ = transformers.PreTrainedConfig.get_config_dict(source)
            known = by_name(GENERATION)
            fields = {name: value for name, value in said.items() if name in known}
            found = cls(source, CONFIG, fields)
        else:
            try:
                found = cls(source, FILE, dict(read_json_file(Path(file))))
            except (OSError, ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{FILE} of {source} cannot be read ({error}); fetch it again"
                ) from error
        found.defaults()  # refuses bad values before any weight is read
        return found

    def defaults(
        self, vocab_size: int = 0, ends: Iterable[int] = (), hears: bool = False
    ) -> Defaults:
        """The options that the fields stand for; empty without any.

        Of tokens that are never written, those in the vocabulary count, and no end of
        text; a model that hears has rules for them. Raises `CheckpointError`.
        """
        fields, options = self.fields, dict[str, Any]()
        if fields.get("do_sample") is True:
            # transformers' defaults; it has none for the other filters
            options = {"temperature": 1.0, "top_k": 50}
            options |= {n: fields[n] for n in _SAMPLING if fields.get(n) is not None}
        name = "repetition_penalty"
        if fields.get(name) not in (None, 1):
            options[name] = fields[name]
        for name, value in options.items():
            self._check(name, value)
        stops = [text for text in self._listed("stop_strings", list[str]) if text]
        never = self._listed("suppress_tokens", list[int])
        words = self._listed("bad_words_ids", list[list[int]])
        never += [word[0] for word in words if len(word) == 1 and word[0] not in ends]
        if hears:
            return cast(Defaults, options)
        if stops:
            options["stop"] = stops
        if never := sorted({id for id in never if 0 <= id < vocab_size}):
            options["logit_bias"] = dict.fromkeys(never, NEVER)
        return cast(Defaults, options)

    def passed_over(self, reads_source: bool, hears: bool) -> tuple[str, ...]:
        """A line for each field that would change the text, and does not."""
        sampled = self.fields.get("do_sample") is True
        tables = (
            *(GENERATION, SAMPLED if sampled else ()),
            *(SOURCES if reads_source else (), HEARING if hears else ()),
        )
        return tuple(passed_over(self.file, self.fields, by_name(*tables)))

    def _listed(self, name: str, kind: Any) -> Any:
        """A list, maybe of one text that stands alone; raises `CheckpointError`."""
        value = self.fields.get(name)
        value = [value] if isinstance(value, str) else value
        try:
            return read_record(kind, [] if value is None else value, name)
        except RecordError as error:
            raise self._wrong(f"is malformed ({error})") from error

    def _check(self, name: str, value: Any) -> None:
        """Raise `CheckpointError` unless the value is a number in its range."""
        least, most = _RANGES[name]
        kinds = (int,) if name == "top_k" else (int, float)
        if type(value) not in kinds or not least <= value <= most:
            raise self._wrong(f"has {name} {value!r}, which is out of range")

    def _wrong(self, fact: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file} of {self.source} {fact}; correct or remove it"
        )
