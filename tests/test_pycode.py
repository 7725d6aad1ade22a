"""The trained pair: the same text over a thousand tokens, and a drafter that lives."""

import importlib
import json
from functools import partial
from pathlib import Path

import pytest
import torch

import jetdraft
from tests.exports import exported

FOLDER = Path(__file__).parent.parent / "examples" / "pycode"
PROMPT = "class Queue:\n    def __init__(self, items):\n        self.items = "
# Set below these runs' rates by a margin, see docs/log/quantization.md: a change that
# costs acceptance must be seen, and equality of texts cannot see it.
GREEDY_FLOOR = 0.50
SAMPLED_FLOOR = 0.40
# The head's, by place in a draft of three; an untrained head is right at 0.00.
HEAD_FLOORS = {0.0: (0.5, 0.4, 0.4), 0.8: (0.3, 0.2, 0.15)}
HEAD_MEGABYTES = 4
SIZES = {"capacity": 2048, "max_width": 128}


@pytest.fixture(scope="module")
def pycode(tmp_path_factory):
    output = tmp_path_factory.mktemp("bundles") / "pycode"
    drafter = {"drafter": FOLDER / "drafter", "drafter_recipe": "int8"}
    exported(FOLDER / "target", output, "int4", **drafter, **SIZES)
    return jetdraft.load(output, threads=1)


@pytest.mark.parametrize(
    ("temperature", "seed", "floor", "tokens"),
    [(0.0, 0, GREEDY_FLOOR, 1000), (0.8, 1, SAMPLED_FLOOR, 300), (1.2, 2, 0.0, 300)],
)
def test_many_tokens_with_every_method(pycode, temperature, seed, floor, tokens):
    options = {
        "max_new_tokens": tokens, "temperature": temperature, "seed": seed,
        "ignore_eos": True,
    }  # fmt: skip
    plain = pycode.generate(PROMPT, method="none", **options)
    assert len(plain.token_ids) == tokens
    for method, length in (("draft", 1), ("draft", 4), ("lookup", 4), ("auto", None)):
        result = pycode.generate(
            PROMPT, method=method, num_draft_tokens=length, **options
        )
        assert result.token_ids == plain.token_ids, (method, length)
        if method == "draft":
            assert result.stats.acceptance_rate >= floor


def test_sampled_drafts_are_coupled_to_the_target(pycode):
    """Without the shared noise, agreement at T = 1 would be about half as high."""
    rates = [
        pycode.generate(
            PROMPT, method="draft", num_draft_tokens=2, max_new_tokens=300,
            temperature=1.0, seed=seed, ignore_eos=True,
        ).stats.acceptance_rate
        for seed in range(2)
    ]  # fmt: skip
    assert sum(rates) / len(rates) >= SAMPLED_FLOOR


def test_the_standard_flavour_writes_the_same(pycode, tmp_path):
    """Of ai.onnx operators alone, int4 integers the same, attention another kernel."""
    how = {"flavour": "standard", **SIZES}
    exported(FOLDER / "target", tmp_path / "bundle", "int4", **how)
    standard = jetdraft.load(tmp_path / "bundle", threads=1)
    for way in ({}, {"temperature": 0.8, "seed": 1}):
        options = {"max_new_tokens": 200, "ignore_eos": True, **way}
        plain = standard.generate(PROMPT, method="none", **options)
        assert standard.generate(PROMPT, method="lookup", **options).text == plain.text
        if not way:  # a sampled text turns at a near tie, where kernels round otherwise
            assert pycode.generate(PROMPT, method="none", **options).text == plain.text


@pytest.fixture(scope="module")
def with_head(tmp_path_factory):
    output = tmp_path_factory.mktemp("bundles") / "with-head"
    head = {"head": FOLDER / "head", "drafter_recipe": "int8"}
    exported(FOLDER / "target", output, "int4", **head, **SIZES)
    return jetdraft.load(output, threads=1)


@pytest.mark.parametrize("temperature", HEAD_FLOORS)
def test_the_head_is_right_often_and_never_changes_the_text(with_head, temperature):
    options = {
        "max_new_tokens": 96, "temperature": temperature, "seed": 1, "ignore_eos": True,
    }  # fmt: skip
    lines = (FOLDER / "prompts.jsonl").read_text().splitlines()[:4]
    total = None
    for prompt in (json.loads(line)["prompt"] for line in lines):
        plain = with_head.generate(prompt, method="none", **options)
        result = with_head.generate(
            prompt, method="eagle", num_draft_tokens=3, **options
        )
        assert result.token_ids == plain.token_ids
        if total is None:
            total = result.stats
        else:
            total.merge(result.stats)
    rates = total.accepted_by_position
    floors = HEAD_FLOORS[temperature]
    assert all(r >= f for r, f in zip(rates, floors, strict=True)), rates


def test_the_head_is_small():
    size = sum(file.stat().st_size for file in (FOLDER / "head").iterdir())
    assert size <= HEAD_MEGABYTES * 10**6


def test_the_recipe_takes_a_step(tmp_path, monkeypatch):
    """Its trainings take half an hour, so no other test runs them."""
    monkeypatch.syspath_prepend(FOLDER)
    train = importlib.import_module("train")
    model = train.build(width=192, layers=1, heads=3, hidden=64)
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    stream = torch.randint(train.corpus.VOCABULARY, (8192,))
    source = partial(train.corpus_batches, stream, 0)
    stage = train.Stage("target", 1e-3, 4e-3, tmp_path)
    assert train.fit(model, stage, train.label_loss, source) == 1
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before)
