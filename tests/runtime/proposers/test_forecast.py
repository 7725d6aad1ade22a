"""Forecasts change no weight, no text, and no bit of the target's rows."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.probing.prompted import FORECAST, PromptSettings
from jetdraft.errors import OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from jetdraft.runtime.drafts.probes import Probes, Probing
from jetdraft.train.ppd.prompt_losses import PromptObjective
from tests.runtime.proposers.test_ppd import PROMPT, WAYS, exported, text
from tests.tiny import llama_config, save_checkpoint

SETTINGS = PromptSettings(gamma=4, prefix=5, mode=FORECAST)
DRAFTS = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 4},
    {"drafting": {"tree": "chain"}},
    {"drafting": {"tree": "chain"}, "num_draft_tokens": 4},
    {"drafting": {"tree": "k-ary", "branching": [2, 1, 1]}},
]


@pytest.fixture(scope="module", params=[32, 128])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecasts")
    return exported(folder, SETTINGS, Recipe("int4", request.param))


@pytest.fixture(scope="module")
def base(model, tmp_path_factory):
    """The same target without forecasts."""
    folder = tmp_path_factory.mktemp("base")
    save_checkpoint(folder / "c", llama_config())
    size = model.bundle.target.quantization["block_size"]
    options = ExportOptions(Recipe("int4", size), capacity=256, max_width=32)
    export(str(folder / "c"), folder / "bundle", options=options)
    return jetdraft.load(folder / "bundle", threads=1)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_text_is_that_of_the_bundle_without_forecasts(model, base, way):
    plain = text(base, "none", **way).token_ids
    assert text(model, "none", **way).token_ids == plain
    for draft in DRAFTS:
        assert text(model, "forecast", **draft, **way).token_ids == plain, draft


def test_ten_rows_carry_two_forecasts_each(model):
    graph, sizes = model.parts.target, set()
    run = graph.run_branches

    def spy(tokens, *rest, **options):
        answer = run(tokens, *rest, **options)
        sizes.add((len(tokens), answer.probe_count))
        return answer

    graph.run_branches = spy
    try:
        stats = text(model, "forecast").stats
    finally:
        del graph.run_branches
    assert (10, 20) in sizes
    assert "forecast:9" in stats.rounds_by_choice


def test_ordinary_rows_have_the_bits_of_the_bundle_without(model, base):
    """With any forecasts, and with none, at every exact width."""
    draw, own, plain = random.Random(5), model.parts.target, base.parts.target
    for width in [w for w in model.parts.widths.exact if 1 < w <= 10]:
        for graph in (own, plain):
            graph.cache.rewind(0)
            graph.run(PROMPT[:10])
            graph.cache.advance(10)
        expected = plain.run(PROMPT[:width]).logits.copy()
        assert np.array_equal(own.run(PROMPT[:width]).logits, expected)
        for _ in range(4):
            counts = tuple(draw.randint(0, 4) for _ in range(width))
            beside = own.run(PROMPT[:width], probing=Probing(counts=counts))
            assert sorted(beside.probes) == Probes(counts).carriers
            assert np.array_equal(beside.logits, expected)


def test_forecasts_of_passes_are_those_of_training(tmp_path):
    """They see the prefix in each layer, the rows before them, and one another."""
    model = exported(tmp_path, SETTINGS, Recipe("none"))
    checkpoint = Checkpoint.load(model.bundle.target.source, torch.float32)
    prompts = checkpoint.with_streams(1.0).prompts
    own = Checkpoint.load(checkpoint.source, torch.float32)
    own.model.set_attn_implementation("sdpa")
    objective = PromptObjective(prompts, own.model)
    anchors = torch.tensor([[4, 11, 19]])
    expected = {}
    for kind in ("prefix", "none"):
        with torch.no_grad():
            _, cache = objective._read(torch.tensor([PROMPT]))
            expected[kind] = objective._guessed(anchors, len(PROMPT), cache)[0].numpy()
            prompts.keys.zero_()
            prompts.values.zero_()
    graph = model.parts.target
    graph.cache.rewind(0)
    answer = graph.run(PROMPT, probing=Probing(4))
    for row, wanted in zip((4, 11, 19), expected["prefix"], strict=True):
        np.testing.assert_allclose(answer.probes[row].logits, wanted, atol=1e-4)
    assert np.abs(expected["prefix"] - expected["none"]).max() > 0.1


def test_what_forecasts_see():
    """Two slots of a prefix between the rows and the forecasts."""
    seen = Probes((2,)).seen([[]], prefix=2)
    assert seen == [[], [], [0, 1, 2], [0, 1, 2, 3]]


def test_the_end_of_the_buffer_has_no_room_for_forecasts(model):
    how = {"token_ids": PROMPT, "ignore_eos": True, "max_new_tokens": 10_000}
    full = model.generate(method="none", **how)
    assert model.generate(method="forecast", **how).token_ids == full.token_ids
    assert len(full.token_ids) == 256 - len(PROMPT)


def test_other_bundles_have_no_forecasts(base):
    assert "forecast" not in base.methods
    with pytest.raises(OptionError, match="jetdraft train forecast"):
        base.generate("a", method="forecast")
