"""Weights of experts that stay in their files until a pass or a writer reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from jetdraft.errors import CheckpointError
from jetdraft.quant.blocks import Bytes
from jetdraft.quant.grids import GridMatrix

# Reads an entry of a tensor's first axis, or all entries for None.
Read = Callable[[int | None], Tensor]


class StoredTensor(Tensor):
    """A tensor whose numbers are read when they are needed, by `read`.

    To stack, join, turn or convert it reads nothing, `stored[i]` reads an entry of the
    first axis, and any other operation reads all.

        stored = StoredTensor((128, 1536, 2048), torch.bfloat16, read)
        matrix = stored.float()[3]
    """

    read: Read
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, read: Read) -> Self:
        """Make a tensor of that shape without memory."""
        made: Self = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made.read = read
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Postpone an operation, or run it on the numbers."""
        postpone = _POSTPONED.get(operation)
        result = None if postpone is None else postpone(*args, **kwargs or {})
        if result is not None:
            return result
        if operation._schema.is_mutable and isinstance(args[0], cls):
            raise RuntimeError("the weights of experts in files cannot be changed")
        given = args, kwargs or {}
        args, kwargs = pytree.tree_map_only(cls, lambda own: own.read(None), given)
        return operation(*args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        return self.read(None).numpy(force=force)


def _convert(tensor: StoredTensor, **how: Any) -> Tensor:
    dtype = how.get("dtype") or tensor.dtype
    return StoredTensor(tensor.shape, dtype, lambda i: tensor.read(i).to(dtype))


def _turn(tensor: StoredTensor, first: int, second: int) -> Tensor | None:
    axes = first % tensor.dim(), second % tensor.dim()
    if 0 in axes or tensor.dim() != 3:
        return None
    shape, dtype = (len(tensor), *tensor.shape[:0:-1]), tensor.dtype
    return StoredTensor(shape, dtype, lambda i: tensor.read(i).mT.contiguous())


def _fit(tensors: Sequence[Tensor], axis: int = -1) -> bool:
    """Whether all are stored, of one type, and of one shape but for `axis`."""
    kinds = {
        (tensor.dtype, *(size for i, size in enumerate(tensor.shape) if i != axis))
        for tensor in tensors
    }
    return len(kinds) == 1 and all(isinstance(t, StoredTensor) for t in tensors)


def _stack(tensors: Sequence[StoredTensor], axis: int = 0) -> Tensor | None:
    if axis != 0 or not _fit(tensors):
        return None

    def read(index: int | None) -> Tensor:
        if index is not None:
            return tensors[index].read(None)
        return torch.stack([tensor.read(None) for tensor in tensors])

    return StoredTensor((len(tensors), *tensors[0].shape), tensors[0].dtype, read)


def _join(tensors: Sequence[StoredTensor], axis: int = 0) -> Tensor | None:
    if axis < 1 or not _fit(tensors, axis):
        return None
    shape = [*tensors[0].shape]
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)

    def read(index: int | None) -> Tensor:
        parts = [tensor.read(index) for tensor in tensors]
        return torch.cat(parts, axis - (index is not None))

    return StoredTensor(shape, tensors[0].dtype, read)


_ATEN = torch.ops.aten
_POSTPONED: dict[Any, Callable[..., Tensor | None]] = {
    _ATEN.detach.default: _convert,
    _ATEN.alias.default: _convert,
    _ATEN.select.int: lambda t, axis, i: t.read(i % len(t)) if axis == 0 else None,
    _ATEN._to_copy.default: _convert,
    _ATEN.transpose.int: _turn,
    _ATEN.stack.default: _stack,
    _ATEN.cat.default: _join,
}


@dataclass(frozen=True)
class GridStack:
    """Matrices of experts, columns, rows in the type `grid`, which stay in their file.

    `read(i)` gives the bytes of an expert, uint8 [columns, bytes].
    """

    grid: str
    shape: tuple[int, int, int]
    read: Callable[[int], Bytes]

    @property
    def form(self) -> object:
        return self.grid, self.shape[2]

    def matrix(self, expert: int) -> GridMatrix:
        """Read an expert's matrix; raises `CheckpointError` for scales like NaN."""
        matrix = GridMatrix(self.grid, self.read(expert), self.shape[2])
        if not np.isfinite(matrix.floats).all():
            fact = f"expert {expert} of {self.shape[0]} has scales that are not finite"
            raise CheckpointError(f"{fact}; fetch the checkpoint again")
        return matrix

    @classmethod
    def concatenated(cls, parts: "Sequence[GridStack]") -> GridMatrix:
        """Read one matrix with the columns of all experts of the stacks."""
        matrices = [part.matrix(i) for part in parts for i in range(part.shape[0])]
        return GridMatrix.concatenated(matrices)

    def floats(self) -> StoredTensor:
        """The matrices as float32 [experts, columns, rows]."""

        def read(index: int | None) -> Tensor:
            if index is None:
                return torch.stack([read(i) for i in range(self.shape[0])])
            return torch.from_numpy(self.matrix(index).floats.T.copy())

        return StoredTensor(self.shape, torch.float32, read)
