"""Prompt tokens change no text, and no bit of the rows that carry them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.probing.prompted import PromptSettings
from jetdraft.errors import OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from jetdraft.runtime.drafts.probes import Probes, Probing
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.measured.stats import Round
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.guessing import ppd
from jetdraft.runtime.proposers.guessing.ppd import PromptProposer
from jetdraft.runtime.proposers.proposer import Seen
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.train.ppd.prompt_losses import PromptObjective
from tests.tiny import llama_config, save_checkpoint, save_prompts

RANKS = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.1))
SETTINGS = PromptSettings(gamma=3, ranks=RANKS)
PROMPT = np.random.default_rng(8).integers(0, 288, 20).tolist()
WAYS = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 3, "top_k": 40, "top_p": 0.95},
]
DRAFTS = [
    {},
    {"num_draft_tokens": 1},
    {"num_draft_tokens": 5},
    {"drafting": {"tree": "chain"}},
    {"drafting": {"tree": "chain"}, "num_draft_tokens": 3},
    {"drafting": {"tree": "best"}},
    {"drafting": {"rows": 7, "slots": 24}},
]


def exported(folder, settings, recipe, seed=0):
    save_checkpoint(folder / "c", llama_config())
    save_prompts(folder / "c", settings, seed)
    options = ExportOptions(recipe, capacity=256, max_width=32)
    export(str(folder / "c"), folder / "bundle", options=options)
    return jetdraft.load(folder / "bundle", threads=1)


@pytest.fixture(scope="module", params=[32, 128])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    return exported(folder, SETTINGS, Recipe("int4", request.param))


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory):
    """Floats, and two members of each prompt token."""
    folder = tmp_path_factory.mktemp("ensemble")
    return exported(folder, replace(SETTINGS, members=2), Recipe("none"))


@pytest.fixture(scope="module")
def plain_text(model):
    """The ids that plain decoding writes in a way, decoded once per way."""
    texts = {}

    def of(way):
        if str(way) not in texts:
            texts[str(way)] = text(model, "none", **way).token_ids
        return texts[str(way)]

    return of


def text(model, method, **options):
    return model.generate(
        token_ids=PROMPT, method=method, ignore_eos=True, max_new_tokens=120, **options
    )


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_the_text_is_that_of_plain_decoding(model, plain_text, way, draft):
    drafted = text(model, "ppd", **draft, **way)
    assert drafted.token_ids == plain_text(way)
    if "rows" in draft.get("drafting", {}):
        assert drafted.stats.drafted_tokens > 40


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_ensemble_writes_the_same_text(ensemble, way):
    plain = text(ensemble, "none", **way).token_ids
    for exact in (True, False):
        assert text(ensemble, "ppd", exact=exact, **way).token_ids == plain


def test_auto_drafts_with_the_same_probes(model, plain_text):
    assert model.methods == ("none", "lookup", "stream", "ppd", "trigram")
    assert text(model, "auto").token_ids == plain_text({})
    assert text(model, "stream", num_draft_tokens=2).token_ids == plain_text({})


def test_probes_do_not_change_a_bit_of_the_rows(model):
    """What an exact generation rests on, for any numbers of probes, in trees too."""
    graph, draw = model.parts.target, random.Random(5)
    for width in [w for w in model.parts.widths.exact if w <= 8]:
        graph.cache.rewind(0)
        graph.run(PROMPT[:10])
        graph.cache.advance(10)
        alone = graph.run(PROMPT[:width]).logits.copy()
        for _ in range(6):
            counts = tuple(draw.randint(0, 3) for _ in range(width))
            beside = graph.run(PROMPT[:width], probing=Probing(counts=counts))
            assert sorted(beside.probes) == Probes(counts).carriers
            assert np.array_equal(beside.logits, alone)


def test_a_draft_says_how_many_probes_its_rows_carry(model):
    graph = model.parts.target
    graph.cache.rewind(0)
    graph.run(PROMPT)
    graph.cache.advance(len(PROMPT))
    rows = Rows([9, 8, 7, 6], [-1, 0, 1, 0], probes=(3, 0, 2, 1))
    _, answer = graph.verify(rows, 4, Probing(3))
    assert {r: len(a.candidates) for r, a in answer.probes.items()} == {
        0: 3,
        2: 2,
        3: 1,
    }
    cut = rows.cut(2)
    assert cut.probes == (3, 0, 2)
    assert rows.only([0, 3]).probes == (3, 1)
    assert rows.under([5]).probes == (0, 3, 0, 2, 1)


def test_cheap_passes_have_large_trees(model, plain_text, monkeypatch):
    """The tree is planned from pass times, here of passes whose rows are free."""
    method = ppd.METHOD
    proposer = PromptProposer(model.parts.target, RANKS, lambda rows, probes: 10.0)
    monkeypatch.setattr(
        model.planner, "_proposers", {(method, method.options()): proposer}
    )
    monkeypatch.setattr(proposer.costs, "learn", lambda round_: None)
    for way in WAYS:
        drafted = text(model, "ppd", **way)
        assert drafted.token_ids == plain_text(way)
        assert set(drafted.stats.rounds_by_choice) >= {"ppd:15"}
    cut = text(model, "ppd", num_draft_tokens=4)
    assert cut.token_ids == plain_text({})
    assert "ppd:4" in cut.stats.rounds_by_choice


def test_the_plan_follows_the_text(model):
    """Held-out text said that guesses are wrong, and here all of them are right."""

    def pass_ms(rows, probes):
        return 0.4 + 0.1 * rows + 0.02 * probes

    proposer = PromptProposer(model.parts.target, [[0.02] * 3] * 3, pass_ms)
    proposer.begin(PROMPT, Chooser(Sampling()))
    before = proposer.plan(7)
    length = len(PROMPT)
    for _ in range(120):
        logits = np.array([[3.0, 2.0, 1.0]] * 3, np.float32)
        ids = np.arange(length, length + 3)[:, None] + [[0, 100, 101]]
        probes = Answer(ids, logits, logits[:, 0], logits)
        answer = replace(probes, probes={0: probes})
        # The token of a place is its number.
        proposer.observe(Seen(length, Rows.chain([length - 2]), [0], answer))
        drafted = proposer.propose(range(length), 7)
        length += 1
    assert proposer.rates.ranks[0][0] > 0.5 > 0.02 > proposer.rates.ranks[0][1]
    assert drafted.tokens[1] == length - 1
    assert proposer.plan(7).tokens > 1.4 > 1.1 > before.tokens
    proposer.forget()
    assert proposer.plan(7) == before


def test_where_no_plan_pays_rounds_are_those_of_plain_decoding(
    model, plain_text, monkeypatch
):
    """Not even a root carries probes, until the method looks again."""

    def pass_ms(rows, probes):
        return 1.0 + 10.0 * (rows - 1) + 10.0 * probes

    method = ppd.METHOD
    proposer = PromptProposer(model.parts.target, [[0.02] * 3] * 3, pass_ms)
    monkeypatch.setattr(
        model.planner, "_proposers", {(method, method.options()): proposer}
    )
    monkeypatch.setattr(proposer.costs, "learn", lambda round_: None)
    for way in WAYS:
        proposer.forget()
        drafted = text(model, "ppd", **way)
        assert drafted.token_ids == plain_text(way)
        assert drafted.stats.rounds_by_choice["none"] > 60
        assert 0 < drafted.stats.drafted_tokens < 40
    monkeypatch.setattr(ppd, "RESTS", (10**6, 10**6))
    proposer.forget()
    rested = text(model, "ppd").stats
    assert rested.drafted_tokens <= 1


def test_a_plan_learns_what_rounds_take(model):
    """Rows are free in passes, and cost much outside of them."""
    ranks = [[0.3, 0.2, 0.1]] * 3
    proposer = PromptProposer(model.parts.target, ranks, lambda rows, probes: 1.0)
    proposer.begin(PROMPT, Chooser(Sampling()))
    assert len(proposer.plan(15).trees[3].parents) == 15
    for drafted in (0, 15, 15):
        seconds = 1e-3 * (1.1 + 0.5 * drafted)
        proposer.time(Round("ppd", 16, drafted, [], 1e-3, 0.0, seconds=seconds))
    proposer.rates.settled = ppd.FIRST_LOOK
    assert len(proposer.plan(15).trees[3].parents) < 5


@pytest.mark.parametrize("members", [1, 2])
def test_probes_of_passes_are_those_of_training(members, ensemble, tmp_path):
    """The best export test: committed prefixes match, so the logits must."""
    model = ensemble
    if members == 1:
        model = exported(tmp_path, SETTINGS, Recipe("none"), seed=2)
    checkpoint = Checkpoint.load(model.bundle.target.source, torch.float32)
    prompted = checkpoint.with_streams(1.0)
    prompts, own = prompted.prompts, Checkpoint.load(checkpoint.source, torch.float32)
    own.model.set_attn_implementation("sdpa")
    objective = PromptObjective(prompts, own.model)
    ids, anchors = torch.tensor([PROMPT]), torch.tensor([[4, 11, 19]])
    with torch.no_grad():
        _, cache = objective._read(ids)
        expected = objective._guessed(anchors, len(PROMPT), cache)[0].numpy()
    graph = model.parts.target
    graph.cache.rewind(0)
    answer = graph.run(PROMPT, probing=Probing(3))
    for row, wanted in zip((4, 11, 19), expected, strict=True):
        np.testing.assert_allclose(answer.probes[row].logits, wanted, atol=1e-4)


def test_what_the_members_of_an_ensemble_see():
    """Member k sees the members k of the prompt tokens below."""
    seen = Probes((0, 2)).seen([[], [0]], members=2)
    assert seen == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 3]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": 16}, "a tree of 16 rows is wider than a pass"),
        ({"slots": 1}, "slots 1 is out of range; give 2 to 1024"),
        ({"rows": 3, "tree": "chain"}, "rows is for sparse trees only"),
    ],
)
def test_bad_drafting_options(model, options, said):
    with pytest.raises(OptionError, match=said):
        text(model, "ppd", drafting=options)


def test_other_bundles_have_no_prompt_tokens(bundle):
    model = jetdraft.load(bundle, threads=1)
    assert "ppd" not in model.methods
    with pytest.raises(OptionError, match="jetdraft train ppd"):
        model.generate("a", method="ppd")


def test_where_probes_change_bits_an_exact_generation_has_none(model, monkeypatch):
    widths = replace(model.parts.widths, probes_agree=False)
    monkeypatch.setattr(model.parts.survey, "_widths", widths)
    with pytest.raises(OptionError, match="add --no-exact"):
        text(model, "ppd")
    assert text(model, "ppd", exact=False).token_ids
