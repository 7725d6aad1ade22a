"""A CUDA graph can be captured of graphs that copy no size from the host: no Memcpy."""

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import pytest

from jetdraft.bundle import Bundle
from jetdraft.checkpoints.streams import (
    FORECAST,
    SHARED,
    PromptSettings,
    StreamSettings,
)
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods.chimera.task import ChimeraTask
from jetdraft.methods.falcon.task import FalconTask
from jetdraft.methods.glide.task import GlideTask
from jetdraft.recipe import Recipe
from tests.cli.running import jetdraft
from tests.tiny import llama_config, save_checkpoint, save_prompts, save_streams
from tests.train.periodic import STILL
from tests.train.periodic import made as training
from tools.forecast.forecast import forecasts

OPTIONS = ExportOptions(
    Recipe("int8", 32), Recipe("int8", 32), capacity=64, max_width=16, provider="cuda"
)
READ_ON_HOST = {
    **{name: [1] for name in ("Reshape", "Expand", "Unsqueeze", "Squeeze", "Split")},
    **{"Slice": [1, 2, 3, 4], "Range": [0, 1, 2], "ConstantOfShape": [0], "Tile": [1]},
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


def empty_sums(file):
    """Reductions over an axis that may be empty, as (operator, input, size).

    CUDA refuses them, with keepdims too. Only the rows of a pass are never missing.
    """
    graph = onnx.load(file, load_external_data=False).graph
    constants = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in graph.initializer
        if not each.external_data
    }
    sizes = {
        each.name: [d.dim_param or d.dim_value for d in each.type.tensor_type.shape.dim]
        for each in [*graph.input, *graph.value_info]
    }
    rows, found = sizes["position_ids"][1], []
    for node in graph.node:
        if not node.op_type.startswith("Reduce"):
            continue
        shape = sizes[node.input[0]]
        axes = constants[node.input[1]] if len(node.input) > 1 else range(len(shape))
        for size in (shape[axis] for axis in axes):
            known = isinstance(size, int) and size > 0
            if not known and rows not in str(size).split(" + "):
                found.append((node.op_type, node.input[0], size))
    return found


@pytest.fixture(scope="module")
def captured(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("captured") / "bundle"
    return export(str(pair.target), folder, str(pair.drafter), OPTIONS).path


def graphs(folder):
    for entry in Bundle.open(folder).graphs.values():
        yield from (folder / f for f in (entry.file, entry.tree_file) if f)


@pytest.mark.parametrize("faults", [copied_to_device, empty_sums])
def test_chains_and_trees(captured, faults):
    for file in graphs(captured):
        assert faults(file) == [], file.name


def test_check_says_that_cuda_can_run_them(captured):
    result = jetdraft("check", "--for", "cuda", captured)
    assert result.stdout.startswith("verdict    cuda can run all graphs")


make = onnx.helper.make_node


@pytest.mark.parametrize(
    ("faults", "nodes", "shapes", "found"),
    [
        # What the graphs had before: the last row, counted by a shape.
        (copied_to_device,
         [make("Shape", ["ids"], ["n"]), make("Add", ["cursor", "n"], ["last"])],
         {"ids": ["n"], "cursor": [1], "last": [1]}, ("Add", ["cursor", "n"])),
        # What the graphs of streams had before: the probes, counted by their rows.
        (empty_sums,
         [make("ReduceSum", ["probe_rows", "axes"], ["count"], keepdims=1)],
         {"position_ids": [1, "n"], "probe_rows": [1, "r"], "count": [1, 1]},
         ("ReduceSum", "probe_rows", "r")),
    ],
)  # fmt: skip
def test_a_fault_is_found(tmp_path, faults, nodes, shapes, found):
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape)
        for name, shape in shapes.items()
    ]
    axes = onnx.numpy_helper.from_array(np.array([1]), "axes")
    graph = onnx.helper.make_graph(nodes, "g", values[:2], values[2:], [axes])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "g.onnx")
    assert faults(tmp_path / "g.onnx") == [found]


def assert_captured(bundle, sums=False):
    """CUDA runs all graphs of a bundle, and copies nothing; perhaps it sums probes."""
    found = list(forecasts(bundle, "cuda"))
    assert found
    for one in found:
        assert one.refused == [], one.file
        assert one.copies == (), one.file
        assert one.no_capture == "", one.file
        graph = onnx.load(bundle.path / one.file, load_external_data=False).graph
        if sums and "position_ids" in {each.name for each in graph.input}:
            assert empty_sums(bundle.path / one.file) == [], one.file
        # CUDA's GatherND copies a size from the host; a replay would read it again.
        assert "GatherND" not in {node.op_type for node in graph.node}, one.file


STREAMS = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
PROMPTS = PromptSettings(gamma=3, ranks=((0.5, 0.2), (0.4, 0.2), (0.3, 0.1)))
FORECASTS = PromptSettings(gamma=3, prefix=4, mode=FORECAST)
PROBES = {
    "streams": partial(save_streams, settings=STREAMS),
    "shared": partial(save_streams, settings=replace(STREAMS, mode=SHARED)),
    "ppd": partial(save_prompts, settings=PROMPTS),
    "ensemble": partial(save_prompts, settings=replace(PROMPTS, members=2, prefix=2)),
    "forecast": partial(save_prompts, settings=FORECASTS),
}
TASKS = {"glide": GlideTask, "chimera": ChimeraTask, "falcon": FalconTask}


def target_of(folder, layers):
    config = llama_config(num_hidden_layers=layers, tie_word_embeddings=False)
    return str(save_checkpoint(folder / "target", config))


def probed(kind, folder):
    target_of(folder, 2)
    return export(
        str(PROBES[kind](folder / "target")), folder / "bundle", options=OPTIONS
    )


def attached(kind, folder):
    text = folder / "text.txt"
    text.write_text(" the self of the text" * 200)
    target = target_of(folder, 1)
    training(TASKS[kind], target, folder / "head", [text], None, STILL).run()
    options = replace(OPTIONS, draft_vocab=40)
    return export(target, folder / "bundle", options=options, head=str(folder / "head"))


@pytest.mark.parametrize("kind", PROBES)
def test_probes_can_be_captured(kind, tmp_path):
    assert_captured(probed(kind, tmp_path), sums=True)


@pytest.mark.parametrize("kind", TASKS)
def test_attached_drafters_can_be_captured(kind, tmp_path):
    assert_captured(attached(kind, tmp_path))
