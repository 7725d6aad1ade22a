"""Graphs that a CUDA graph can be captured of: no size of a pass is copied to the GPU.

onnxruntime computes shapes on the host. A host value that a kernel wants on the device
becomes a Memcpy node, and with one in it a session refuses to capture.
tests/export/test_standard.py looks at the other flavours and at streams.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from jetdraft.bundle import Bundle
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.export.empty_sums import empty_sums

READ_ON_HOST = {
    "Reshape": [1],
    "Expand": [1],
    "Slice": [1, 2, 3, 4],
    "Range": [0, 1, 2],
    "ConstantOfShape": [0],
    "Unsqueeze": [1],
    "Squeeze": [1],
    "Split": [1],
    "Tile": [1],
}
"""The inputs that CUDA kernels read on the host."""

COMPUTED_ON_HOST = {"Cast", "Add", "Sub", "Mul", "Concat", "Gather", "Squeeze"}
COMPUTED_ON_HOST |= {"Unsqueeze", "Slice", "Reshape"}


def copied_to_device(file):
    """Nodes that take a size of the pass where they compute."""
    graph = onnx.load(file, load_external_data=False).graph
    constants, sizes, found = {each.name for each in graph.initializer}, set(), []
    for node in graph.node:
        if node.op_type in ("Shape", "Size"):
            sizes |= set(node.output)
            continue
        taken = [place for place, name in enumerate(node.input) if name in sizes]
        if not set(taken) - set(READ_ON_HOST.get(node.op_type, [])):
            continue
        on_host = all(name in sizes | constants for name in node.input)
        if node.op_type in COMPUTED_ON_HOST and on_host:
            sizes |= set(node.output)
        else:
            found.append((node.op_type, list(node.input)))
    return found


@pytest.fixture(scope="module")
def captured(pair, tmp_path_factory):
    """A pair for CUDA, whose graphs are captured."""
    folder = tmp_path_factory.mktemp("captured") / "bundle"
    options = ExportOptions(
        Recipe("int8", 32), capacity=64, max_width=16, provider="cuda"
    )
    return export(str(pair.target), folder, str(pair.drafter), options).path


def graphs(folder):
    """The step graphs of a bundle: halves run on the CPU."""
    for entry in Bundle.open(folder).graphs.values():
        yield from (folder / f for f in (entry.file, entry.tree_file) if f)


def test_chains_and_trees(captured):
    for file in graphs(captured):
        assert copied_to_device(file) == [], file.name


def test_a_copy_is_found(tmp_path):
    """What the graphs had before: the last row, counted by a shape."""
    make = onnx.helper.make_node
    nodes = [make("Shape", ["ids"], ["n"]), make("Add", ["cursor", "n"], ["last"])]
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape)
        for name, shape in (("ids", ["n"]), ("cursor", [1]), ("last", [1]))
    ]
    graph = onnx.helper.make_graph(nodes, "g", values[:2], values[2:])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "g.onnx")
    assert copied_to_device(tmp_path / "g.onnx") == [("Add", ["cursor", "n"])]


def test_no_empty_sums_with_a_drafter(captured):
    for file in graphs(captured):
        assert empty_sums(file) == [], file.name


def test_an_empty_sum_is_found(tmp_path):
    """What the graphs of streams had before: the probes, counted by their rows."""
    make = onnx.helper.make_node
    nodes = [make("ReduceSum", ["probe_rows", "axes"], ["count"], keepdims=1)]
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape)
        for name, shape in (
            ("position_ids", [1, "n"]), ("probe_rows", [1, "r"]), ("count", [1, 1])
        )
    ]  # fmt: skip
    axes = onnx.numpy_helper.from_array(np.array([1]), "axes")
    graph = onnx.helper.make_graph(nodes, "g", values[:2], values[2:], [axes])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "g.onnx")
    assert empty_sums(tmp_path / "g.onnx") == [("ReduceSum", "probe_rows", "r")]
