"""Targets with recurrent states: chains of all methods give the text of plain ones."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.errors import OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods import Proposer, Rows, Traits
from jetdraft.recipe import Recipe
from jetdraft.runtime.sampling.chooser import Sampling
from tests.checkpoints.heads import layouts
from tests.cli import running
from tests.hybrids import CONFIGS
from tests.runtime import test_conformance as conformance
from tests.runtime.fake_method import tokens_of
from tests.tiny import save_checkpoint

PROMPT = conformance.PROMPT
H = layouts.H
OPTIONS = ExportOptions(
    Recipe("none"), Recipe("none"), capacity=96, max_width=16, fast=True
)


def add_mtp(folder, config) -> None:
    """Add an MTP module of random weights to a checkpoint of Qwen3.5."""
    torch.manual_seed(11)
    heads, size = config.num_attention_heads, config.head_dim
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    tensors = {f"mtp.{name}.weight": layouts.norm() for name in norms}
    tensors["mtp.fc.weight"] = layouts.rand(H, 2 * H)
    layer = layouts.layer_tensors("mtp.layers.0.", qk_norm=True)
    gated = "mtp.layers.0.self_attn.q_proj.weight"
    tensors |= {**layer, gated: layouts.rand(2 * heads * size, H)}
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


BUNDLES = {"lfm2": "q4_0", "qwen3_5": "int8-rtn-b32", "granitemoehybrid": "int4-b32"}
"""Convolutions alone; the gated delta rule, with an MTP module; Mamba2. Their recipes,
one of them for the native product."""


@pytest.fixture(scope="session")
def bundles(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("recurrent"), {}
    for name, recipe in BUNDLES.items():
        config = CONFIGS[name]()
        source = save_checkpoint(folder / name, config)
        options = replace(OPTIONS, recipe=Recipe.parse(recipe))
        if name == "qwen3_5":
            add_mtp(source, config)
        made[name] = folder / f"{name}-bundle"
        export(str(source), made[name], options=options)
    return made


@pytest.fixture(scope="module", params=BUNDLES)
def model(request, bundles, tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "texts.sqlite"
    with jetdraft.load(bundles[request.param], threads=1, store=store) as model:
        yield model


class Knowing(Proposer):
    """Drafts a known text, each of whose tokens is wrong by a chance."""

    traits = Traits("fake", max_draft_tokens=15)

    def __init__(self, text, chance, seed):
        self.text, self.chance = text, chance
        self.random = np.random.default_rng(seed)

    def propose(self, context, budget, parents=None):
        tokens = np.array(self.text[len(context) : len(context) + budget])
        wrong = self.random.random(len(tokens)) < self.chance
        return Rows.chain([context[-1], *((tokens + wrong) % 288).tolist()])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=3)])
def test_drafts_that_are_right_now_and_then(model, sampling):
    plain, _ = tokens_of(model, PROMPT, sampling, tokens=48)
    accepted = set()
    for number, chance in enumerate((0.0, 0.2, 0.5, 1.0)):
        proposer = Knowing([*PROMPT, *plain], chance, number)
        tokens, stats = tokens_of(model, PROMPT, sampling, proposer, tokens=48)
        assert tokens == plain
        accepted.add(stats.tokens_per_pass)
    assert min(accepted) == 1
    assert max(accepted) > 6


@pytest.fixture(autouse=True)
def chains(monkeypatch):
    """Who asks for a tree is refused; a method that is not asked drafts its chain."""
    shapes = [{}, {"num_draft_tokens": 4}]
    monkeypatch.setattr(conformance, "drafts_of", lambda method: shapes)


def test_a_tree_is_refused_by_name(model):
    for method in {*methods_for(model)} & {"eagle"}:
        with pytest.raises(OptionError, match="or has recurrent states; leave the tre"):
            conformance.text(model, method, drafting={"tree": "best"})


def methods_for(model):
    entry = Bundle.open(model.bundle.path)
    drafted = ["eagle"] if entry.drafter is not None else []
    return ["lookup", "trigram", "recall", *drafted]


@pytest.mark.parametrize(
    "test",
    [
        conformance.test_a_prompt_that_goes_another_way,
        conformance.test_the_end_of_the_buffers,
        conformance.test_a_cancelled_generation,
    ],
)
def test_what_every_method_must_do(model, test):
    for method in methods_for(model):
        test(lambda _: model, method)


@pytest.mark.parametrize("way", conformance.WAYS.values(), ids=conformance.WAYS)
def test_the_text_is_that_of_plain_decoding(model, way):
    for method in methods_for(model):
        conformance.test_the_text_is_that_of_plain_decoding(
            lambda _: model, method, way
        )


def test_a_restored_prefix(model, tmp_path):
    conformance.test_a_restored_prefix(lambda _: model, "lookup", tmp_path)


def test_a_text_that_goes_on_is_not_read_again(model):
    """From its end, or from the end of its prompt; from nowhere between."""
    how = {"method": "none", "max_new_tokens": 8, "ignore_eos": True}
    model.forget()
    text = model.generate(token_ids=PROMPT, **how).token_ids
    sequence = [*PROMPT, *text]
    fresh = {}
    for prompt in ([*sequence, 5, 6], [*PROMPT, 9, 9, 9], PROMPT[:20]):
        model.forget()
        fresh[tuple(prompt)] = model.generate(token_ids=prompt, **how).token_ids
    reused = []
    for prompt, wanted in fresh.items():
        model.forget()
        model.generate(token_ids=PROMPT, **how)
        result = model.generate(token_ids=list(prompt), **how)
        assert result.token_ids == wanted
        reused.append(result.stats.reused_tokens)
    assert reused == [len(sequence) - 1, len(PROMPT) - 1, 0]


def test_two_sessions_share_nothing(model):
    prompts = PROMPT, PROMPT[5:]
    how = {"method": "none", "max_new_tokens": 12, "ignore_eos": True}
    alone = [model.generate(token_ids=p, **how).token_ids for p in prompts]
    with jetdraft.load(model.bundle.path, threads=1) as other:
        streams = [
            m.stream(token_ids=p, **how)
            for m, p in zip((other, model), prompts, strict=True)
        ]
        turns = list(zip_longest(*streams))
    sides = zip(*turns, strict=True)
    texts = [[t for piece in side if piece for t in piece.token_ids] for side in sides]
    assert texts == alone


def test_the_head_is_the_target_s_own(bundles):
    bundle = Bundle.open(bundles["qwen3_5"])
    assert bundle.drafter is not None
    assert bundle.drafter.contract.carried_size == H
    assert bundle.target.tree_file is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"select_kv": 16}, "--select-kv"),
        ({"exit_layer": 1}, "--exit-after"),
        ({"provider": "webgpu"}, "only the CPU provider"),
        ({"recipe": Recipe.parse("int4-b32-kv8")}, "leave kv out"),
    ],
)
def test_what_states_cannot_do_is_refused_by_name(tmp_path, changes, words):
    source = save_checkpoint(tmp_path / "lfm2", CONFIGS["lfm2"]())
    with pytest.raises(OptionError, match="has recurrent states, ") as refusal:
        export(str(source), tmp_path / "b", options=replace(OPTIONS, **changes))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with pytest.raises(OptionError, match="so it is no drafter"):
        export(str(source), tmp_path / "b", drafter=str(source), options=OPTIONS)


def test_layer_types_that_do_not_fit_the_weights_are_refused(tmp_path):
    source = save_checkpoint(tmp_path / "lfm2", CONFIGS["lfm2"]())
    file = source / "config.json"
    fields = json.loads(file.read_text())
    fields["layer_types"].reverse()
    fields["layer_types"][1:] = ["conv", "full_attention"]
    file.write_text(json.dumps(fields))
    result = running.jetdraft("export", source, "-o", tmp_path / "bundle")
    running.assert_refused(result, "lacks the weights")
