"""Untrusted JSON: read within limits, then as the types that a program declares."""

import dataclasses
import json
import math
import re
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints, is_typeddict

from jetdraft.errors import printable

# A whole string, so that the brackets in it do not count, or one bracket.
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # One half of a surrogate pair.
# The most characters of an integer of 64 bits, and of an `exact` integer.
_MAX_DIGITS, _MAX_EXACT_DIGITS = 20, 4000
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
MAX_SIZE = 2**31 - 1  # Of rows, tokens or bytes that graphs can address.


class JsonError(ValueError):
    """A text is not JSON, or JSON beyond the limits of `read_json`."""


class RecordError(ValueError):
    """A value does not have the declared type, or is out of range; says where."""


def read_json(
    data: bytes | bytearray | str,
    *,
    most_bytes: int = 1_000_000,
    most_depth: int = 64,
    exact: bool = False,
    infinite: bool = False,
) -> Any:
    """Return the value of an untrusted JSON text.

    Raises `JsonError` for more than `most_bytes` of UTF-8, for arrays and objects
    nested deeper than `most_depth`, and for what JSON or other programs cannot
    hold: NaN and Infinity unless `infinite`, integers beyond 64 bits unless `exact`,
    lone surrogates, and objects with the same key twice. Checks the depth before it
    parses.

    read_json("[1e999]")           # JsonError: a number is too large: 1e999
    """
    if len(data) > most_bytes:
        raise JsonError(f"more than {most_bytes} bytes")
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        size = len(text.encode("utf-8"))
    except UnicodeError as error:
        raise JsonError("no valid UTF-8") from error
    if size > most_bytes:
        raise JsonError(f"more than {most_bytes} bytes")
    _check_depth(text, most_depth)
    try:
        value = json.loads(
            text,
            parse_int=partial(_parse_integer, exact=exact),
            parse_float=_parse_float,
            parse_constant=float if infinite else _refuse_constant,
            object_pairs_hook=_unique_fields,
        )
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise JsonError(f"no valid JSON: {error.msg} in {place}") from error
    except RecursionError as error:
        raise JsonError("nested too deeply") from error
    if _SURROGATE.search(text):
        try:  # no file and no answer can hold a lone surrogate
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeError as error:
            raise JsonError("a text has a lone surrogate") from error
    return value


def read_json_file(
    file: Path, most_bytes: int = 1_000_000, exact: bool = False, infinite: bool = False
) -> Any:
    """Read a JSON file, but no device, as `read_json` does; `OSError`, `JsonError`."""
    if file.exists() and not file.is_file():
        raise JsonError("no regular file")
    with file.open("rb") as handle:
        data = handle.read(most_bytes + 1)
    return read_json(data, most_bytes=most_bytes, exact=exact, infinite=infinite)


def _check_depth(text: str, most_depth: int) -> None:
    """Raise `JsonError` for arrays and objects nested deeper than `most_depth`."""
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


def _parse_integer(digits: str, exact: bool) -> int:
    """Parse an integer; raises `JsonError` unless it is `exact` or fits in 64 bits."""
    # Python refuses thousands of digits with an error of its own.
    if len(digits) > _MAX_EXACT_DIGITS and exact:
        raise JsonError(f"an integer has {len(digits)} digits")
    fits = len(digits) <= _MAX_DIGITS and _MIN_INTEGER <= int(digits) <= _MAX_INTEGER
    if not (fits or exact):
        raise JsonError(f"an integer does not fit in 64 bits: {printable(digits, 40)}")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise JsonError(f"a number is too large: {printable(digits, 40)}")
    return value


def _refuse_constant(name: str) -> float:
    """Raise `JsonError`: Python reads NaN and Infinity, which JSON does not have."""
    raise JsonError(f"{name} is not a number in JSON")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's pairs as a dict; raises `JsonError` for a repeated key."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise JsonError("an object has the same key twice")
    return fields


@dataclass(frozen=True)
class Rule:
    """A condition in an `Annotated` type; `words` say it in an error."""

    words: str
    holds: Callable[[Any], bool] = dataclasses.field(repr=False)


def in_range(least: float, most: float) -> Rule:
    return Rule(f"{least} to {most}", lambda value: least <= value <= most)


def one_of(*choices: object) -> Rule:
    words = "one of " + ", ".join(map(str, choices))
    return Rule(words, lambda value: value in choices)


