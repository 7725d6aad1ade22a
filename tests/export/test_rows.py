"""A row has the same bits whatever rows stand beside it, also over integer buffers."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from jetdraft.errors import OptionError
from jetdraft.export.exporter import ExportOptions
from jetdraft.export.step import log_sum_exp
from jetdraft.recipe import Recipe
from tests import cases
from tests.quant.test_sensitivity import TEXT
from tests.tiny import exported_model, llama_config, save_checkpoint

CAPACITY = 48
WIDTHS = (1, 2, 3, 5, 8)
ROWS, VOCABULARY, TRIALS = 16, 384, 60
PROMPT = np.random.default_rng(3).integers(0, 288, 30).tolist()
BEST = {"method": "draft", "drafting": {"tree": "best"}, "num_draft_tokens": 7}
WAYS = [
    {"method": "lookup"},
    {"method": "draft", "num_draft_tokens": 4},
    BEST,
    {**BEST, "exact": False},
    {"method": "auto", "temperature": 0.9, "seed": 2},
]


@pytest.fixture(scope="module", params=["int8", "int8-kv8", "q8_0", "none"])
def wide(request, tmp_path_factory):
    """Heads of 64, for which onnxruntime's attention has a kernel for one row too."""
    folder = tmp_path_factory.mktemp("one-row")
    config = llama_config(
        hidden_size=256,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
    )
    save_checkpoint(folder / "checkpoint", config)
    source, output = folder / "checkpoint", folder / "bundle"
    return exported_model(source, output, request.param, capacity=CAPACITY)


def logits(wide, width):
    graph = wide.parts.target
    tokens = np.random.default_rng(2).integers(1, 288, CAPACITY).tolist()
    graph.cache.rewind(0)
    rows = []
    while graph.cache.room:
        start, count = graph.cache.length, min(width, graph.cache.room)
        rows += graph.run(tokens[start : start + count]).logits.copy().tolist()
        graph.cache.advance(count)
    return np.array(rows, np.float32)


def test_one_row_attends_with_the_bits_of_several(wide):
    whole = logits(wide, 1)
    assert whole.shape[0] == CAPACITY
    assert np.isfinite(whole).all()
    if wide.bundle.target.quantization["scheme"] == "none":
        # Products with floats have a kernel for one row too.
        np.testing.assert_allclose(logits(wide, 4), whole, atol=1e-4)
        return
    for width in WIDTHS[1:]:
        assert np.array_equal(logits(wide, width), whole), width


def test_plain_decoding_fills_the_buffers(wide):
    prompt = [5, 9, 33, 7]
    how = {"method": "none", "max_new_tokens": 100, "ignore_eos": True}
    exact, loose = (
        wide.generate(token_ids=prompt, exact=exact, **how) for exact in (True, False)
    )
    assert exact.stats.finish_reason == "length"
    if wide.bundle.target.quantization["scheme"] != "none":
        assert 1 in wide.parts.widths.exact
        assert exact.token_ids == loose.token_ids
    assert len(loose.token_ids) == CAPACITY - len(prompt)


class Sum(torch.nn.Module):
    def forward(self, logits):
        return log_sum_exp(logits, logits.amax(-1, keepdim=True))[..., 0]


def test_no_bit_depends_on_the_number_of_rows(tmp_path):
    file, rows = tmp_path / "sum.onnx", torch.export.Dim("n")
    example = torch.zeros(1, 3, VOCABULARY)
    how = {"dynamo": True, "dynamic_shapes": ({1: rows},), "verbose": False}
    torch.onnx.export(Sum().eval(), (example,), file, **how)
    session = onnxruntime.InferenceSession(file)
    [name] = (value.name for value in session.get_inputs())
    random = np.random.default_rng(1)
    for _ in range(TRIALS):
        spread = random.choice([1, 4, 8])
        logits = random.normal(size=(1, ROWS, VOCABULARY)).astype(np.float32) * spread
        logits = logits.astype(np.float32)
        [whole] = session.run(None, {name: logits})
        truth = np.log(np.exp(logits[0].astype(np.float64)).sum(-1))
        np.testing.assert_allclose(whole[0], truth, rtol=1e-6)
        for width in range(1, ROWS):
            [part] = session.run(None, {name: logits[:, :width]})
            assert np.array_equal(part[0], whole[0, :width]), width


@pytest.fixture(scope="module")
def quantized(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv")
    (folder / "text.txt").write_text(TEXT)
    options = {"calibration": folder / "text.txt", "capacity": 256, "max_width": 64}
    options |= {"drafter": pair.drafter, "drafter_recipe": "int8-kv8"}
    return exported_model(pair.target, folder / "bundle", "int8-kv8", **options)


def text(model, **way):
    fields = {"max_new_tokens": 120, "ignore_eos": True, **way}
    return model.generate(token_ids=PROMPT, **fields).token_ids


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_text_is_that_of_plain_decoding(quantized, way):
    kept = {key: way[key] for key in ("temperature", "seed", "exact") if key in way}
    assert text(quantized, **way) == text(quantized, method="none", **kept)


def nbytes(graph):
    return sum(x.tensor_size_in_bytes() for x in graph.cache.buffers.values())


def test_buffers_are_a_quarter(quantized, model):
    assert quantized.parts.target.contract.kv_bits == 8
    assert nbytes(quantized.parts.target) * 4 == nbytes(model.parts.target)
    assert nbytes(quantized.parts.drafter) * 4 == nbytes(model.parts.drafter)


def test_the_numbers_are_nearly_those_of_floats(quantized, model):
    logits, tokens = [], model.parts.text.encode(TEXT)[:30]
    for target in (model.parts.target, quantized.parts.target):
        target.cache.rewind(0)
        for start in (0, 15):
            answer = target.run(tokens[start : start + 15])
            target.cache.advance(15)
        logits.append(answer.logits.copy())
        target.cache.rewind(0)
    assert 0 < (np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max()) < 0.05


def test_scales_make_the_largest_number_the_largest_integer(quantized, pair):
    """Checked on values, which no rotation mixes: they are v_proj's outputs."""
    from jetdraft.checkpoints.checkpoint import Checkpoint
    from jetdraft.quant.divergence import Windows

    folder = quantized.bundle.path
    graph = onnx.load(folder / "drafter.onnx").graph
    stored = {x.name: numpy_helper.to_array(x) for x in graph.initializer}
    checkpoint = Checkpoint.load(str(pair.drafter), torch.float32)
    ids = Windows.of(folder.parent / "text.txt", checkpoint.tokenizer).ids[:, :256]
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


@cases(
    "more, reason",
    ({"flavour": "standard"}, "choose the contrib flavour"),
    ({"provider": "cuda"}, "leave kv out"),
)
def test_what_cannot_run_is_refused(tmp_path, more, reason):
    with pytest.raises(OptionError, match=reason):
        ExportOptions(Recipe(kv="int8"), calibration=tmp_path / "t", **more)
