"""JSON as the types that a program declares: dataclasses, typed dicts, and ranges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from jetdraft.untrusted.printable import printable

MOST_SIZE = 2**31 - 1
"""The largest number of rows, tokens or bytes per row that graphs can address."""


class RecordError(ValueError):
    """A value does not have the declared type, or is out of range; says where."""


@dataclass(frozen=True)
class Rule:
    """What values must be, beside their type; for `Annotated`.

    Even = Annotated[int, Rule("even", lambda n: n % 2 == 0)]
    """

    words: str
    holds: Callable[[Any], bool]


def in_range(least: float, most: float) -> Rule:
    """The numbers from `least` to `most`.

    Width = Annotated[int, in_range(1, 16)]
    """
    return Rule(f"{least} to {most}", lambda value: least <= value <= most)


def one_of(*choices: object) -> Rule:
    """The values in `choices`.

    Flavour = Annotated[str, one_of("contrib", "standard")]
    """
    words = "one of " + ", ".join(map(str, choices))
    return Rule(words, lambda value: value in choices)


Count = Annotated[int, in_range(0, MOST_SIZE)]
Size = Annotated[int, in_range(1, MOST_SIZE)]


def read_record(hint: Any, value: Any, where: str = "") -> Any:
    """A value of JSON as the declared type; `where` names it in errors.

    A type is str, int, float or bool, a dataclass or a `TypedDict`, `X | None`, list,
    tuple or dict of types, or one of these `Annotated` with a `Rule`, or with a type
    to read it as too. An object must have all fields that its class declares without
    a default, and none that it does not declare. Numbers are finite. The keys of a
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
                raise _wrong(where, rule.words, value)
        return value
    if origin in (Union, UnionType):
        [kind] = (kind for kind in types if kind is not NoneType)
        return None if value is None else read_record(kind, value, where)
    if origin in (tuple, list):
        return _items(hint, value, where)
    if origin is dict:
        return _entries(hint, value, where)
    if is_dataclass(hint) or is_typeddict(hint):
        return hint(**read_fields(hint, value, where))
    return _plain(hint, value, where)


def read_fields(kind: Any, value: Any, where: str = "", but: str = "") -> Any:
    """The fields of a dataclass or `TypedDict` in a JSON object, without field `but`.

    Bundle(path=folder, **read_fields(Bundle, manifest, but="path"))
    """
    hints = {name: hint for name, hint in _hints(kind).items() if name != but}
    fields = _object(value, where)
    for name in _required(kind) & hints.keys():
        if name not in fields:
            raise RecordError(f"{_inside(where, name)} is missing")
    for name in fields:
        if name not in hints:
            raise RecordError(f"{_inside(where, name)} is unknown")
    return {
        name: read_record(hints[name], field, _inside(where, name))
        for name, field in fields.items()
    }


@cache
def _required(kind: Any) -> frozenset[str]:
    if is_typeddict(kind):
        return frozenset(kind.__required_keys__)
    return frozenset(
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is MISSING
    )


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _items(hint: Any, value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    kind, types = get_origin(hint), get_args(hint)
    if kind is tuple and types[-1] is not Ellipsis:
        if len(value) != len(types):
            raise _wrong(where, f"a list of {len(types)}", value)
    else:
        types = types[:1] * len(value)
    places = (f"{where}[{place}]" for place in range(len(value)))
    return kind(map(read_record, types, value, places))


def _entries(hint: Any, value: Any, where: str) -> dict[Any, Any]:
    key_kind, kind = get_args(hint)
    entries: dict[Any, Any] = {}
    for key, entry in _object(value, where).items():
        place = _inside(where, key)
        name = read_record(key_kind, _key(key_kind, key, place), place)
        entries[name] = read_record(kind, entry, place)
    return entries


def _key(kind: Any, key: str, where: str) -> str | int:
    """A key as the type of keys; JSON turned numbers into text."""
    if kind is str or get_args(kind)[:1] == (str,):
        return key
    if key.isascii() and key.isdigit() and len(key) < 10:
        return int(key)
    raise _wrong(where, "a number", key)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    return value


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    # A bool is an int, and an int is a float, unless somebody asks for the type.
    if type(value) is kind or (kind is float and type(value) is int):
        if kind is float and not math.isfinite(value):
            raise _wrong(where, "a finite number", value)
        return value
    words = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
    raise _wrong(where, words[kind], value)


def _inside(where: str, name: str) -> str:
    name = printable(name, 60)
    return f"{where}.{name}" if where else name


def _wrong(where: str, words: str, value: Any) -> RecordError:
    shown = printable(repr(value), 40)
    return RecordError(f"{where or 'it'} must be {words}, not {shown}")
