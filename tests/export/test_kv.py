"""Integer KV buffers: every method writes what plain decoding over them writes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import jetdraft
from jetdraft.errors import OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.quant.test_calibration import TEXT

PROMPT = np.random.default_rng(3).integers(0, 288, 30).tolist()
WAYS = [
    {"method": "lookup"},
    {"method": "draft", "num_draft_tokens": 4},
    {"method": "draft", "tree": "best", "num_draft_tokens": 7},
    {"method": "draft", "tree": "best", "num_draft_tokens": 7, "exact": False},
    {"method": "auto", "temperature": 0.9, "seed": 2},
]


def options(folder, kv, **more):
    (folder / "text.txt").write_text(TEXT)
    return ExportOptions(
        Recipe("int8", 32, kv=kv),
        Recipe("int8", 32, kv=kv),
        capacity=256,
        max_width=64,
        calibration=folder / "text.txt",
        **more,
    )


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantized(pair, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param)
    made = options(folder, request.param)
    export(str(pair.target), folder / "bundle", str(pair.drafter), made)
    return jetdraft.load(folder / "bundle", threads=1)


def text(model, **way):
    given = {"max_new_tokens": 120, "ignore_eos": True, **way}
    return model.generate(token_ids=PROMPT, **given).token_ids


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_text_is_that_of_plain_decoding(quantized, way):
    kept = {key: way[key] for key in ("temperature", "seed", "exact") if key in way}
    assert text(quantized, **way) == text(quantized, method="none", **kept)


def test_buffers_are_a_quarter_or_an_eighth(quantized, model):
    bits = quantized.target.contract.kv_bits
    assert quantized.target.cache.nbytes * 32 == model.target.cache.nbytes * bits
    assert quantized.drafter.cache.nbytes * 32 == model.drafter.cache.nbytes * bits


def test_the_numbers_are_nearly_those_of_floats(quantized, model):
    """The same weights, so that only the buffers differ; of a calibrated text."""
    logits, tokens = [], model.text.encode(TEXT)[:30]
    for each in (model, quantized):
        each.target.cache.rewind(0)
        for start in (0, 15):
            answer = each.target.run(tokens[start : start + 15])
            each.target.cache.advance(15)
        logits.append(answer.logits.copy())
        each.target.cache.rewind(0)
    gap = np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max()
    assert 0 < gap < {8: 0.05, 4: 0.8}[quantized.target.contract.kv_bits]


def test_scales_make_the_largest_number_the_largest_integer(pair, tmp_path):
    """Of values, which no rotation mixes: what v_proj gives."""
    from jetdraft.checkpoints.checkpoint import Checkpoint
    from jetdraft.quant.calibration import Windows

    made = options(tmp_path, "int8")
    export(str(pair.drafter), tmp_path / "b", options=made)
    graph = onnx.load(tmp_path / "b" / "target.onnx").graph
    stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    checkpoint = Checkpoint.load(str(pair.drafter), torch.float32)
    ids = Windows.of(made.calibration, checkpoint.tokenizer).ids[:, :256]
    inner = checkpoint.model.model
    with torch.no_grad():
        hidden = inner.layers[0].input_layernorm(inner.embed_tokens(ids))
        values = inner.layers[0].self_attn.v_proj(hidden).abs().amax((0, 1))
    np.testing.assert_allclose(127 * stored["v_scale.0"], values, rtol=1e-4)


def test_recipes_with_a_cache():
    assert Recipe.parse("int4-gptq-b64-kv8").kv_bits == 8
    assert Recipe.parse("none-kv4").name == "none-kv4"
    with pytest.raises(OptionError, match="KV cache"):
        Recipe.parse("int4-kv2")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"flavour": "standard"}, "choose the contrib flavour"),
        ({"provider": "cuda"}, "leave kv out"),
        ({"calibration": None}, "--calibration FILE"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path, more, reason):
    with pytest.raises(OptionError, match=reason):
        ExportOptions(
            **{"recipe": Recipe(kv="int8"), "calibration": tmp_path / "t", **more}
        )
