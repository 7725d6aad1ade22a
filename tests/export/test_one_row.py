"""A pass of one row has the bits of wider passes, and the last slot is its own."""

from __future__ import annotations

import numpy as np
import pytest

import jetdraft
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.tiny import llama_config, save_checkpoint

CAPACITY = 48
WIDTHS = (1, 2, 3, 5, 8)


@pytest.fixture(scope="module", params=["int8", "int8-kv8", "none"])
def model(request, tmp_path_factory):
    """Heads of 64: the product with the values is large enough for both kernels."""
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
    """Up to the last slot, where the spare slot takes the second row."""
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
