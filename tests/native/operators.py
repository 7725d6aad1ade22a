import numpy as np
import onnxruntime as ort
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from onnx import TensorProto, helper, numpy_helper

from jetdraft import native
from jetdraft.quant.grids import GRIDS, LAYOUT_VERSION, GridMatrix

ARRAYS = ("integers", "scales")
ATTENTION_INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "last_row", "total_length"),
    *("cosines", "sines", "positions", "bias", "sinks"),
)
FLAGS = "do_rotary", "rotary_interleaved", "local_window_size"


def session(kind, matrix, *, threads=1, **changed):
    """A session of an operator with `matrix`; `changed` replaces what it reads."""
    fields = {"N": len(matrix.data), "K": matrix.rows}
    fields |= {"format": GRIDS.index(matrix.grid), "layout": LAYOUT_VERSION}
    fields |= {**dict(zip(ARRAYS, matrix.packed(), strict=True)), **changed}
    arrays = {n: fields.pop(n) for n in (*ARRAYS, "bias") if n in fields}
    return open_session(kind, arrays, threads, fields)


def open_session(kind, arrays, threads, fields):
    kinds = {"x": TensorProto.INT64 if kind == "GatherPacked" else TensorProto.FLOAT}
    if kind == "MatMulExperts":
        kinds["ids"] = TensorProto.INT64
    read = ["x", *arrays, *list(kinds)[1:]]
    graph = helper.make_graph(
        [helper.make_node(kind, read, ["y"], domain="jetdraft", **fields)],
        "operator",
        [helper.make_tensor_value_info(*pair, None) for pair in kinds.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return session_of(graph, threads)


def session_of(graph, threads):
    domains = {"": 21, native.DOMAIN: 1, "com.microsoft": 1}
    domains = [helper.make_opsetid(*domain) for domain in domains.items()]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False  # so that sanitizers see every size
    options.register_custom_ops_library(str(native.LIBRARY))
    return ort.InferenceSession(model.SerializeToString(), options)


def run(kind, matrix, x, **changed):
    return session(kind, matrix, **changed).run(None, {"x": x})[0]


def run_experts(matrix, x, ids, experts=1, **changed):
    fields = {"N": len(matrix.data) // experts, **changed}
    feeds = {"x": x, "ids": np.array(ids)}
    return session("MatMulExperts", matrix, **fields).run(None, feeds)[0]


def gathered(ids, arrays, **fields):
    named = dict(zip(ARRAYS, arrays, strict=True))
    return open_session("GatherPacked", named, 1, fields).run(None, {"x": ids})[0]


def random_matrix(grid, columns, rows, seed=0):
    random = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[grid]]
    blocks = -(-rows // block)
    data = random.integers(0, 256, (columns, blocks, size), dtype=np.uint8)
    with_minima = (0, 2) if grid[-1] in "1K" else (0,)
    for place in {"Q6_K": (208,), "Q3_K": (108,)}.get(grid, with_minima):
        halves = (random.standard_normal((columns, blocks)) * 0.01).astype(np.float16)
        halves[::7] = np.float16(6e-8)
        data[..., place : place + 2] = halves[..., None].view(np.uint8)
    return GridMatrix(grid, data.reshape(columns, -1), rows)


class Attending:
    def __init__(
        self,
        heads=4,
        kv_heads=2,
        size=64,
        length=80,
        packed=True,
        sinks=False,
        **changed,
    ):
        random, self.length, self.packed = np.random.default_rng(0), length, packed
        self.sinks = random.uniform(-3, 3, heads).astype(np.float32) if sinks else None
        widths = [count * size for count in (heads, kv_heads, kv_heads)]
        self.parts = [random.standard_normal((1, length, w), "f4") for w in widths]
        angles = random.uniform(0, 7, (length, size // 2)).astype(np.float32)
        self.tables = {"cosines": np.cos(angles), "sines": np.sin(angles)}
        self.buffer = kv_heads, size
        sizes = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": size**-0.5}
        sizes |= {"softcap": 0.0, **dict.fromkeys(FLAGS, 0)}
        self.attributes = sizes | changed

    def buffers(self, capacity):
        heads, size = self.buffer
        return [np.zeros((1, heads, capacity, size), np.float32) for _ in range(2)]

    def feeds(self, rows, cursor, buffers, bias=None):
        """The inputs of a pass over these rows of the text, at the slot `cursor`."""
        rows = np.array(rows, np.int64)
        parts = [part[:, rows] for part in self.parts]
        parts = [np.concatenate(parts, 2)] if self.packed else parts
        last = np.array([cursor + len(rows) - 1], np.int32)
        feeds = dict(zip(ATTENTION_INPUTS, parts, strict=False))
        feeds |= zip(ATTENTION_INPUTS[3:7], [*buffers, last, last + 1], strict=True)
        if self.attributes["do_rotary"]:
            feeds |= {**self.tables, "positions": rows[None]}
        if self.sinks is not None:
            feeds["sinks"] = self.sinks
        return feeds if bias is None else {**feeds, "bias": bias}

    def session(self, feeds, *, threads=1, domain=native.DOMAIN, outputs=3, **changed):
        read = [name if name in feeds else "" for name in ATTENTION_INPUTS]
        made, kind = ["y", "present_key", "present_value"], "GroupQueryAttention"
        made = made[:outputs]
        attributes = {**self.attributes, **changed, "domain": domain}
        node = helper.make_node(kind, read, made, **attributes)
        kinds = {n: helper.np_dtype_to_tensor_dtype(a.dtype) for n, a in feeds.items()}
        inputs, outputs = (
            [helper.make_tensor_value_info(*pair, None) for pair in pairs.items()]
            for pairs in (kinds, dict.fromkeys(made, TensorProto.FLOAT))
        )
        return session_of(helper.make_graph([node], kind, inputs, outputs), threads)

    def read(self, width, capacity=96, bias=None, rows=None, **options):
        buffers, answers = self.buffers(capacity), []
        rows = np.arange(self.length) if rows is None else np.array(rows)
        for start in range(0, len(rows), width):
            some = slice(start, start + width)
            part = None if bias is None else bias[:, :, some]
            feeds = self.feeds(rows[some], start, buffers, part)
            if start == 0:
                opened = self.session(feeds, **options)
            answer, *buffers = opened.run(None, feeds)
            answers += [*answer[0]]
        return np.array(answers)
