"""The standard flavour: ai.onnx operators alone, on the CPU provider."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from transformers import MistralConfig

import jetdraft
from jetdraft.bundle import FLAVOURS
from jetdraft.checkpoints.streams import StreamSettings
from jetdraft.errors import OptionError, UnsupportedModelError
from jetdraft.export.exporter import ExportOptions
from tests.cli.running import assert_refused
from tests.cli.running import jetdraft as run
from tests.export.test_capture import copied_to_device, graphs
from tests.exports import exported
from tests.tiny import SIZES, llama_config, save_checkpoint, save_streams

PROMPT = np.random.default_rng(4).integers(0, 288, 20).tolist()
WAYS = [{}, {"temperature": 0.9, "seed": 3}]
LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standard")
    save_checkpoint(folder / "target", llama_config(num_hidden_layers=LAYERS))
    save_checkpoint(folder / "drafter", llama_config(num_hidden_layers=1))
    return folder


def loaded(folder, flavour, scheme, **drafter):
    output = folder / f"{flavour}-{scheme}"
    exported(folder / "target", output, scheme, flavour=flavour, **drafter)
    return jetdraft.load(output, threads=1)


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


def test_there_are_no_other_operators(standard):
    for file in standard.bundle.path.glob("*.onnx"):
        model = onnx.load(file, load_external_data=False)
        assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
        assert "RMSNormalization" not in {node.op_type for node in model.graph.node}
        assert [entry.domain for entry in model.opset_import] == [""]


@pytest.mark.parametrize(
    ("name", "kind", "layers"),
    [("target", onnx.TensorProto.INT4, LAYERS), ("drafter", onnx.TensorProto.INT8, 1)],
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


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_text_is_that_of_the_contrib_flavour(floats, in_contrib, way):
    """Quantized activations make a step of a last bit, and random models have narrow
    gaps; tests/test_pycode.py compares the int4 texts of a trained one."""
    how = {"token_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True, **way}
    contrib, standard = (
        model.generate(method="none", **how).token_ids for model in (in_contrib, floats)
    )
    assert contrib == standard


@pytest.fixture(scope="module")
def in_contrib(folder):
    return loaded(folder, "contrib", "none")


def test_the_integers_are_those_of_the_contrib_flavour(folder, int4):
    """Unpacked from MatMulNBits, and as DequantizeLinear has them."""
    other = folder / "contrib-drafter"
    exported(folder / "drafter", other, "int8", flavour="contrib")
    files = other / "target.onnx", int4.bundle.path / "drafter.onnx"
    contrib, standard = (
        {
            value.name: numpy_helper.to_array(value, str(file.parent))
            for value in onnx.load(file).graph.initializer
        }
        for file in files
    )
    # Projections that fusion merges have other names in the contrib flavour.
    both = [n for n in contrib.keys() & standard.keys() if n.endswith("int8")]
    assert both
    for name in both:
        packed, integers = contrib[name], standard[name].astype(np.int16)
        unpacked = packed.reshape(len(packed), -1).T.astype(np.int16) - 128
        assert np.array_equal(unpacked[: len(integers)], integers)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "method",
    [
        {"method": "draft"},
        {"method": "lookup"},
        {"method": "draft", "drafting": {"tree": "best"}},
    ],
    ids=str,
)
def test_drafting_writes_the_same(standard, method, way):
    model = standard
    how = {"token_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True, **way}
    plain = model.generate(method="none", **how).token_ids
    assert model.generate(**method, **how).token_ids == plain


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
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        exported(tmp_path / "target", tmp_path / "out", flavour="standard")
    assert not (tmp_path / "out").exists()


def test_check_names_the_flavour(standard):
    shown = run("check", standard.bundle.path, "--no-run").stdout
    assert "flavour     standard" in shown


def test_unknown_flavours(folder):
    with pytest.raises(OptionError, match="unknown flavour 'tensorrt'"):
        ExportOptions(flavour="tensorrt")
    done = run("export", folder / "target", "-o", folder / "x", "--flavour", "trt")
    assert_refused(done, "trt")


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    save_checkpoint(folder / "checkpoint", llama_config(num_hidden_layers=LAYERS))
    settings = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
    save_streams(folder / "checkpoint", settings)
    models = {}
    for flavour in FLAVOURS:
        bundle = exported(folder / "checkpoint", folder / flavour, flavour=flavour)
        models[flavour] = jetdraft.load(bundle.path, threads=1)
    return models


def test_no_size_of_a_pass_is_copied_to_a_gpu(floats, int4, streamed):
    for model in (floats, int4, *streamed.values()):
        for file in graphs(model.bundle.path):
            assert copied_to_device(file) == [], file


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_streams_write_the_same(streamed, way):
    how = {"token_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True, **way}
    plain = streamed["contrib"].generate(method="none", **how).token_ids
    how |= {"method": "stream", "num_draft_tokens": 3}
    for tree in ("chain", "best"):
        drafting = {"tree": tree}
        results = [m.generate(**how, drafting=drafting) for m in streamed.values()]
        assert all(result.token_ids == plain for result in results)
        assert len({result.stats.target_passes for result in results}) == 1


def test_without_tensor_scatter(folder, floats):
    """TensorRT may not import it; then ScatterND writes the rows."""
    scattered = loaded(folder, "standard-scatternd", "none")
    graph = onnx.load(scattered.bundle.path / "target-tree.onnx").graph
    names = [node.op_type for node in graph.node]
    assert "TensorScatter" not in names
    assert names.count("ScatterND") == 2 * LAYERS
    for way in WAYS:
        one, other = (
            model.generate(token_ids=PROMPT, method="lookup", max_new_tokens=40, **way)
            for model in (floats, scattered)
        )
        assert one.token_ids == other.token_ids
