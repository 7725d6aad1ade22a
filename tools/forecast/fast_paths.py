"""Whether a node takes its provider's fast path, from conditions in kernels' sources.

A table of kernels does not show these conditions. They were read in onnxruntime's
sources between 1.28 and 1.32; docs/devices.md says which were run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from tools.forecast.graph_view import CONTRIB_DOMAIN, GraphView, Operator

HALVES = ("float16", "bfloat16")

_PAST_KEY, _POSITIONS, _BIAS, _SINK, _Q_NORM = 3, 9, 10, 11, 14
"""Inputs of GroupQueryAttention."""

_ZERO_CROSSINGS, _GROUP_INDEX, _MASK = 3, 4, 3
"""Inputs of MatMulNBits, and the mask of ai.onnx's Attention."""

_ATTENTION_GROUPS = (1, 2, 4, 5, 8, 16, 32)
_ATTENTION_HEADS = (64, 128, 256)
"""Query heads per KV head, and head sizes, of XQA: CUDA's kernel for one row."""

_ROWS = {4: 16, 8: 5}
"""By bits, the widest pass that CUDA's MatMulNBits multiplies without unpacking."""


class Path(Enum):
    """How a kernel runs an operator: on its fast path, on another, or not at all."""

    FAST = "fast"
    SLOW = "slow"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True)
class Way:
    """The path of an operator and the reason."""

    path: Path
    reason: str


def way(provider: str, operator: Operator, graph: GraphView) -> Way | None:
    """The way that a kernel runs an operator; None where nothing is known.

    way("cuda", operator, GraphView.read(file)).reason
    """
    rule = _RULES.get((provider, operator.domain, operator.kind))
    return rule(operator, graph) if rule else None


def _head_size(operator: Operator, graph: GraphView, place: int) -> int | None:
    """The size of a head in a buffer [1, heads, slots, size]; None if it is open."""
    name = operator.inputs[place].name if operator.has_input(place) else ""
    shape = graph.shapes.get(name, ())
    return shape[3] if len(shape) == 4 else None


def _in_one_buffer(operator: Operator, graph: GraphView) -> bool:
    """Whether past and present can be one buffer: an input and an output of one shape.

    The runtime binds both to the same memory.
    """
    past, present = operator.inputs[_PAST_KEY].name, operator.outputs[1].name
    same = graph.shapes.get(past) == graph.shapes.get(present)
    return past in graph.inputs and present in graph.outputs and same


def _cuda_grouped_attention(operator: Operator, graph: GraphView) -> Way:
    """The rules of the CUDA kernel of GroupQueryAttention."""
    size = _head_size(operator, graph, _PAST_KEY)
    quantized = operator.type_of(_PAST_KEY) not in ("", *HALVES)
    softcap = operator.attributes.get("softcap", 0.0)
    smooth = operator.has_input(_SINK) or operator.integer("smooth_softmax") == 1
    has_scores = len(operator.outputs) > 3 and bool(operator.outputs[3].name)
    has_bias = operator.has_input(_BIAS)
    groups = operator.integer("num_heads") // operator.integer("kv_num_heads", 1)
    single = size in _ATTENTION_HEADS and groups in _ATTENTION_GROUPS and not softcap
    ending = ", with XQA for one row" if single else ""
    return _first_of(
        (has_scores, Path.REFUSED, "the kernel cannot give the scores (output 3)"),
        (
            has_bias and (quantized or smooth),
            Path.REFUSED,
            "attention_bias excludes integer buffers and head_sink",
        ),
        (has_bias, Path.SLOW, "attention_bias leaves only the unfused kernel"),
        (
            quantized,
            Path.SLOW,
            "integer buffers have a fast kernel for one row only; several rows unpack "
            "the buffer",
        ),
        (
            size is None or size % 8 > 0 or size > 256,
            Path.SLOW,
            f"heads of {size or 'unknown size'}: flash needs 8n, at most 256",
        ),
        (
            not operator.has_input(_PAST_KEY) or not _in_one_buffer(operator, graph),
            Path.SLOW,
            "past and present are no input and output of one shape",
        ),
        (
            operator.has_input(_Q_NORM),
            Path.SLOW,
            "norms of query and key exclude the decoding path",
        ),
        (True, Path.FAST, f"flash decoding at every width{ending}"),
    )


def _first_of(*rules: tuple[bool, Path, str]) -> Way:
    """The path and the reason of the first rule that holds."""
    return next(Way(path, reason) for holds, path, reason in rules if holds)


