"""Graphs that copy nothing from the host, and graphs of ai.onnx operators alone."""

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from transformers import MistralConfig

from jetdraft.bundle import FLAVOURS, Bundle
from jetdraft.checkpoints import streams
from jetdraft.errors import OptionError, UnsupportedModelError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests import LONG, WAYS, cases, same_text, tiny
from tests.programs import assert_refused
from tests.programs import jetdraft as run
from tests.tiny import (
    SIZES,
    exported,
    exported_model,
    llama_config,
    save_checkpoint,
    save_probes,
)
from tests.train.attached.conftest import random_head
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
make = onnx.helper.make_node
STREAMS = streams.StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
PROMPTS = streams.PromptSettings(gamma=3, ranks=((0.5, 0.2), (0.4, 0.2), (0.3, 0.1)))
PROBES = {
    "streams": STREAMS,
    "shared": replace(STREAMS, mode=streams.SHARED),
    "ppd": PROMPTS,
    "ensemble": replace(PROMPTS, members=2, prefix=2),
    "forecast": streams.PromptSettings(gamma=3, prefix=4, mode=streams.FORECAST),
}
PROMPT = np.random.default_rng(4).integers(0, 288, 20).tolist()
LAYERS = 2


def copied_to_device(file):
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
    """Sums of an axis that may be empty, as CUDA refuses: (operator, input, size)."""
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
    result = run("check", "--for", "cuda", captured)
    assert result.stdout.startswith("verdict    cuda can run all graphs")


COPIED = [make("Shape", ["ids"], ["n"]), make("Add", ["cursor", "n"], ["last"])]
SUMMED = [make("ReduceSum", ["probe_rows", "axes"], ["count"], keepdims=1)]
OF_LAST = {"ids": ["n"], "cursor": [1], "last": [1]}
OF_COUNT = {"position_ids": [1, "n"], "probe_rows": [1, "r"], "count": [1, 1]}


@cases(
    "faults, nodes, shapes, found",
    (copied_to_device, COPIED, OF_LAST, ("Add", ["cursor", "n"])),
    (empty_sums, SUMMED, OF_COUNT, ("ReduceSum", "probe_rows", "r")),
)
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


def target_of(folder, layers):
    config = llama_config(num_hidden_layers=layers, tie_word_embeddings=False)
    return str(save_checkpoint(folder / "target", config))


def probed(kind, folder):
    target = target_of(folder, 2)
    save_probes(folder / "target", PROBES[kind])
    return export(target, folder / "bundle", options=OPTIONS)


def attached(kind, folder):
    head, options = random_head(folder / "head", kind), replace(OPTIONS, draft_vocab=40)
    return export(
        target_of(folder, 1), folder / "bundle", options=options, head=str(head)
    )


