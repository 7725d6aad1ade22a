"""Single kernels on a provider, timed by width: what a pass is made of.

Every graph is made here of one or two nodes over random numbers, with all tensors where
the provider computes, and timed as the median of runs that each end with a
synchronization.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from jetdraft.devices.providers import PROVIDERS
from jetdraft.ort import ort
from jetdraft.runtime.passes.buffers import Memory

TURNS = 30
CONTRIB = "com.microsoft"
KINDS = {
    "float16": TensorProto.FLOAT16,
    "float32": TensorProto.FLOAT,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
}


@dataclass(frozen=True)
class Shape:
    """Of a decoder's layer: 8 B models have about these sizes."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 12288
    vocab: int = 151936
    capacity: int = 4096
    context: int = 1024


class Bench:
    """Times graphs on a provider, in a dtype.

    Bench("cuda", "float16").topk(8, Shape())
    """

    def __init__(self, provider: str, dtype: str) -> None:
        self.provider = PROVIDERS[provider]
        self.dtype = dtype
        staged = self.provider.memory != "cpu"
        self.memory = Memory(self.provider.memory, copies=staged)
        self.random = np.random.default_rng(0)

    def ms(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: dict[str, np.ndarray],
        weights: dict[str, np.ndarray],
        outputs: dict[str, str],
        in_place: dict[str, str] | None = None,
    ) -> float:
        """Milliseconds; `in_place` maps an output to the input it is written into."""
        graph = helper.make_graph(
            nodes,
            "kernel",
            [
                helper.make_tensor_value_info(n, KINDS[str(a.dtype)], a.shape)
                for n, a in inputs.items()
            ],
            [
                helper.make_tensor_value_info(n, KINDS[k], None)
                for n, k in outputs.items()
            ],
            [numpy_helper.from_array(a, n) for n, a in weights.items()],
        )
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        options = ort.SessionOptions()
        if self.provider.name != "cpu":
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        session = ort.InferenceSession(
            model.SerializeToString(),
            options,
            providers=[self.provider.full],
            enable_fallback=0,
        )
        io = session.io_binding()
        kept = {}
        for name, array in inputs.items():
            on_host = name == "total_length"
            memory = Memory() if on_host else self.memory
            kept[name] = memory.tensor(array.shape, str(array.dtype))
            kept[name].array[...] = array
            kept[name].upload()
            io.bind_ortvalue_input(name, kept[name].value)
        for name in outputs:
            if in_place and name in in_place:
                io.bind_ortvalue_output(name, kept[in_place[name]].value)
            else:
                io.bind_output(name, self.memory.device)
        times = []
        for _ in range(TURNS + 3):
            start = time.perf_counter()
            session.run_with_iobinding(io)
            times.append(time.perf_counter() - start)
        return 1e3 * statistics.median(times[3:])

    def _floats(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, np.float32).astype(self.dtype)

    def group_query_attention(self, width: int, shape: Shape, biased: bool) -> float:
        """GroupQueryAttention over a shared buffer, with or without a tree's bias."""
        inputs, buffers = self._attention_inputs(width, shape)
        rows_first = {
            name: np.ascontiguousarray(a.transpose(0, 2, 1, 3)).reshape(1, width, -1)
            for name, a in inputs.items()
        }
        last = np.array([shape.context + width - 1], np.int32)
        total = np.array([shape.capacity], np.int32)
        given = {**rows_first, **buffers, "last_row": last, "total_length": total}
        names = list(given)
        if biased:
            names += ["", "", "", "bias"]
            given["bias"] = np.zeros((1, 1, width, shape.capacity), self.dtype)
        made = ["out", "present_key", "present_value"]
        node = helper.make_node(
            "GroupQueryAttention",
            names,
            made,
            domain=CONTRIB,
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
        )
        return self._attend([node], given, made)

    def standard_attention(self, width: int, shape: Shape, biased: bool) -> float:
        """TensorScatter and Attention-24 over the same buffer."""
        inputs, buffers = self._attention_inputs(width, shape)
        given: dict[str, np.ndarray] = {**inputs, **buffers}
        given["start"] = np.array([shape.context], np.int64)
        given["filled"] = np.array([shape.context + width], np.int64)
        if biased:
            given["bias"] = np.zeros((1, 1, width, shape.capacity), self.dtype)
        presents = ["present_key", "present_value"]
        nodes = [
            helper.make_node(
                "TensorScatter", [f"past_{kind}", kind, "start"], [present], axis=2
            )
            for kind, present in zip(("key", "value"), presents, strict=True)
        ]
        bias = "bias" if biased else ""
        taken = ["query", *presents, bias, "", "", "filled"]
        nodes.append(helper.make_node("Attention", taken, ["out"], is_causal=1))
        return self._attend(nodes, given, ["out", *presents])

    def _attention_inputs(
        self, width: int, shape: Shape
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        sizes = {"query": shape.heads, "key": shape.kv_heads, "value": shape.kv_heads}
        rows = {n: self._floats(1, h, width, shape.head_dim) for n, h in sizes.items()}
        buffer = (1, shape.kv_heads, shape.capacity, shape.head_dim)
        names = ("past_key", "past_value")
        return rows, {name: self._floats(*buffer) for name in names}

    def _attend(
        self, nodes: list[onnx.NodeProto], given: dict[str, np.ndarray], made: list[str]
    ) -> float:
        places = {"present_key": "past_key", "present_value": "past_value"}
        return self.ms(nodes, given, {}, dict.fromkeys(made, self.dtype), places)

    def matmul_nbits(
        self, width: int, k: int, n: int, bits: int = 4, block: int = 32
    ) -> float:
        """An int4 or int8 MatMul, symmetric."""
        blocks = k // block
        packed = self.random.integers(0, 256, (n, blocks, block * bits // 8), np.uint8)
        scales = (0.01 * self._floats(n * blocks)).astype(self.dtype)
        weights = {"b": packed, "scales": scales}
        node = helper.make_node(
            "MatMulNBits",
            ["a", "b", "scales"],
            ["y"],
            domain=CONTRIB,
            K=k,
            N=n,
            bits=bits,
            block_size=block,
            accuracy_level=4,
        )
        inputs = {"a": self._floats(1, width, k)}
        return self.ms([node], inputs, weights, {"y": self.dtype})

    def topk(self, width: int, shape: Shape, stages: int = 1) -> float:
        """The best 64 of a vocabulary, or the best among the best 64 of 32 parts."""
        k, parts = 64, 32
        logits = self.random.standard_normal((1, width, shape.vocab), np.float32)
        weights: dict[str, np.ndarray] = {"k": np.array([k], np.int64)}
        if stages == 1:
            nodes = [helper.make_node("TopK", ["x", "k"], ["values", "ids"])]
            return self.ms(nodes, {"x": logits}, weights, _OUT)
        part = shape.vocab // parts
        weights["split"] = np.array([width, parts, part], np.int64)
        weights["offsets"] = (np.arange(parts) * part).reshape(1, parts, 1)
        weights["flat"] = np.array([width, parts * k], np.int64)
        nodes = [
            helper.make_node("Reshape", ["x", "split"], ["parts"]),
            helper.make_node("TopK", ["parts", "k"], ["some", "within"]),
            helper.make_node("Add", ["within", "offsets"], ["among"]),
            helper.make_node("Reshape", ["some", "flat"], ["flat_some"]),
            helper.make_node("Reshape", ["among", "flat"], ["flat_ids"]),
            helper.make_node("TopK", ["flat_some", "k"], ["values", "places"]),
            helper.make_node("GatherElements", ["flat_ids", "places"], ["ids"], axis=1),
        ]
        return self.ms(nodes, {"x": logits[..., : part * parts]}, weights, _OUT)

    def bandwidth(self, megabytes: int = 512) -> float:
        """GB/s of reading and writing, by a negation of `megabytes`."""
        size = megabytes * 1_000_000 // np.dtype(self.dtype).itemsize
        node = helper.make_node("Neg", ["x"], ["y"])
        x = np.ones(size, self.dtype)
        ms = self.ms([node], {"x": x}, {}, {"y": self.dtype})
        return 2 * x.nbytes / ms / 1e6


_OUT = {"values": "float32", "ids": "int64"}


def table(bench: Bench, widths: Sequence[int], shape: Shape) -> dict[str, Any]:
    """Milliseconds of all kernels by width, or why one does not run."""
    kernels: dict[str, Any] = {
        "GroupQueryAttention": lambda w: bench.group_query_attention(w, shape, False),
        "GroupQueryAttention, bias": lambda w: bench.group_query_attention(
            w, shape, True
        ),
        "TensorScatter + Attention": lambda w: bench.standard_attention(
            w, shape, False
        ),
        "TensorScatter + Attention, mask": lambda w: bench.standard_attention(
            w, shape, True
        ),
        "MatMulNBits int4 gate": lambda w: bench.matmul_nbits(
            w, shape.hidden, shape.intermediate
        ),
        "MatMulNBits int8 gate": lambda w: bench.matmul_nbits(
            w, shape.hidden, shape.intermediate, bits=8
        ),
        "TopK 64": lambda w: bench.topk(w, shape),
        "TopK 64 in two stages": lambda w: bench.topk(w, shape, stages=2),
    }
    found: dict[str, Any] = {}
    for name, kernel in kernels.items():
        try:
            found[name] = {width: round(kernel(width), 4) for width in widths}
        except Exception as error:  # onnxruntime's; the others may still run
            found[name] = str(error).splitlines()[0][:300]
    return found