def _cuda_matmul(operator: Operator, graph: GraphView) -> Way:
    """The rules of the CUDA kernel of MatMulNBits."""
    bits, block = operator.integer("bits", 4), operator.integer("block_size")
    rows, columns = operator.integer("K"), operator.integer("N")
    unpacked = "every pass unpacks the matrix"
    zeros = operator.type_of(_ZERO_CROSSINGS)
    most = _ROWS.get(bits, 0)
    return _first_of(
        (
            bits not in _ROWS,
            Path.REFUSED,
            f"{bits} bits; only prepacked weights have a kernel",
        ),
        (
            bool(columns % 8 or rows % 8),
            Path.SLOW,
            f"{rows} x {columns} is not in eights: {unpacked}",
        ),
        (operator.has_input(_GROUP_INDEX), Path.SLOW, f"g_idx is given: {unpacked}"),
        (zeros not in ("", "uint8"), Path.SLOW, f"zeros are {zeros}: {unpacked}"),
        (
            bits == 4 and block not in (16, 32, 64, 128),
            Path.REFUSED,
            f"blocks of {block}; 4 bits need 16, 32, 64 or 128",
        ),
        (
            bits == 8 and bool(256 % (block or 1) or rows % (block or 1)),
            Path.SLOW,
            f"blocks of {block} do not divide 256 and K: {unpacked}",
        ),
        (True, Path.FAST, f"GEMV up to {most} rows; wider passes unpack the matrix"),
    )


def _cuda_attention(operator: Operator, graph: GraphView) -> Way:
    """The rules of the CUDA kernel of ai.onnx's Attention."""
    size = _head_size(operator, graph, 1)
    if operator.type_of(0) not in HALVES:
        return Way(Path.SLOW, f"flash needs fp16, not {operator.type_of(0)}")
    if operator.has_input(_MASK):
        return Way(Path.SLOW, "a mask excludes flash; K and V are copied per head")
    if size is None or size % 8 or size > 256:
        return Way(
            Path.SLOW, f"heads of {size or 'unknown size'}: flash needs 8n, at most 256"
        )
    return Way(Path.FAST, "flash; it reads the whole buffer")


def _webgpu_grouped_attention(operator: Operator, graph: GraphView) -> Way:
    """The rules of the WebGPU kernel of GroupQueryAttention."""
    size = _head_size(operator, graph, _PAST_KEY)
    rotates = operator.integer("do_rotary") == 1
    if rotates and operator.has_input(_POSITIONS) and operator.has_input(_BIAS):
        return Way(
            Path.WRONG,
            "it rotates by the slot and ignores position_ids: branches of a draft get "
            "other positions",
        )
    if operator.type_of(_PAST_KEY) not in ("", "float", "float16"):
        return Way(Path.REFUSED, "integer buffers")
    if operator.integer("smooth_softmax") == 1:
        return Way(Path.SLOW, "smooth_softmax excludes flash attention")
    if size is None or size % 4:
        return Way(Path.SLOW, f"heads of {size or 'unknown size'}: flash needs 4n")
    if operator.integer("local_window_size", -1) > 0:
        return Way(Path.SLOW, "contexts longer than the window exclude flash attention")
    return Way(Path.FAST, "flash attention")


def _webgpu_matmul(operator: Operator, graph: GraphView) -> Way:
    """The rules of the WebGPU kernel of MatMulNBits."""
    block = operator.integer("block_size")
    rows, columns = operator.integer("K"), operator.integer("N")
    if operator.has_input(_GROUP_INDEX):
        return Way(Path.REFUSED, "g_idx is given, which it does not read")
    if operator.integer("accuracy_level") != 4:
        return Way(Path.SLOW, "integer products need accuracy_level 4")
    if block % 32 or rows % 128 or columns % 16:
        return Way(
            Path.SLOW,
            f"{rows} x {columns} in blocks of {block}: integer products need K of "
            "128n, N of 16n, blocks of 32n",
        )
    least = "4 rows on" if operator.type_of(0) == "float16" else "1 row on"
    return Way(Path.FAST, f"integer products from {least}, on a GPU with subgroups")


_RULES: Mapping[tuple[str, str, str], Callable[[Operator, GraphView], Way]] = {
    ("cuda", CONTRIB_DOMAIN, "GroupQueryAttention"): _cuda_grouped_attention,
    ("cuda", CONTRIB_DOMAIN, "MatMulNBits"): _cuda_matmul,
    ("cuda", "", "Attention"): _cuda_attention,
    ("webgpu", CONTRIB_DOMAIN, "GroupQueryAttention"): _webgpu_grouped_attention,
    ("webgpu", CONTRIB_DOMAIN, "MatMulNBits"): _webgpu_matmul,
}
