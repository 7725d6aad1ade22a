"""What every attached drafter must do: draft much, and change no text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jetdraft.bundle import Bundle
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from jetdraft.train.training import TrainingOptions
from tests.train.periodic import PERIOD

QUICK = TrainingOptions(steps=4, batch_size=2, sequence_length=32, validate_every=2)
STILL = replace(QUICK, steps=1, learning_rate=0.0)
WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 1}]
LONG: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True}
SMALL = ExportOptions(Recipe("int4", 32), capacity=256, max_width=32, fast=True)


def trained_and_not(
    train: Callable[..., Any],
    target: str,
    folder: Path,
    learning: TrainingOptions,
    settings: Any = None,
) -> dict[str, Path]:
    """The folders of a trained drafter, and of one as it begins."""
    text = Path(target).parent / "text.txt"
    for name, options in (("trained", learning), ("untrained", STILL)):
        train(target, folder / name, text, settings, options)
    return {name: folder / name for name in ("trained", "untrained")}


def exported(target: str, folder: Path, drafters: dict[str, Path]) -> dict[str, Bundle]:
    """The bundles of a target with each of the drafters."""
    return {
        name: export(target, folder / name, options=SMALL, head=str(drafter))
        for name, drafter in drafters.items()
    }


class TextOfPlainDecoding:
    """Tests of a file's drafter; a subclass names its method.

    `fills` has the drafts that must reach the end of the buffers.
    """

    method = ""
    fills: tuple[dict[str, Any], ...] = ({"num_draft_tokens": 5},)

    @pytest.mark.parametrize("way", [0, 1], ids=["greedy", "sampled"])
    @pytest.mark.parametrize(
        "drafting",
        [1, 3, 6, {"tree": "comb"}, {"tree": "best"}, {"tree": "heap"}],
        ids=str,
    )
    def test_drafts(self, model, plain, way, drafting):
        is_chain = isinstance(drafting, int)
        how = {"num_draft_tokens": drafting} if is_chain else {"drafting": drafting}
        result = model.generate(PERIOD, method=self.method, **how, **LONG, **WAYS[way])
        assert result.token_ids == plain[way]
        assert result.stats.accepted_tokens > 10

    @pytest.mark.parametrize("others", [",lookup", None])
    def test_other_methods_beside_it(self, model, plain, others):
        method = "auto" if others is None else self.method + others
        for way, text in zip(WAYS, plain, strict=True):
            made = model.generate(PERIOD, method=method, **LONG, **way)
            assert made.token_ids == text

    def test_at_the_end_of_the_buffers(self, model):
        how = {"max_new_tokens": 400, "ignore_eos": True}
        text = model.generate(PERIOD, method="none", **how).token_ids
        for draft in self.fills:
            made = model.generate(PERIOD, method=self.method, **draft, **how)
            assert made.token_ids == text
