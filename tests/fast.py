"""`pytest --fast` runs what needs no export, no training and no other process.

Nothing is marked by hand. A test is slow if it, one of its fixtures, or a helper that
they name reaches a function of `SLOW_ROOMS`, or gives a word of `SLOW_WORDS` to a
command line. Helpers are found behind tables, partial calls, imports inside of
functions, and in programs that are written as strings; of a table only the rows count
that the test's parameters name, if they name any.
"""

import dis
import functools
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from types import CodeType, FunctionType, ModuleType

import click
import pytest

SLOW_ROOMS = (
    "jetdraft.export.",
    "jetdraft.train.",
    "tools.",
    "torch.optim.",
    "subprocess",
)
QUICK_ROOMS = (
    "jetdraft.export.derived",
    "jetdraft.train.labels",
    "jetdraft.train.data",
)
"""Rooms in them that trace nothing and train nothing."""

SLOW_WORDS = {"export", "train"}
CONTAINERS = (functools.partial, dict, list, tuple, click.Command)
PREPARING = {"traces", "forecasts_of_all_exports"}
"""Fixtures of all tests that change how exports run, and run none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --fast."""
    parser.addoption("--fast", action="store_true", help="quick tests only")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what is slow."""
    if not config.getoption("--fast"):
        return
    slow = [item for item in items if is_slow_test(item)]
    config.hook.pytest_deselected(items=slow)
    chosen = set(items) - set(slow)
    items[:] = [item for item in items if item in chosen]


def is_slow_test(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    call, functions = getattr(item, "callspec", None), [item.function]
    rows = frozenset(
        v for v in (call.params if call else {}).values() if isinstance(v, str)
    )
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if name not in PREPARING:
            functions += [definition.func for definition in definitions]
    # A fixture may be asked for by a parameter's value.
    manager = item.session._fixturemanager
    for name in rows:
        functions += [d.func for d in manager.getfixturedefs(name, item) or ()]
    # What is quick with all rows of its tables is quick with some of them.
    slow = filter(is_slow, functions)
    return any(not rows or is_slow(function, rows) for function in slow)


@functools.cache
def is_slow(function: object, rows: frozenset[str] = frozenset()) -> bool:
    """Whether a function may reach something slow, by the names in its code."""
    return any(True for _ in _Search(rows).reached(function))


class _Search:
    """A search for slow functions behind others; it looks at nothing twice."""

    def __init__(self, rows: frozenset[str]) -> None:
        self.rows, self.seen = rows, set[int]()

    def reached(self, what: object) -> Iterator[object]:
        """The functions of slow rooms behind a function, a class, a table or a call."""
        what = getattr(what, "__wrapped__", getattr(what, "__func__", what))
        if id(what) in self.seen:
            return
        self.seen.add(id(what))
        if isinstance(what, functools.partial):
            parts: Iterable[object] = (what.func, *what.args, *what.keywords.values())
        elif isinstance(what, click.Command):
            parts = (what.callback,)
        elif isinstance(what, dict):
            parts = [what[key] for key in self.rows & what.keys()] or what.values()
        elif isinstance(what, list | tuple):
            parts = what
        elif isinstance(what, type):
            parts = vars(what).values() if _room(what).startswith("tests.") else ()
        else:
            if isinstance(what, FunctionType):
                for code in _codes(what.__code__):
                    yield from self.named(code, what.__globals__)
            return
        for part in parts:
            yield from self.found(part)

    def found(self, what: object) -> Iterator[object]:
        """`what`, if it is of a slow room, else the slow functions that it reaches."""
        if isinstance(what, str) and re.fullmatch(r"tests\.[\w.]+:\w+", what):
            what = pkgutil.resolve_name(what)
        if _is_slow(what):
            yield what
        elif isinstance(what, CONTAINERS) or _room(what).startswith("tests."):
            yield from self.reached(what)

    def named(self, code: CodeType, names: Mapping[str, object]) -> Iterator[object]:
        called, attributes = _names(code)
        for name in called:
            if name.startswith(("tests.", *SLOW_ROOMS)):
                import_module(name)
            if isinstance(what := names.get(name, sys.modules.get(name)), str):
                yield from self.programmed(what)
                continue
            yield from self.found(what)
            for inner in attributes if isinstance(what, ModuleType) else ():
                part = vars(what).get(inner)
                if _is_slow(part) or _room(what).startswith("tests."):
                    yield from self.found(part)
        for constant in code.co_consts:
            if constant in SLOW_WORDS:
                yield constant
            elif isinstance(constant, str):
                yield from self.programmed(constant)

    def programmed(self, text: str) -> Iterator[object]:
        if "import " in text:
            for code in _codes(_compiled(text)):
                yield from self.named(code, {})


@functools.cache
def _compiled(text: str) -> CodeType:
    try:
        return compile(text, "<string>", "exec")
    except SyntaxError:
        return compile("", "<string>", "exec")


def _room(what: object) -> str:
    """The module of a function or a class, and a module itself with a dot behind it."""
    if isinstance(what, ModuleType):
        return f"{what.__name__}."
    return getattr(what, "__module__", None) or ""


def _is_slow(what: object) -> bool:
    """Whether `what` is of a slow room, and not a class that only holds options."""
    if isinstance(what, type) and not what.__name__.endswith("Training"):
        return False
    return _room(what).startswith(SLOW_ROOMS) and not _room(what).startswith(
        QUICK_ROOMS
    )


@functools.cache
def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """The names of variables and modules in a code, and those behind a dot."""
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME"):
            kinds[True].add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            kinds[False].add(step.argval)
    return kinds[True], kinds[False]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
