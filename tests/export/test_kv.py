"""Integer KV buffers: every method writes what plain decoding over them writes."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import jetdraft
from jetdraft.errors import OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.quant.test_sensitivity import TEXT

PROMPT = np.random.default_rng(3).integers(0, 288, 30).tolist()
WAYS = [
    {"method": "lookup"},
    {"method": "draft", "num_draft_tokens": 4},
    {"method": "draft", "drafting": {"tree": "best"}, "num_draft_tokens": 7},
    {
        "method": "draft",
        "drafting": {"tree": "best"},
        "num_draft_tokens": 7,
        "exact": False,
    },
    {"method": "auto", "temperature": 0.9, "seed": 2},
]


def options(folder):
    (folder / "text.txt").write_text(TEXT)
    return ExportOptions(
        Recipe("int8", 32, kv="int8"),
        Recipe("int8", 32, kv="int8"),
        capacity=256,
        max_width=64,
        calibration=folder / "text.txt",
    )


@pytest.fixture(scope="module")
def quantized(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv")
    export(str(pair.target), folder / "bundle", str(pair.drafter), options(folder))
    return jetdraft.load(folder / "bundle", threads=1)


def text(model, **way):
    fields = {"max_new_tokens": 120, "ignore_eos": True, **way}
    return model.generate(token_ids=PROMPT, **fields).token_ids


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_text_is_that_of_plain_decoding(quantized, way):
    kept = {key: way[key] for key in ("temperature", "seed", "exact") if key in way}
    assert text(quantized, **way) == text(quantized, method="none", **kept)


def nbytes(graph):
    """The bytes of all KV buffers of a graph."""
    return sum(x.tensor_size_in_bytes() for x in graph.cache.buffers.values())


def test_buffers_are_a_quarter(quantized, model):
    assert quantized.parts.target.contract.kv_bits == 8
    assert nbytes(quantized.parts.target) * 4 == nbytes(model.parts.target)
    assert nbytes(quantized.parts.drafter) * 4 == nbytes(model.parts.drafter)


def test_the_numbers_are_nearly_those_of_floats(quantized, model):
    """The weights are the same, so only the buffers differ; on the calibration text."""
    logits, tokens = [], model.parts.text.encode(TEXT)[:30]
    for target in (model.parts.target, quantized.parts.target):
        target.cache.rewind(0)
        for start in (0, 15):
            answer = target.run(tokens[start : start + 15])
            target.cache.advance(15)
        logits.append(answer.logits.copy())
        target.cache.rewind(0)
    gap = np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max()
    assert 0 < gap < 0.05


def test_scales_make_the_largest_number_the_largest_integer(quantized, pair):
    """Checked on values, which no rotation mixes: they are v_proj's outputs."""
    from jetdraft.checkpoints.checkpoint import Checkpoint
    from jetdraft.quant.calibration import Windows

    folder = quantized.bundle.path
    graph = onnx.load(folder / "drafter.onnx").graph
    stored = {x.name: numpy_helper.to_array(x) for x in graph.initializer}
    checkpoint = Checkpoint.load(str(pair.drafter), torch.float32)
    calibration = folder.parent / "text.txt"
    ids = Windows.of(calibration, checkpoint.tokenizer).ids[:, :256]
    inner = checkpoint.model.model
    with torch.no_grad():
        hidden = inner.layers[0].input_layernorm(inner.embed_tokens(ids))
        values = inner.layers[0].self_attn.v_proj(hidden).abs().amax((0, 1))
    np.testing.assert_allclose(127 * stored["v_scale.0"], values, rtol=1e-4)


def test_recipes_with_a_cache():
    assert Recipe.parse("int4-gptq-b64-kv8").kv_bits == 8
    assert Recipe.parse("none-kv8").name == "none-kv8"
    with pytest.raises(OptionError, match="KV cache"):
        Recipe.parse("int4-kv2")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"flavour": "standard"}, "choose the contrib flavour"),
        ({"provider": "cuda"}, "leave kv out"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, more, reason):
    with pytest.raises(OptionError, match=reason):
        ExportOptions(
            **{"recipe": Recipe(kv="int8"), "calibration": tmp_path / "t", **more}
        )
