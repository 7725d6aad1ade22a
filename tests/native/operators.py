"""Graphs of one operator of `jetdraft.native`, for tests."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from onnx import TensorProto, helper, numpy_helper

from jetdraft import native
from jetdraft.quant.grids import GRIDS, LAYOUT_VERSION, GridMatrix

ARRAYS = ("integers", "scales")


def session(kind, matrix, *, threads=1, **changed):
    """A session of MatMulPacked or GatherPacked; `changed` replaces what it reads."""
    fields = {
        "N": len(matrix.data),
        "K": matrix.rows,
        "format": GRIDS.index(matrix.grid),
        "layout": LAYOUT_VERSION,
        **dict(zip(ARRAYS, matrix.packed(), strict=True)),
        **changed,
    }
    arrays = [fields.pop(name) for name in ARRAYS]
    return open_session(kind, arrays, threads, fields)


def open_session(kind, arrays, threads, fields):
    read = TensorProto.INT64 if kind == "GatherPacked" else TensorProto.FLOAT
    node = helper.make_node(kind, ["x", *ARRAYS], ["y"], domain="jetdraft", **fields)
    graph = helper.make_graph(
        [node],
        "operator",
        [helper.make_tensor_value_info("x", read, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for a, n in zip(arrays, ARRAYS, strict=True)],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("jetdraft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False  # so that sanitizers see every size
    options.register_custom_ops_library(str(native.LIBRARY))
    return ort.InferenceSession(model.SerializeToString(), options)


def run(kind, matrix, x, **changed):
    return session(kind, matrix, **changed).run(None, {"x": x})[0]


def gathered(ids, arrays, **fields):
    """Columns of a packed matrix as floats [ids, rows]."""
    return open_session("GatherPacked", arrays, 1, fields).run(None, {"x": ids})[0]


def random_matrix(grid, columns, rows, seed=0):
    """A matrix of random integers and scales, of which some are 0 or subnormal."""
    random = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[grid]]
    blocks = -(-rows // block)
    data = random.integers(0, 256, (columns, blocks, size), dtype=np.uint8)
    places = (208,) if grid == "Q6_K" else (0, 2) if grid[-1] in "1K" else (0,)
    for place in places:
        halves = (random.standard_normal((columns, blocks)) * 0.01).astype(np.float16)
        halves[::7] = np.float16(6e-8)
        data[..., place : place + 2] = halves[..., None].view(np.uint8)
    return GridMatrix(grid, data.reshape(columns, -1), rows)
