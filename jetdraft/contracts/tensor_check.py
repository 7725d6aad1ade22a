"""Compares the inputs and outputs of a session with their declarations."""

from __future__ import annotations

from typing import Any

from jetdraft.contracts.tensor_spec import TensorSpec
from jetdraft.errors import ContractError

_ONNX_TYPES = {
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int8": "tensor(int8)",
    "uint8": "tensor(uint8)",
}


def check_tensors(declared: tuple[TensorSpec, ...], actual: list[Any], of: str) -> None:
    """Compare a session's inputs or outputs with their declaration.

    `actual` are onnxruntime `NodeArg`s; `of` names the graph and the side in messages.
    Raises `ContractError` on the first difference.
    """
    unchecked = {arg.name: (arg.type, tuple(arg.shape)) for arg in actual}
    for spec in declared:
        if spec.name not in unchecked:
            raise ContractError(f"{of} lack {spec.name!r}; export the bundle again")
        dtype, shape = unchecked.pop(spec.name)
        if dtype != _ONNX_TYPES[spec.dtype] or not _fits(spec.shape, shape):
            raise ContractError(
                f"{of}: {spec.name!r} is {dtype} {list(shape)}, declared "
                f"{spec.dtype} {list(spec.shape)}; export the bundle again"
            )
    if unchecked:
        raise ContractError(
            f"{of} have undeclared {sorted(unchecked)}; export the bundle again"
        )


def _fits(declared: tuple[int | str, ...], actual: tuple[Any, ...]) -> bool:
    """Whether a shape is as declared: a named axis fits any symbolic axis."""
    return len(declared) == len(actual) and all(
        not isinstance(size, int) if isinstance(axis, str) else axis == size
        for axis, size in zip(declared, actual, strict=True)
    )
