"""A row has the same bits whatever rows stand beside it, up to the last slot."""

import numpy as np
import onnxruntime
import pytest
import torch

import jetdraft
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.step import log_sum_exp
from jetdraft.recipe import Recipe
from tests.tiny import llama_config, save_checkpoint

CAPACITY = 48
WIDTHS = (1, 2, 3, 5, 8)


@pytest.fixture(scope="module", params=["int8", "int8-kv8", "q8_0", "none"])
def model(request, tmp_path_factory):
    """Heads of 64, for which onnxruntime's attention has a kernel for one row too."""
    folder = tmp_path_factory.mktemp("one-row")
    config = llama_config(
        hidden_size=256,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=4,
    )
    save_checkpoint(folder / "checkpoint", config)
    recipe = Recipe.parse(f"{request.param}", 32)
    options = ExportOptions(recipe, capacity=CAPACITY, max_width=16)
    bundle = export(str(folder / "checkpoint"), folder / "bundle", options=options)
    return jetdraft.load(bundle.path, threads=1)


def logits(model, width):
    """Of a whole buffer, read in passes of one width."""
    graph = model.parts.target
    tokens = np.random.default_rng(2).integers(1, 288, CAPACITY).tolist()
    graph.cache.rewind(0)
    rows = []
    while graph.cache.room:
        start = graph.cache.length
        count = min(width, graph.cache.room)
        rows += graph.run(tokens[start : start + count]).logits.copy().tolist()
        graph.cache.advance(count)
    return np.array(rows, np.float32)


def test_one_row_attends_with_the_bits_of_several(model):
    whole = logits(model, 1)
    assert whole.shape[0] == CAPACITY
    assert np.isfinite(whole).all()
    if model.bundle.target.quantization["scheme"] == "none":
        # Products with floats have a kernel for one row too.
        np.testing.assert_allclose(logits(model, 4), whole, atol=1e-4)
        return
    for width in WIDTHS[1:]:
        assert np.array_equal(logits(model, width), whole), width


def test_plain_decoding_fills_the_buffers(model):
    """In the exact class a row needs one slot, not two."""
    prompt = [5, 9, 33, 7]
    how = {"method": "none", "max_new_tokens": 100, "ignore_eos": True}
    exact, loose = (
        model.generate(token_ids=prompt, exact=exact, **how) for exact in (True, False)
    )
    assert exact.stats.finish_reason == "length"
    if model.bundle.target.quantization["scheme"] != "none":
        assert 1 in model.parts.widths.exact
        assert exact.token_ids == loose.token_ids
    assert len(loose.token_ids) == CAPACITY - len(prompt)


ROWS, VOCABULARY, TRIALS = 16, 384, 60


class Sum(torch.nn.Module):
    def forward(self, logits):
        return log_sum_exp(logits, logits.amax(-1, keepdim=True))[..., 0]


def test_no_bit_depends_on_the_number_of_rows(tmp_path):
    file, rows = tmp_path / "sum.onnx", torch.export.Dim("n")
    example = torch.zeros(1, 3, VOCABULARY)
    torch.onnx.export(
        Sum().eval(),
        (example,),
        file,
        dynamo=True,
        dynamic_shapes=({1: rows},),
        verbose=False,
    )
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
