"""One hash over all that a trace of a pass depends on."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch


class UnknownError(Exception):
    """An object whose state cannot be told."""


def fingerprint(step: torch.nn.Module) -> str | None:
    """A hash that two steps share only if the tracer makes the same graph of them.

    It covers the modules with all their fields and methods, the functions in them, and
    the bytes of tensors that become constants. Parameters are inputs of the traced
    graph, so only their names, shapes and types count. None for a step with an object
    of C in it.

        fingerprint(Step(model, contract))
    """
    writer = _Writer()
    try:
        writer.write(step)
    except (UnknownError, RecursionError):
        return None
    return writer.digest.hexdigest()


class _Writer:
    """Writes objects into a digest; an object that comes again is a number."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.numbers: dict[int, int] = {}
        self.classes: set[type] = set()
        self.kept: list[Any] = []
        """What has a number must live, or another object could get its id."""

    def write(self, value: Any) -> None:
        """Write one object with all that it holds; raise `UnknownError`."""
        if isinstance(value, _PLAIN):
            self._say(type(value).__name__, repr(value))
        elif id(value) in self.numbers:
            self._say("again", str(self.numbers[id(value)]))
        else:
            self.numbers[id(value)] = len(self.numbers)
            self.kept.append(value)
            self._write_new(value)

    def _write_new(self, value: Any) -> None:
        for kinds, write in _WRITERS:
            if isinstance(value, kinds):
                return write(self, value)
        return self._write_object(value)

    def write_all(self, kind: str, values: Iterable[Any]) -> None:
        """Write several objects in their order."""
        self._say(kind, "")
        for value in values:
            self.write(value)
        self._say("end", "")

    def write_tensor(self, tensor: torch.Tensor) -> None:
        """A tensor's type, and its bytes if the graph has it as a constant."""
        self._say("tensor", f"{type(tensor)} {tuple(tensor.shape)} {tensor.dtype}")
        if tensor.device.type == "meta" or type(tensor) is not torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                raise UnknownError
            return
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.digest.update(flat.numpy().tobytes())

    def write_function(self, function: types.FunctionType) -> None:
        """A function's code, what it closes over, and its defaults."""
        code = function.__code__
        self._say("function", f"{function.__module__}.{function.__qualname__}")
        self._say("code", f"{code.co_filename} {code.co_firstlineno}")
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = [function.__defaults__, function.__kwdefaults__]
        self.write_all("closure", [*cells, *defaults])

    def write_set(self, values: Any) -> None:
        """A set of plain values, sorted: its order differs between processes."""
        if not all(isinstance(value, _PLAIN) for value in values):
            raise UnknownError
        self.write_all("set", sorted(values, key=repr))

    def _write_object(self, value: Any) -> None:
        """An object whose whole state is its fields; another may hide some in C."""
        kind = type(value)
        bases = [base for base in kind.__mro__ if not base.__flags__ & _HEAP]
        slots = any(vars(base).get("__slots__") for base in kind.__mro__)
        if bases != [object] or slots or not hasattr(value, "__dict__"):
            raise UnknownError
        self._say("object", f"{kind.__module__}.{kind.__qualname__}")
        for base in kind.__mro__:
            if base not in self.classes:
                self.classes.add(base)
                self._write_methods(base)
        fields = {n: v for n, v in vars(value).items() if n not in _PLACES}
        self.write_all("fields", [part for item in fields.items() for part in item])

    def _write_methods(self, kind: type) -> None:
        """Where the functions of a class were written; a program may replace some."""
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType):
                code = value.__code__
                place = f"{code.co_filename} {code.co_firstlineno}"
                self._say("method", f"{name} {place}")

    def _say(self, kind: str, text: str) -> None:
        self.digest.update(f"{kind}:{len(text)}:{text};".encode())


_HEAP = 1 << 9
"""The flag of classes that are written in Python, Py_TPFLAGS_HEAPTYPE."""

_PLACES = {"_name_or_path", "name_or_path"}
"""Fields of transformers that say where a checkpoint lay."""

_PLAIN = (str, int, float, bool, type(None), bytes, Enum)
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)

_WRITERS: list[tuple[Any, Callable[[_Writer, Any], None]]] = [
    (torch.Tensor, _Writer.write_tensor),
    (_NAMED, lambda writer, value: writer.write(repr(value))),
    (type, lambda writer, value: writer.write(f"{value.__module__}.{value}")),
    ((list, tuple), lambda writer, value: writer.write_all("list", value)),
    ((set, frozenset), _Writer.write_set),
    (
        Mapping,
        lambda writer, value: writer.write_all(
            "mapping", [part for item in value.items() for part in item]
        ),
    ),
    (types.FunctionType, _Writer.write_function),
    (
        types.MethodType,
        lambda writer, value: writer.write_all(
            "method", [value.__func__, value.__self__]
        ),
    ),
    (
        functools.partial,
        lambda writer, value: writer.write_all(
            "partial", [value.func, value.args, value.keywords]
        ),
    ),
    (
        types.BuiltinFunctionType,
        lambda writer, value: writer.write(f"{value.__module__}.{value.__qualname__}"),
    ),
]
