"""Options, declared once: a field with a `Flag` is a flag, a keyword, a row of help.

    @dataclass(frozen=True, kw_only=True)
    class PlanOptions:
        context: int = declared("checkpoint", 2048)

The command line makes `--context` of it (`jetdraft.cli.command`), `takes` a Python
function with the keyword `context`, and the function's reference lists its help: a row
"context: Tokens in the buffers." in the docstring of the class, or `help`.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial, wraps
from numbers import Integral, Real
from operator import le, lt
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from jetdraft.errors import OptionError

P = typing.ParamSpec("P")
R = typing.TypeVar("R")
T = typing.TypeVar("T")
# A row of a docstring, such as "context: Tokens", with its further lines.
_ROW = re.compile(r"^(\w+): (.+(?:\n +.+)*)", re.MULTILINE)


@dataclass(frozen=True)
class Flag:
    """What a field's annotation adds to its name, type and default.

    `group` is the section of help. A `help` that names what packages add is a function,
    and without `help` the field has a row in the docstring of its class.
    `names` replace the flag `--name-of-the-field`. A number must be from `least` to
    `most` and larger than `above`; `choices` are all allowed values. `kind` is the type
    on the command line, if the field has several; a `multiple` flag may be given
    several times, as flags of sequences may, and with `commas` it is one list. `unset`
    says in help what happens without the flag.
    """

    group: str
    help: str | Callable[[], str] = ""
    names: Sequence[str] = ()
    metavar: str | None = None
    kind: type | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: Sequence[Any] = ()
    multiple: bool = False
    commas: bool = False
    unset: str = ""
    show_default: bool = True


@dataclass(frozen=True)
class Option:
    """A declared field; `default` is `MISSING` for an option that must be given.

    `row` is the text of its row in the docstring of the class.
    """

    name: str
    kind: type
    multiple: bool
    default: Any
    flag: Flag
    row: str

    @property
    def help(self) -> str:
        """The text of help; calls `flag.help` if it is a function."""
        text = self.flag.help or self.row
        return text if isinstance(text, str) else text()


def declared(group: str, default: Any, help: str = "", **flag: Any) -> Any:
    """A field of a dataclass, with a `Flag` in the section `group` of help."""
    added = {"flag": Flag(group, help, **flag)}
    return dataclasses.field(default=default, metadata=added)


def declared_options(record: type[Any]) -> Iterator[Option]:
    """Yield the fields of a dataclass or `TypedDict` that have a `Flag`, in order."""
    fields = dataclasses.fields(record) if dataclasses.is_dataclass(record) else ()
    named = {field.name: field for field in fields}
    docs = [inspect.cleandoc(kind.__doc__ or "") for kind in reversed(record.__mro__)]
    rows = {row[1]: row[2] for doc in docs for row in _ROW.finditer(doc)}
    for name, hint in get_type_hints(record, include_extras=True).items():
        field = named.get(name)
        base, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if field is not None:
            extras.append(field.metadata.get("flag"))
        for flag in (extra for extra in extras if isinstance(extra, Flag)):
            kind, multiple = _value_type(base)
            default = None if field is None else field.default
            several = multiple or flag.multiple
            row = " ".join(rows.get(name, "").split())
            yield Option(name, flag.kind or kind, several, default, flag, row)


def _value_type(hint: Any) -> tuple[type, bool]:
    """Return the type of a field's single value, and whether it takes several."""
    origin, types = get_origin(hint), get_args(hint)
    if origin in (typing.Union, UnionType):
        kinds = [_value_type(part) for part in types if part is not NoneType]
        several = [kind for kind in kinds if kind[1]]
        return (several or [kind for kind in kinds if kind[0] is Path] or kinds)[0]
    if origin in (tuple, list, Sequence):
        return _value_type(types[0])[0], True
    return hint, False


