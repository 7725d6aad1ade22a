"""Where onnxruntime puts nodes and values: on the device, or on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tools.forecast.fast_paths import HALVES
from tools.forecast.graph_view import GraphView, Operator

HOST_INPUTS: Mapping[str, Sequence[int]] = {
    "Clip": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Expand": (1,),
    "GroupQueryAttention": (6,),
    "OneHot": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}
"""The inputs that kernels on a device read on the host; reductions read their axes so.

A table of kernels does not tell them. They are the same for CUDA and WebGPU.
"""

HOST_OUTPUTS = ("Shape", "Size")
"""Operators whose kernels on a device write on the host."""

SMALL_CONSTANT = 100
"""Elements of a constant that may stand beside host values on the host."""


@dataclass(frozen=True)
class Placement:
    """The operators that run on the host, by index, and the values that are copied.

    Each of the `copies` is a Memcpy node.
    """

    on_host: frozenset[int]
    copies: tuple[str, ...]

    @classmethod
    def of(
        cls, graph: GraphView, has_kernel: Sequence[bool], whole: bool = False
    ) -> Placement:
        """The placement of a graph in which some operators have a kernel.

        With `whole`, the device takes what it can, and reads no input on the host;
        otherwise onnxruntime keeps operators on the host that compute sizes only.
        """
        reads: Callable[[Operator, int], bool] = (
            (lambda operator, place: False) if whole else _is_read_on_host
        )
        on_host = {index for index, has in enumerate(has_kernel) if not has}
        if not whole:
            on_host |= _sizes(graph, has_kernel)
        return cls(frozenset(on_host), tuple(_copies(graph, on_host, reads, whole)))


def _is_read_on_host(operator: Operator, place: int) -> bool:
    if operator.kind.startswith("Reduce"):
        return place == 1
    return place in HOST_INPUTS.get(operator.kind, ())


def _sizes(graph: GraphView, has_kernel: Sequence[bool]) -> set[int]:
    """The operators with a kernel that only compute with values of the host.

    Operators follow each other as in the graph, which is sorted.
    """
    host: set[str] = set()
    moved = set()
    for index, operator in enumerate(graph.operators):
        names = {value.name for value in operator.outputs}
        follows = any(value.name in host for value in operator.inputs if value.name)
        writes_there = operator.kind in HOST_OUTPUTS
        if writes_there if has_kernel[index] else follows:
            host |= names
        elif follows and _is_size(graph, operator, host):
            host |= names
            moved.add(index)
    return moved


def _is_size(graph: GraphView, operator: Operator, host: set[str]) -> bool:
    """Whether the host should compute an operator that has a kernel on the device."""
    for place, value in enumerate(operator.inputs):
        if value.type in HALVES or value.type.startswith("float8"):
            return False
        if graph.constants.get(value.name, SMALL_CONSTANT + 1) <= SMALL_CONSTANT:
            continue
        if value.name in graph.inputs:
            continue
        if value.name not in host or _is_read_on_host(operator, place):
            return False
    return True


def _copies(
    graph: GraphView,
    on_host: set[int],
    reads: Callable[[Operator, int], bool],
    whole: bool,
) -> list[str]:
    """The values that are made on one side and read on the other."""
    made: dict[str, str] = {}
    read: dict[str, set[str]] = defaultdict(set)
    for index, operator in enumerate(graph.operators):
        for place, value in enumerate(operator.inputs):
            if value.name and value.name not in graph.constants:
                host = index in on_host or reads(operator, place)
                read[value.name].add("host" if host else "device")
        for value in operator.outputs:
            host = index in on_host or (not whole and operator.kind in HOST_OUTPUTS)
            made[value.name] = "host" if host else "device"
    # An input of the graph is put where it is read, unless both sides read it.
    return [
        name
        for name, sides in read.items()
        if (sides - {made[name]} if name in made else len(sides) > 1)
    ]
