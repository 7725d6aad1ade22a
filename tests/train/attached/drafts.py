"""What every attached drafter must do: draft much, and change no text."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.train.periodic import PERIOD, QUICK

STILL = replace(QUICK, steps=1, learning_rate=0.0)
WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 1}]
LONG: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True}
SMALL = ExportOptions(Recipe("int4", 32), capacity=256, max_width=32, fast=True)


def exported(target: str, folder: Path, drafters: dict[str, Path]) -> dict[str, Bundle]:
    """The bundles of a target with each of the drafters."""
    return {
        name: export(target, folder / name, options=SMALL, head=str(drafter))
        for name, drafter in drafters.items()
    }


@contextmanager
def in_floats(
    target: str, drafter: Path, folder: Path, text: list[int]
) -> Iterator[tuple[jetdraft.Model, Any, Tensor]]:
    """A bundle of floats for 40 tokens, the drafter's module, the text's features."""
    options = ExportOptions(
        Recipe("none"), Recipe("none"), capacity=64, max_width=16, fast=True,
        draft_vocab=40,
    )  # fmt: skip
    bundle = export(target, folder / "bundle", options=options, head=str(drafter))
    checkpoint = Checkpoint.load(target, torch.float32)
    checkpoint.model.set_attn_implementation("sdpa")
    module = load_head(str(drafter), checkpoint, torch.float32)
    with torch.no_grad():
        decoder = checkpoint.model.get_decoder()
        features = decoder(torch.tensor([text])).last_hidden_state
    with jetdraft.load(bundle.path, threads=1) as model:
        yield model, module, features


class AttachedDrafter:
    """The tests that every attached drafter must pass; a subclass names its method.

    `parts` are what the names of its tensors begin with, `fields` what its config says.

    A trained drafter takes `gain` tokens a pass more than the one in the bundle
    `untrained`, and the target accepts more than `floor` of its tokens at each of
    `positions`. `fills` has the drafts that must reach the end of the buffers, and
    `drafting` the options of chains.
    """

    method = ""
    parts: ClassVar[set[str]] = set()
    fields: ClassVar[dict[str, Any]] = {}
    has_mlp = True
    untrained = "untrained"
    gain, floor, positions, places = 1.0, 0.7, 3, 5
    fills: tuple[dict[str, Any], ...] = ({"num_draft_tokens": 5},)
    drafting: ClassVar[dict[str, Any]] = {}

    def test_the_folder_has_a_llama_layer_and_its_own_parts(self, folders):
        folder = folders["trained"]
        tensors = load_file(folder / "model.safetensors")
        assert {name.split(".")[0] for name in tensors} == {"layers", *self.parts}
        assert any("mlp" in name for name in tensors) == self.has_mlp
        config = json.loads((folder / "config.json").read_text())
        assert self.fields.items() <= config.items()
        record = json.loads((folder / "training.json").read_text())
        assert record["validation"]["tokens_per_pass"] > 2
        assert len(record["validation"]["acceptance"]) == self.places

    def chain(self, tokens: int) -> dict[str, Any]:
        """The options of a long generation with chains of this length."""
        how = {"num_draft_tokens": tokens, "drafting": self.drafting}
        return {"method": self.method, **how, **LONG}

    def test_a_trained_drafter_is_right_more_often(self, bundles, model):
        """The text is periodic, so a trained drafter can know it, at each position."""
        how = self.chain(self.positions)
        trained = model.generate(PERIOD, **how).stats
        with jetdraft.load(bundles[self.untrained].path, threads=1) as other:
            untrained = other.generate(PERIOD, **how).stats
        assert trained.tokens_per_pass > max(2.5, untrained.tokens_per_pass + self.gain)
        assert len(trained.accepted_by_position) == self.positions
        assert min(trained.accepted_by_position) > self.floor

    @pytest.mark.parametrize("draft", [1, 3, 6, "comb", "best", "heap"])
    def test_chains_and_trees(self, model, plain, draft):
        chain = self.chain(draft) if isinstance(draft, int) else {}
        tree = {"method": self.method, "drafting": {"tree": draft}, **LONG}
        for way, text in zip(WAYS, plain, strict=True):
            result = model.generate(PERIOD, **(chain or tree), **way)
            assert result.token_ids == text
            assert result.stats.accepted_tokens > 10

    @pytest.mark.parametrize("others", [",lookup", None])
    def test_other_methods_beside_it(self, model, plain, others):
        method = "auto" if others is None else self.method + others
        for way, text in zip(WAYS, plain, strict=True):
            drafted = model.generate(PERIOD, method=method, **LONG, **way)
            assert drafted.token_ids == text

    def test_at_the_end_of_the_buffers(self, model):
        how = {"max_new_tokens": 400, "ignore_eos": True}
        text = model.generate(PERIOD, method="none", **how).token_ids
        for draft in self.fills:
            drafted = model.generate(PERIOD, method=self.method, **draft, **how)
            assert drafted.token_ids == text

    def test_a_prompt_that_goes_on_is_not_read_again(self, model):
        how = {"method": self.method, "num_draft_tokens": 3, **LONG}
        first = model.generate(PERIOD, **how)
        prompt = model.parts.text.encode(PERIOD) + first.token_ids[:40]
        again = model.generate(token_ids=prompt, **how)
        assert again.stats.reused_tokens > 30
        model.forget()
        fresh = model.generate(token_ids=prompt, **how)
        assert fresh.stats.reused_tokens == 0
        assert again.token_ids == fresh.token_ids
        assert again.stats.accepted_counts == fresh.stats.accepted_counts