def takes(record: Callable[P, R]) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Decorate a function of one `record` to take the record's fields as arguments.

    Its signature is the record's, and its docstring ends with a line for each option.

        @takes(ExportRequest)
        def export(request): ...

        export("target/", "bundle", capacity=1024)
    """

    def decorate(function: Callable[[R], T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            return function(record(*args, **options))

        hints, signature = get_type_hints(record), inspect.signature(record)
        returned = get_type_hints(function).get("return", Any)
        parameters = [
            parameter.replace(annotation=hints.get(name, Any))
            for name, parameter in signature.parameters.items()
        ]
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters, return_annotation=returned
        )
        kinds = {each.name: each.annotation for each in parameters}
        call.__annotations__ = kinds | {"return": returned}
        own = declared_options(cast(type, record))
        rows = "\n".join(f"- `{option.name}`: {option.help}" for option in own)
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{rows}"
        return call

    return decorate


class Range(typing.NamedTuple):
    """The numbers that a field may have, in its `Annotated` type, and words for them.

    top_k: Annotated[int, Range(lambda k: k >= 0, "0 (off) or more")] = 0
    """

    contains: Callable[[Any], bool]
    words: str

    def __repr__(self) -> str:
        return f"Range({self.words!r})"


def between(least: float, most: float) -> Range:
    """Return the range from `least` to `most`."""
    return Range(lambda x: least <= x <= most, f"{least:.9g} to {most:.9g}")


def at_least(least: float) -> Range:
    """Return the range from `least` on."""
    return Range(partial(le, least), f"{least:.9g} or more")


def check_range(name: str, value: object, allowed: Range, integer: bool) -> None:
    """Raise `OptionError` for what is no number, or no `integer`, of a range."""
    if isinstance(value, bool) or not isinstance(value, Integral if integer else Real):
        words = "an integer" if integer else "a number"
        raise OptionError(f"{name} {value!r} is not {words}; give {words}", name)
    if not allowed.contains(value):
        fact = f"{name.replace('_', ' ')} {value} is out of range"
        raise OptionError(f"{fact}; give {allowed.words}", name)


def check_fields(record: Any) -> None:
    """Raise `OptionError` for the first field of a dataclass with a wrong value.

    A bool is True or False, a number is in the `Range` of its `Annotated` type or in
    the bounds of its `Flag`, and a `setting` has one of its choices.
    """
    for name, kinds, ranges, choices in _rules(record.__class__):
        value = getattr(record, name)
        if value is None and NoneType in kinds:
            continue
        if kinds == (bool,) and not isinstance(value, bool):
            fact = f"{name} {value!r} is not true or false; give True or False"
            raise OptionError(fact, name)
        for allowed in ranges:
            check_range(name, value, allowed, int in kinds)
        if choices and value not in choices:
            words = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise OptionError(f"unknown {name} {value!r}; choose {words}", name)


@cache
def _rules(kind: type[Any]) -> list[tuple[str, tuple[Any, ...], list[Range], Any]]:
    """The fields of a dataclass: name, types of the value, ranges and choices."""
    rules, hints = [], get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        base, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        ranges = [extra for extra in extras if isinstance(extra, Range)]
        flag, allowed = map(field.metadata.get, ("flag", "allowed"))
        if allowed:
            ranges.append(between(*allowed))
        if flag and flag.above is not None:
            ranges.append(Range(partial(lt, flag.above), f"more than {flag.above:g}"))
        if flag and flag.least is not None:
            ranges.append(at_least(flag.least))
        is_union = get_origin(base) in (typing.Union, UnionType)
        kinds = get_args(base) if is_union else (base,)
        rules.append((field.name, kinds, ranges, field.metadata.get("choices")))
    return rules


def setting(
    default: Any,
    help: str = "",
    allowed: tuple[float, float] | None = None,
    choices: Sequence[str] = (),
    group: str = "training",
    **flag: Any,
) -> Any:
    """A field of a `Checked` dataclass, which is an option of the command line too.

    `allowed` are the least and the most of a number, `flag` further fields of `Flag`.

        steps: int = setting(200, "Steps of training.", (1, 10**9))
    """
    flag = {"show_default": bool(default), "commas": isinstance(default, tuple), **flag}
    added = {"flag": Flag(group, help, **flag), "allowed": allowed, "choices": choices}
    return dataclasses.field(default=default, metadata=added)


class Checked:
    """Base of dataclasses that `check_fields` checks."""

    def __post_init__(self) -> None:
        check_fields(self)
