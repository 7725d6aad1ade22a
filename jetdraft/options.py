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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import inf
from numbers import Integral, Real
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
        paths = [kind for kind in kinds if kind[0] is Path]
        return (several or paths or kinds)[0]
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

        hints = get_type_hints(record)
        returned = get_type_hints(function).get("return", Any)
        signature = inspect.signature(record)
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[
                parameter.replace(annotation=hints.get(name, Any))
                for name, parameter in signature.parameters.items()
            ],
            return_annotation=returned,
        )
        call.__annotations__ = {
            **{name: hints.get(name, Any) for name in signature.parameters},
            "return": returned,
        }
        own = declared_options(cast(type, record))
        rows = "\n".join(f"- `{option.name}`: {option.help}" for option in own)
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{rows}"
        return call

    return decorate


class Range(typing.NamedTuple):
    """The numbers that an option allows, and the words for them in errors."""

    contains: Callable[[Any], bool]
    words: str
    integer: bool = False
    optional: bool = False


def range_between(least: float, most: float, optional: bool = False) -> Range:
    """Return the range from `least` to `most`, of integers if `least` is an int."""
    words, integer = f"{least:g} to {most:g}", isinstance(least, int)
    return Range(lambda x: least <= x <= most, words, integer, optional)


def check_flags(options: object, *fields: str) -> None:
    """Raise `OptionError` for the first attribute in `fields` that is not a bool."""
    for field in fields:
        value = getattr(options, field)
        if not isinstance(value, bool):
            fact = f"{field} {value!r} is not true or false; give True or False"
            raise OptionError(fact, field)


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
            fact = f"{name} {value} is out of range; give {allowed.words}"
            raise OptionError(fact, field)


def check_bounds(options: object) -> None:
    """Raise `OptionError` for the first number in `options` beyond its `Flag`."""

    def allowed(option: Option) -> Range:
        flag, integer = option.flag, option.kind is int
        most, above = inf if flag.most is None else flag.most, flag.above
        if above is not None:
            return Range(lambda x: above < x <= most, f"more than {above:g}", integer)
        least = -inf if flag.least is None else flag.least
        return Range(lambda x: least <= x <= most, f"{least:g} or more", integer)

    bounded = [o for o in declared_options(type(options)) if o.kind in (int, float)]
    check_ranges(options, {option.name: allowed(option) for option in bounded})


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
    """Base of dataclasses that raise `OptionError` for what a `setting` forbids."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are
            name, value = field.name, getattr(self, field.name)
            if allowed := field.metadata.get("allowed"):
                (least, most), optional = allowed, NoneType in get_args(hints[name])
                check_ranges(self, {name: range_between(least, most, optional)})
            choices = field.metadata.get("choices")
            if choices and value not in choices:
                words = f"{', '.join(choices[:-1])} or {choices[-1]}"
                raise OptionError(f"unknown {name} {value!r}; choose {words}", name)
