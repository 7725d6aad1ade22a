"""Reads the sampling defaults in the generation_config.json of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from jetdraft.errors import CheckpointError
from jetdraft.untrusted.json_text import read_json_file

FILE = "generation_config.json"

_SAMPLING = ("temperature", "top_p", "top_k")
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 1 << 31),
    "repetition_penalty": (1e-9, 100.0),
}


def read_defaults(source: str) -> dict[str, float]:
    """The defaults of a local folder or a hub id, by option; empty without a file.

    `temperature`, `top_p` and `top_k` count only if `do_sample` is true, since other
    checkpoints decode greedily. If the file then has no temperature, it is 1 as in
    transformers. A `repetition_penalty` of 1 is left out. Raises `CheckpointError` for
    a file that cannot be read, and for a value that is not a number in its range.

        read_defaults("target/")  # {"temperature": 0.6, "top_p": 0.95}
    """
    file = transformers.utils.cached_file(
        source, FILE, _raise_exceptions_for_missing_entries=False
    )
    if file is None:
        return {}
    try:
        fields = dict(read_json_file(Path(file)))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{FILE} of {source} cannot be read ({error}); fetch it again"
        ) from error
    defaults: dict[str, float] = {}
    if fields.get("do_sample") is True:
        defaults["temperature"] = 1.0
        defaults |= {name: fields[name] for name in _SAMPLING if _is_set(fields, name)}
    name = "repetition_penalty"
    if _is_set(fields, name) and fields[name] != 1:
        defaults[name] = fields[name]
    for name, value in defaults.items():
        _check(source, name, value)
    return defaults


def _is_set(fields: dict[str, Any], name: str) -> bool:
    return fields.get(name) is not None


def _check(source: str, name: str, value: Any) -> None:
    """Raise `CheckpointError` unless the value is a number in its range."""
    least, most = _RANGES[name]
    kinds = (int,) if name == "top_k" else (int, float)
    if type(value) not in kinds or not least <= value <= most:
        raise CheckpointError(
            f"{FILE} of {source} has {name} {value!r}, which is out of range; correct "
            "or remove it"
        )
