"""The function `jetdraft.export(...)`, and the modules that make graphs of checkpoints.

Importing a module of it would otherwise put the package in the function's place.
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
