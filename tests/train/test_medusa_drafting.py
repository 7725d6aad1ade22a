"""Trained Medusa heads are right more often than untrained ones, in real drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import jetdraft
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.checkpoints.heads import layouts
from tests.tiny import llama_config, save_checkpoint
from tests.train.periodic import PERIOD, tuned
from tests.train.test_head_training import MEDUSA, QUICK, train


@pytest.fixture(scope="module")
def accepted(tmp_path_factory):
    """The acceptance at each position of trained and random heads on one target."""
    folder = tmp_path_factory.mktemp("medusa")
    text = folder / "text.txt"
    text.write_text(PERIOD * 100)
    base = save_checkpoint(folder / "base", llama_config(num_hidden_layers=2))
    target = tuned(str(base), text, folder / "tuned")
    options = replace(QUICK, steps=100, sequence_length=48, learning_rate=1e-2)
    train(target, folder / "trained", text, MEDUSA, options)
    torch.manual_seed(3)
    config, tensors = layouts.medusa(heads=3)
    layouts.write(folder / "random", config, tensors, "medusa_lm_head.pt")
    figures = {}
    for name in ("trained", "random"):
        made = export(
            target,
            folder / f"{name}-bundle",
            options=ExportOptions(Recipe("none"), capacity=128, max_width=16),
            head=str(folder / name),
        )
        with jetdraft.load(made.path, threads=1) as model:
            how = {"max_new_tokens": 60, "ignore_eos": True}
            plain = model.generate(PERIOD, method="none", **how)
            for way in ({"num_draft_tokens": 3}, {"drafting": {"tree": "best"}}):
                drafted = model.generate(PERIOD, method="medusa", **how, **way)
                assert drafted.token_ids == plain.token_ids
                figures[name, *way] = drafted.stats
    return figures


def test_every_head_of_a_chain_is_right_more_often(accepted):
    """The text is periodic, so a trained head can know it."""
    trained, random = (
        accepted[name, "num_draft_tokens"] for name in ("trained", "random")
    )
    assert trained.tokens_per_pass > 2.5 > 1.5 > random.tokens_per_pass
    rates = [
        right / asked
        for right, asked in zip(
            trained.accepted_counts, trained.evaluated_by_position, strict=True
        )
    ]
    assert len(rates) == 3
    assert min(rates) > 0.7


def test_a_tree_is_right_more_often(accepted):
    trained, random = (accepted[name, "drafting"] for name in ("trained", "random"))
    assert trained.tokens_per_pass > 2 > random.tokens_per_pass
