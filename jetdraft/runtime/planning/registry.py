"""All methods of drafting: jetdraft's own, and other packages' (`jetdraft.methods`)."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from jetdraft.bundle import Bundle
from jetdraft.runtime.proposers.method import Method

GROUP = "jetdraft.methods"  # The group of entry points that bring methods.
# Names in place of a method: the methods that promise most, and plain decoding.
AUTO, NONE = "auto", "none"


def load_object(name: str) -> Any:
    """Import the object of a name like "jetdraft.methods.ppd.method:METHOD"."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@cache
def _load_methods() -> dict[str, Method[Any]]:
    """All methods by name, loaded once; warns of entry points that fail."""
    names = load_object("jetdraft.methods:OWN")
    place = "jetdraft.methods.{}.method:METHOD"
    registered = {name: load_object(place.format(name)) for name in names}
    for entry in entry_points(group=GROUP):
        try:
            method = entry.load()
        except Exception as error:  # another package may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            _warn_of(entry.name, f"it cannot be loaded ({reason})")
            continue
        if not isinstance(method, Method):
            _warn_of(entry.name, f"{entry.value} is not a jetdraft.methods.Method")
        elif method.name in registered:
            _warn_of(entry.name, f"there is a method {method.name!r} already")
        else:
            registered[method.name] = method
    return registered


def _warn_of(name: str, reason: str) -> None:
    fact = f"the entry point {name!r} of {GROUP} is left out"
    warnings.warn(f"{fact}: {reason}", stacklevel=4)


def methods() -> Mapping[str, Method[Any]]:
    """Every method by its name, jetdraft's own first."""
    return MappingProxyType(_load_methods())


def methods_of(bundle: Bundle) -> tuple[str, ...]:
    """The methods that a bundle alone has everything for, "none" first."""
    own = {n: m for n, m in methods().items() if not (m.needs_store or m.lacks(bundle))}
    return (NONE, *own)


def registered(method: Method[Any]) -> AbstractContextManager[Any]:
    """Register a method inside the block, for example in a test or a benchmark."""
    from unittest.mock import patch

    return patch.dict(_load_methods(), {method.name: method})