Count = Annotated[int, in_range(0, MAX_SIZE)]
Size = Annotated[int, in_range(1, MAX_SIZE)]


def read_record(hint: Any, value: Any, where: str = "") -> Any:
    """Convert a JSON value to the type `hint`; `where` names it in errors.

    A type is str, int, float or bool, a dataclass or a `TypedDict`, `X | None`, list,
    tuple or dict of types, or any of them `Annotated` with a `Rule`, or with a second
    type to read the value as. An object must have all fields that its class declares
    without a default, and no undeclared field. Numbers are finite. The keys of a
    `dict[int, X]` are digits. Raises `RecordError`.

        read_record(tuple[Size, ...], [1, 2])    # (1, 2)
    """
    origin, types = get_origin(hint), get_args(hint)
    if origin is Annotated:
        value = read_record(types[0], value, where)
        for rule in types[1:]:
            if not isinstance(rule, Rule):
                value = read_record(rule, value, where)
            elif not rule.holds(value):
                raise _record_error(where, rule.words, value)
        return value
    if origin in (typing.Union, UnionType):
        [kind] = (kind for kind in types if kind is not NoneType)
        return None if value is None else read_record(kind, value, where)
    if origin in (tuple, list):
        return _read_list(hint, value, where)
    if origin is dict:
        return _read_dict(hint, value, where)
    if is_dataclass(hint) or is_typeddict(hint):
        return hint(**read_fields(hint, value, where))
    return _read_scalar(hint, value, where)


def read_fields(kind: Any, value: Any, where: str = "", without: str = "") -> Any:
    """Read a JSON object as fields of a dataclass or `TypedDict`, `without` a field."""
    hints = {name: hint for name, hint in _field_hints(kind).items() if name != without}
    fields = _check_object(value, where)
    for name in _required_fields(kind) & hints.keys():
        if name not in fields:
            raise RecordError(f"{_path_of_field(where, name)} is missing")
    for name in fields:
        if name not in hints:
            raise RecordError(f"{_path_of_field(where, name)} is unknown")
    places = {name: _path_of_field(where, name) for name in fields}
    return {n: read_record(hints[n], fields[n], place) for n, place in places.items()}


_field_hints = cache(partial(get_type_hints, include_extras=True))


@cache
def _required_fields(kind: Any) -> frozenset[str]:
    """Return the names of a dataclass's or `TypedDict`'s fields without a default."""
    if is_typeddict(kind):
        return frozenset(kind.__required_keys__)
    fields = dataclasses.fields(kind)
    required = [f for f in fields if f.default is f.default_factory is MISSING]
    return frozenset(field.name for field in required)


def _read_list(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise _record_error(where, "a list", value)
    kind, types = get_origin(hint), get_args(hint)
    if kind is tuple and types[-1] is not Ellipsis:
        if len(value) != len(types):
            raise _record_error(where, f"a list of {len(types)}", value)
    else:
        types = types[:1] * len(value)
    places = (f"{where}[{place}]" for place in range(len(value)))
    return kind(map(read_record, types, value, places))


def _read_dict(hint: Any, value: Any, where: str) -> dict[Any, Any]:
    key_kind, kind = get_args(hint)
    entries: dict[Any, Any] = {}
    for key, entry in _check_object(value, where).items():
        place = _path_of_field(where, key)
        name: Any = key
        if key_kind is not str and get_args(key_kind)[:1] != (str,):
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise _record_error(place, "a number", key)
            name = int(key)
        entries[read_record(key_kind, name, place)] = read_record(kind, entry, place)
    return entries


def _check_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _record_error(where, "an object", value)
    return value


def _read_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    # A bool is an int, and an int is a float, unless the exact type is compared.
    if type(value) is kind or (kind is float and type(value) is int):
        if kind is float and not math.isfinite(value):
            raise _record_error(where, "a finite number", value)
        return value
    words = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
    raise _record_error(where, words[kind], value)


def _path_of_field(where: str, name: str) -> str:
    """Return a field's path for errors, such as graphs.target.file."""
    name = printable(name, 60)
    return f"{where}.{name}" if where else name


def _record_error(where: str, words: str, value: Any) -> RecordError:
    shown = printable(repr(value), 40)
    return RecordError(f"{where or 'it'} must be {words}, not {shown}")
