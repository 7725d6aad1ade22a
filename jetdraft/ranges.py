"""Numbers that options allow, as tables that say what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from jetdraft.errors import OptionError


class Range(NamedTuple):
    """The numbers that an option allows, and the words for them."""

    contains: Callable[[Any], bool]
    words: str
    integer: bool = False
    optional: bool = False


def between(least: float, most: float, optional: bool = False) -> Range:
    """The numbers from `least` to `most`, integers where both are integers."""
    words, integer = f"{least:g} to {most:g}", isinstance(least, int)
    return Range(lambda x: least <= x <= most, words, integer, optional)


def check_flags(options: object, *fields: str) -> None:
    """Raise `OptionError` for the first of these attributes that is not a bool."""
    for field in fields:
        value = getattr(options, field)
        if not isinstance(value, bool):
            raise OptionError(
                f"{field} {value!r} is not true or false; give True or False", field
            )


def check_ranges(options: object, ranges: Mapping[str, Range]) -> None:
    """Raise `OptionError` for the first attribute of `options` outside its range."""
    for field, allowed in ranges.items():
        value = getattr(options, field)
        if value is None and allowed.optional:
            continue
        kind = Integral if allowed.integer else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            words = "an integer" if allowed.integer else "a number"
            raise OptionError(f"{field} {value!r} is not {words}; give {words}", field)
        if not allowed.contains(value):
            name = field.replace("_", " ")
            raise OptionError(
                f"{name} {value} is out of range; give {allowed.words}", field
            )
