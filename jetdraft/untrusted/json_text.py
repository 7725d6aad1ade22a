"""JSON of strangers: limits of size and depth, and values that can be passed on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jetdraft.untrusted.printable import printable

_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
"""A whole string, so that the brackets in it do not count, or one bracket."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_DIGITS, _EXACT_DIGITS = 20, 4000
"""No integer of 64 bits has more characters, and Python reads few more of them."""
_LEAST, _MOST = -(2**63), 2**64 - 1


class JsonError(ValueError):
    """A text is not JSON, or JSON beyond the limits of `read_json`."""


def read_json(
    data: bytes | bytearray | str,
    *,
    most_bytes: int = 1_000_000,
    most_depth: int = 64,
    exact: bool = False,
) -> Any:
    r"""The value of a JSON text that may have been written to do harm.

    Raises `JsonError` for more than `most_bytes` of UTF-8, for arrays and objects
    nested deeper than `most_depth`, and for what JSON or other programs cannot
    hold: NaN and infinite numbers, integers beyond 64 bits unless `exact`, lone
    surrogates, and objects with the same key twice. Checks the depth before it parses.

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
            parse_int=_exact_integer if exact else _integer,
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


def read_json_file(file: Path, most_bytes: int = 1_000_000, exact: bool = False) -> Any:
    """The value in a JSON file, see `read_json`; raises `OSError` or `JsonError`.

    Reads no more than `most_bytes`, and no device or pipe, which might never end.

    read_json_file(Path("bundle/bundle.json"))
    """
    if file.exists() and not file.is_file():
        raise JsonError("no regular file")
    with file.open("rb") as handle:
        data = handle.read(most_bytes + 1)
    return read_json(data, most_bytes=most_bytes, exact=exact)


_LIMITS = ("const", "enum", "minimum", "maximum", "multipleOf")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_NAMED = (
    *("properties", "patternProperties", "$defs", "definitions"),
    *("dependentSchemas", "dependencies"),
)
"""Keywords of a JSON schema whose objects have names for keys."""
_DATA = ("default", "examples")


def rounded(part: Any, keyword: str = "", is_named: bool = False) -> float | None:
    """The first whole number of a JSON schema that llguidance does not keep exactly.

    It reads limits as float64 and then as int64, and adds 1 to exclusive ones.
    `keyword` is what limits numbers by `part`, if anything does; the keys of `part`
    are names and not keywords if `is_named`.

    rounded({"maximum": 2**53 + 1})    # 9007199254740993
    """
    if isinstance(part, int) and keyword:
        kept = min(int(float(part)), 2**63 - 1)
        is_kept = abs(part) < 2**53 if keyword in _EXCLUSIVE else kept == part > _LEAST
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
        number = rounded(item, limit, not limit and key in _NAMED)
        if number is not None:
            return number
    return None


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


def _exact_integer(digits: str) -> int:
    if len(digits) > _EXACT_DIGITS:
        raise JsonError(f"an integer has {len(digits)} digits")
    return int(digits)


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
