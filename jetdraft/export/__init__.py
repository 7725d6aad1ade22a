"""Makes graphs of checkpoints; the package itself is the function `jetdraft.export`."""

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