@cases(
    "make, kind",
    *((probed, kind) for kind in PROBES),
    *((attached, kind) for kind in ("glide", "chimera", "falcon")),
)
def test_probes_and_attached_drafters_can_be_captured(make, kind, tmp_path):
    assert_captured(make(kind, tmp_path), sums=make is probed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standard")
    save_checkpoint(folder / "target", llama_config(num_hidden_layers=LAYERS))
    save_checkpoint(folder / "drafter", llama_config(num_hidden_layers=1))
    return folder


def loaded(folder, flavour, scheme, **drafter):
    output = folder / f"{flavour}-{scheme}"
    how = {"flavour": flavour, **drafter}
    return exported_model(folder / "target", output, scheme, **how)


@pytest.fixture(scope="module")
def floats(folder):
    return loaded(folder, "standard", "none", drafter=folder / "drafter")


@pytest.fixture(scope="module")
def int4(folder):
    drafter = {"drafter": folder / "drafter", "drafter_recipe": "int8"}
    return loaded(folder, "standard", "int4", **drafter)


@pytest.fixture(params=["floats", "int4"])
def standard(request):
    return request.getfixturevalue(request.param)


def test_there_are_no_other_operators_and_check_names_the_flavour(standard):
    for file in standard.bundle.path.glob("*.onnx"):
        model = onnx.load(file, load_external_data=False)
        assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
        assert "RMSNormalization" not in {node.op_type for node in model.graph.node}
        assert [entry.domain for entry in model.opset_import] == [""]
    shown = run("check", standard.bundle.path, "--no-run").stdout
    assert "flavour     standard" in shown


@cases(
    "name, kind, layers",
    ("target", onnx.TensorProto.INT4, LAYERS),
    ("drafter", onnx.TensorProto.INT8, 1),
)
def test_what_is_quantized_is_dequantized(floats, int4, name, kind, layers):
    nodes = {}
    for model in (floats, int4):
        file = model.bundle.path / f"{name}.onnx"
        graph = onnx.load(file, load_external_data=False).graph
        nodes[model] = [n for n in graph.node if n.op_type == "DequantizeLinear"]
    assert not nodes[floats]
    # Four of attention, three of the network in each of the layers, and the head.
    assert len(nodes[int4]) == layers * 7 + 1
    kinds = {value.name: value.data_type for value in graph.initializer}
    for node in nodes[int4]:
        assert kinds[node.input[0]] == kind
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert attributes == {"axis": 0, "block_size": 32}


def test_the_text_is_that_of_the_contrib_flavour(floats, in_contrib):
    """Random models have narrow gaps, so tests/test_pycode.py compares int4 texts."""
    for way in WAYS:
        how = {"token_ids": PROMPT, "method": "none", **LONG, **way}
        contrib, standard = (m.generate(**how).token_ids for m in (in_contrib, floats))
        assert contrib == standard


@pytest.fixture(scope="module")
def in_contrib(folder):
    return loaded(folder, "contrib", "none")


def test_the_integers_are_those_of_the_contrib_flavour(folder, int4):
    other = folder / "contrib-drafter"
    exported(folder / "drafter", other, "int8", flavour="contrib")
    contrib, standard = (
        {
            value.name: numpy_helper.to_array(value, str(file.parent))
            for value in onnx.load(file).graph.initializer
        }
        for file in (other / "target.onnx", int4.bundle.path / "drafter.onnx")
    )
    # Projections that fusion merges have other names in the contrib flavour.
    both = [n for n in contrib.keys() & standard.keys() if n.endswith("int8")]
    assert both
    for name in both:
        packed, integers = contrib[name], standard[name].astype(np.int16)
        unpacked = packed.reshape(len(packed), -1).T.astype(np.int16) - 128
        assert np.array_equal(unpacked[: len(integers)], integers)


def test_drafting_writes_the_same(standard):
    drafts = ["draft", "lookup", {"method": "draft", "drafting": {"tree": "best"}}]
    same_text(standard, drafts, token_ids=PROMPT)


def test_the_buffers_are_written_in_place(standard):
    """TensorScatter says on stderr where it copies; the cache would then be stale."""
    target = standard.parts.target
    target.cache.rewind(0)
    target.run(PROMPT[:4])
    assert np.abs(next(iter(target.cache.buffers.values())).numpy()[:, :, :4]).sum() > 0
    target.cache.rewind(0)


def test_sliding_windows_are_refused(tmp_path):
    config = MistralConfig(**SIZES | {"num_hidden_layers": 1, "sliding_window": 8})
    save_checkpoint(tmp_path / "target", config)
    words, standard = "sliding window", {"flavour": "standard"}
    tiny.refused(UnsupportedModelError, words, tmp_path / "target", **standard)


def test_unknown_flavours(folder):
    with pytest.raises(OptionError, match="unknown flavour 'tensorrt'"):
        ExportOptions(flavour="tensorrt")
    done = run("export", folder / "target", "-o", folder / "x", "--flavour", "trt")
    assert_refused(done, "trt")


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    save_checkpoint(folder / "checkpoint", llama_config(num_hidden_layers=LAYERS))
    save_probes(folder / "checkpoint", STREAMS)
    make = partial(exported_model, folder / "checkpoint")
    return {each: make(folder / each, flavour=each) for each in FLAVOURS}


def test_no_size_of_a_pass_is_copied_to_a_gpu(floats, int4, streamed):
    for model in (floats, int4, *streamed.values()):
        for file in graphs(model.bundle.path):
            assert copied_to_device(file) == [], file


def test_streams_write_the_same(streamed):
    drafts = [
        {"method": "stream", "num_draft_tokens": 3, "drafting": {"tree": tree}}
        for tree in ("chain", "best")
    ]
    written = [same_text(m, drafts, token_ids=PROMPT) for m in streamed.values()]
    for same in zip(*written, strict=True):
        assert len({(*one.token_ids, one.stats.target_passes) for one in same}) == 1


def test_without_tensor_scatter(folder, floats):
    """TensorRT may not import it; then ScatterND writes the rows."""
    scattered = loaded(folder, "standard-scatternd", "none")
    graph = onnx.load(scattered.bundle.path / "target-tree.onnx").graph
    names = [node.op_type for node in graph.node]
    assert "TensorScatter" not in names
    assert names.count("ScatterND") == 2 * LAYERS
    one, other = (
        [found.token_ids for found in same_text(model, ["lookup"], token_ids=PROMPT)]
        for model in (floats, scattered)
    )
    assert one == other
