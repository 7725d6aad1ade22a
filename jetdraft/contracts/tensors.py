"""Tensors of graphs: declarations, a check of sessions, types of arrays, and numbers
that the exporter and the runtime must agree on."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.errors import ContractError

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
# The dynamic axes: rows of a pass, rows it answers for, probes, prefix rows, and all.
ROWS, ANSWERS, PROBES, PREFIX, ALL = "n", "m", "r", "p", "n+b"
SEEN = "v"  # Rows of a picture that is read whole.
# The name of the axis of slots in buffers of another graph, which may have more.
SLOTS = "s"

CANDIDATES = 64  # K: a row's candidates, or the whole vocabulary.
WIDEST = 16  # The most rows of a pass that a controller plans.
CAPACITY, MAX_WIDTH = 2048, 128  # Defaults of an export.
MIN_SELECTED = 16  # The least rows that a selecting pass reads.
HIDDEN = -1e4  # Added to the score of a slot that a row may not see; fits float16.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FRAMES_PER_SLOT = 2  # Frames of a spectrum that Whisper's encoder makes one slot of.


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: name, numpy dtype name, shape with named dynamic axes."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def shape_for(
        self,
        rows: int = 0,
        answers: int = 0,
        probes: int = 0,
        members: int = 1,
        prefix: int = 0,
        seen: int = 0,
    ) -> tuple[int, ...]:
        """The shape in a pass; `members` and `prefix` are fields of the contract."""
        prefix = prefix if probes else 0
        sizes = {
            ROWS: rows,
            ANSWERS: answers,
            PROBES: probes,
            PREFIX: prefix,
            SEEN: seen,
            ALL: rows + prefix + probes * members,
            SLOTS: rows + 1,  # of the example buffers of a trace
        }
        return tuple(sizes[a] if isinstance(a, str) else a for a in self.shape)


_ONNX_TYPES = {  # onnxruntime's names of types, by numpy's
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int8": "tensor(int8)",
    "uint8": "tensor(uint8)",
}


def check_tensors(declared: tuple[TensorSpec, ...], actual: list[Any], of: str) -> None:
    """Raise `ContractError` unless `NodeArg`s are as declared; `of` names them."""
    unchecked = {arg.name: (arg.type, tuple(arg.shape)) for arg in actual}
    for spec in declared:
        if spec.name not in unchecked:
            raise ContractError(f"{of} lack {spec.name!r}; export the bundle again")
        dtype, shape = unchecked.pop(spec.name)
        # A named axis matches any dynamic axis.
        same = len(spec.shape) == len(shape) and all(
            not isinstance(size, int) if isinstance(axis, str) else axis == size
            for axis, size in zip(spec.shape, shape, strict=True)
        )
        if dtype != _ONNX_TYPES[spec.dtype] or not same:
            fact = f"{of}: {spec.name!r} is {dtype} {list(shape)}, declared "
            fact += f"{spec.dtype} {list(spec.shape)}; export the bundle again"
            raise ContractError(fact)
    if unchecked:
        fact = f"{of} have undeclared {sorted(unchecked)}; export the bundle again"
        raise ContractError(fact)
