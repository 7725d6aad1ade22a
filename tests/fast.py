"""`pytest --fast` runs what needs no export and no training: seconds, not minutes.

Nothing is marked by hand. A test needs an export if it, one of its fixtures, or a
helper that they name reaches a function of `SLOW_ROOMS`, or gives a verb of
`SLOW_VERBS` to the command line.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

import pytest

SLOW_ROOMS = ("jetdraft.export.", "jetdraft.train.", "tools.")
SLOW_VERBS = {"export", "train"}
PREPARING = {"traces", "forecasts_of_all_exports"}
"""Fixtures of all tests that change how exports run, and run none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --fast."""
    parser.addoption("--fast", action="store_true", help="tests without exports only")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what needs an export."""
    if not config.getoption("--fast"):
        return
    slow = [item for item in items if needs_export(item)]
    config.hook.pytest_deselected(items=slow)
    chosen = set(items) - set(slow)
    items[:] = [item for item in items if item in chosen]


def needs_export(item: pytest.Item) -> bool:
    """Whether a test, or a fixture that it uses, exports or trains."""
    assert isinstance(item, pytest.Function)
    functions = [item.function]
    for name, definitions in item._fixtureinfo.name2fixturedefs.items():
        if name not in PREPARING:
            functions += [definition.func for definition in definitions]
    return any(is_slow(function) for function in functions)


@functools.cache
def is_slow(function: object) -> bool:
    """Whether a function may reach an export, by the names in its code."""
    return any(True for _ in _reached(function, set()))


def _reached(function: object, seen: set[object]) -> Iterator[object]:
    """The functions of slow rooms that a function names, also by its helpers."""
    function = getattr(function, "__wrapped__", getattr(function, "__func__", function))
    if isinstance(function, type):
        for member in vars(function).values():
            if isinstance(member, FunctionType):
                yield from _reached(member, seen)
        return
    if not isinstance(function, FunctionType) or function in seen:
        return
    seen.add(function)
    for code in _codes(function.__code__):
        if SLOW_VERBS & {c for c in code.co_consts if isinstance(c, str)}:
            yield function
        for name in code.co_names:
            named = function.__globals__.get(name)
            room = getattr(named, "__module__", None) or ""
            if isinstance(named, ModuleType):
                room = f"{named.__name__}."
            if room.startswith(SLOW_ROOMS) and not _is_record(named):
                yield named
            elif room.startswith("tests."):
                yield from _reached(named, seen)


def _is_record(named: object) -> bool:
    """Whether it only holds options: a class, unless its name says that it trains."""
    return isinstance(named, type) and not named.__name__.endswith("Training")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code, and the codes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
