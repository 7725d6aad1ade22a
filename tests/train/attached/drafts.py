"""What every attached drafter must do: draft much, and change no text."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from tests.exports import exported
from tests.train.periodic import PERIOD, QUICK

STILL = replace(QUICK, steps=1, learning_rate=0.0)
WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 1}]
LONG: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True}
int4 = partial(exported, recipe="int4", capacity=256, max_width=32)
"""Exports a target and one of the drafters."""


@contextmanager
def in_floats(
    target: str, drafter: Path, folder: Path, text: list[int]
) -> Iterator[tuple[jetdraft.Model, Any, Tensor]]:
    bundle = exported(target, folder / "bundle", head=drafter, draft_vocab=40)
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
    `positions`; `drafting` has the options of chains.
    """

    method = ""
    parts: ClassVar[set[str]] = set()
    fields: ClassVar[dict[str, Any]] = {}
    has_mlp = True
    untrained = "untrained"
    gain, floor, positions, places = 1.0, 0.7, 3, 5
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

    @pytest.mark.parametrize("tree", ["comb", "best", "heap"])
    def test_its_trees_are_right(self, model, plain, tree):
        drafting = {"method": self.method, "drafting": {"tree": tree}}
        for way, text in zip(WAYS, plain, strict=True):
            result = model.generate(PERIOD, **drafting, **LONG, **way)
            assert result.token_ids == text
            assert result.stats.accepted_tokens > 10
