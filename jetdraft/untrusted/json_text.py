"""JSON of strangers: limits of size and depth, and values that can be passed on."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jetdraft.untrusted.printable import printable

_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
"""A whole string, so that the brackets in it do not count, or one bracket."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_DIGITS = 20
"""No integer of 64 bits has more characters."""
_LEAST, _MOST = -(2**63), 2**64 - 1


class JsonError(ValueError):
    """A text is not JSON, or JSON beyond the limits of `read_json`."""


def read_json(
    data: bytes | bytearray | str, *, most_bytes: int = 1_000_000, most_depth: int = 64
) -> Any:
    r"""The value of a JSON text that may have been written to do harm.

    Raises `JsonError` for more than `most_bytes` of UTF-8, for arrays and objects
    nested deeper than `most_depth`, and for what JSON or other programs cannot
    hold: NaN and infinite numbers, integers beyond 64 bits, lone surrogates, and
    objects with the same key twice. Checks the depth before it parses.

    read_json(b'{"n": [1, 2]}')    # {"n": [1, 2]}
    read_json("[1e999]")           # JsonError: a number is too large: 1e999
    """
    if len(data) > most_bytes:
        raise JsonError(f"more than {most_bytes} bytes")
    text = _utf8(data, most_bytes)
    _check_depth(text, most_depth)
    try:
        value = json.loads(
            text,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
            object_pairs_hook=_object,
        )
    except json.JSONDecodeError as error:
        raise JsonError(
            f"no valid JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from error
    except RecursionError as error:
        raise JsonError("nested too deeply") from error
    if _SURROGATE.search(text):
        _check_text(value)
    return value


def _utf8(data: bytes | bytearray | str, most_bytes: int) -> str:
    try:
        if not isinstance(data, str):
            return data.decode("utf-8")
        if len(data.encode("utf-8")) > most_bytes:
            raise JsonError(f"more than {most_bytes} bytes")
    except UnicodeError as error:
        raise JsonError("no valid UTF-8") from error
    return data


def _check_depth(text: str, most_depth: int) -> None:
    if text.count("[") + text.count("{") <= most_depth:
        return
    depth = 0
    for match in _BRACKETS.finditer(text):
        if match[0] in "[{":
            depth += 1
        elif match[0] in "]}":
            depth -= 1
        if depth > most_depth:
            raise JsonError(f"nested deeper than {most_depth} levels")


def _check_text(value: Any) -> None:
    """Escapes may have made lone surrogates, which no file and no answer can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise JsonError("a text has a lone surrogate") from error


def _integer(digits: str) -> int:
    # Python refuses thousands of digits with an error of its own.
    if len(digits) <= _DIGITS and _LEAST <= int(digits) <= _MOST:
        return int(digits)
    raise JsonError(f"an integer does not fit in 64 bits: {printable(digits, 40)}")


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise JsonError(f"a number is too large: {printable(digits, 40)}")
    return value


def _constant(name: str) -> float:
    raise JsonError(f"{name} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise JsonError("an object has the same key twice")
    return fields
