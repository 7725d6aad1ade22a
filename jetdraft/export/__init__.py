"""Checkpoints become graphs here; the modules load torch, this package does not.

The package is also the function `jetdraft.export(...)`: importing a module of it, for
example `jetdraft.export.exporter`, would otherwise put the package in the function's
place.

    jetdraft.export("target/", "bundle", drafter="drafter/")
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from jetdraft.export.request import export as _export


class _Export(ModuleType):
    """A module that can be called like `jetdraft.export.request.export`."""

    __signature__ = inspect.signature(_export)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _export(*arguments, **options)


sys.modules[__name__].__class__ = _Export
