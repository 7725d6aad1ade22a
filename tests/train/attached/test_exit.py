"""A head that stops a text or leaves layers out: its decisions and its training."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.errors import OptionError
from jetdraft.export.exporter import export
from jetdraft.recipe import Recipe
from jetdraft.runtime.passes.split.exit_head import FILE, ExitHead
from jetdraft.runtime.proposers.proposer import Observer
from jetdraft.testing import toy_bundle
from jetdraft.train.data import Example, collate
from jetdraft.train.sec import ExitHeads, SecSettings, SecTask
from tests.cli.running import assert_refused
from tests.cli.running import jetdraft as cli
from tests.ggufs import write_gguf
from tests.tiny import llama_config
from tests.train.attached.drafts import QUICK, SMALL
from tests.train.periodic import PERIOD, made, nothing

LAYERS, LAYER, SIZE = 4, 2, 64
FREE = {"exact": False, "max_new_tokens": 40, "ignore_eos": True, "method": "none"}
ANY = {"stop_threshold": 0.0, "exit_threshold": 0.0}
STOP, EXIT, CONTINUE = np.eye(3, dtype=np.float32) * 50


@pytest.fixture(scope="module")
def bundle(target, tmp_path_factory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundle") / "b"
    options = replace(SMALL, recipe=Recipe("none"), exit_layer=LAYER)
    return export(target, folder, options=options)


@pytest.fixture(scope="module")
def model(bundle):
    with jetdraft.load(bundle.path, threads=1) as model:
        yield model


def test_halves_leave_the_cores_to_each_other(model):
    """Threads that spin after a pass made the other half twice as slow."""
    sessions = model.parts.leading.halves._sessions
    for session in (sessions.lower, sessions.upper, sessions.exit):
        options = session.get_session_options()
        assert options.get_session_config_entry("session.force_spinning_stop") == "1"


@pytest.fixture
def head(bundle, tmp_path):
    """Writes a head of these weights, zeros by default."""

    def write(layer=LAYER, base=bundle.target.halves.base, **weights) -> Path:
        shapes = {"weight": (SIZE, SIZE), "classifier": (3, SIZE), "bias": (3,)}
        arrays = {
            f"{name}.{layer}": weights.get(name, np.zeros(shape, np.float32))
            for name, shape in shapes.items()
        }
        np.savez(tmp_path / FILE, base=np.array(base), **arrays)
        return tmp_path

    return write


def test_a_head_that_always_continues_writes_the_text_of_plain_decoding(model, head):
    plain = model.generate(PERIOD, **FREE)
    for how in ({}, {"method": "lookup"}, {"temperature": 0.8, "seed": 1}):
        whole = model.generate(PERIOD, **FREE | how)
        own = {"stop_and_exit": head(bias=CONTINUE), **ANY, **FREE, **how}
        made = model.generate(PERIOD, **own)
        assert made.token_ids == whole.token_ids
        assert made.stats.exited_tokens == made.stats.skipped_layers == 0
        assert made.stats.lossy == "stop and exit"
    assert plain.stats.lossy == ""


def test_a_head_that_always_stops_ends_after_the_first_token(model, head):
    made = model.generate(PERIOD, stop_and_exit=head(bias=STOP), **ANY, **FREE)
    assert made.token_ids == model.generate(PERIOD, **FREE).token_ids[:1]
    assert made.finish_reason == "early stop"
    # A threshold of 1 is never.
    how = ANY | FREE | {"stop_threshold": 1.0}
    made = model.generate(PERIOD, stop_and_exit=head(bias=STOP), **how)
    assert made.finish_reason == "length"


def reference(target: str, prompt: list[int], weight: np.ndarray, count: int):
    """The greedy text of lower layers alone, over all layers' keys and values."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    inner, move = model.model, torch.tensor(weight)
    with torch.no_grad():
        outputs = model(torch.tensor([prompt]), use_cache=True)
        cache, text = outputs.past_key_values, [int(outputs.logits[0, -1].argmax())]
        while len(text) < count:
            position = torch.tensor([[len(prompt) + len(text) - 1]])
            hidden = inner.embed_tokens(torch.tensor([text[-1:]]))
            rotations = inner.rotary_emb(hidden, position)
            for layer in inner.layers[:LAYER]:
                hidden = layer(
                    hidden, position_embeddings=rotations, past_key_values=cache
                )
            for number, layer in enumerate(inner.layers[LAYER:], LAYER):
                attention, normed = layer.self_attn, layer.input_layernorm(hidden)
                keys, values = (
                    part(normed).view(1, 1, -1, attention.head_dim).transpose(1, 2)
                    for part in (attention.k_proj, attention.v_proj)
                )
                _, keys = apply_rotary_pos_emb(keys, keys, *rotations)
                cache.update(keys, values, number)
            logits = model.lm_head(inner.norm(hidden + hidden @ move.T))
            text.append(int(logits[0, -1].argmax()))
    return text


@pytest.mark.parametrize("method", ["none", "lookup"])
def test_a_head_that_always_exits_is_a_truncated_model(model, target, head, method):
    weight = np.random.default_rng(1).normal(0, 0.05, (SIZE, SIZE)).astype(np.float32)
    prompt = model.parts.text.encode(PERIOD)
    folder = head(bias=EXIT, weight=weight)
    made = model.generate(
        token_ids=prompt, stop_and_exit=folder, **ANY | FREE | {"method": method}
    )
    assert made.token_ids == reference(target, prompt, weight, 40)
    assert made.token_ids != model.generate(token_ids=prompt, **FREE).token_ids
    assert made.stats.exited_tokens == 39
    assert made.stats.skipped_layers == 39 * 2


def mixed(model, head) -> Path:
    """A head that exits at about a half of the states of a text, and seldom stops."""
    rng = np.random.default_rng(3)
    classifier = rng.normal(0, 0.3, (3, SIZE)).astype(np.float32)
    return head(classifier=classifier, bias=np.array([-9, 0, 0], np.float32))


@pytest.mark.parametrize("way", [{}, {"temperature": 0.9, "seed": 4}])
def test_the_text_does_not_depend_on_what_was_drafted(model, head, way):
    folder = mixed(model, head)
    how = {"stop_and_exit": folder, **ANY, **way, **FREE}
    alone = model.generate(PERIOD, **how)
    assert 0 < alone.stats.exited_tokens < 39
    for count in (1, 3, 6):
        draft = {"method": "lookup", "num_draft_tokens": count}
        drafted = model.generate(PERIOD, **how | draft)
        assert drafted.token_ids == alone.token_ids
        assert drafted.stats.accepted_tokens > 0
        assert drafted.stats.exited_tokens == alone.stats.exited_tokens


def test_rows_of_an_exit_are_read_again(model, head):
    """Another text must not attend to what an exit left in the upper layers."""
    how = FREE | {"max_new_tokens": 12}
    made = model.generate(PERIOD, stop_and_exit=head(bias=EXIT), **ANY, **how)
    longer = model.parts.text.encode(PERIOD) + made.token_ids
    after = model.generate(token_ids=longer, **how)
    model.forget()
    assert after.token_ids == model.generate(token_ids=longer, **how).token_ids


def test_a_truncated_text_teaches_nothing(bundle, head, tmp_path, monkeypatch):
    class Spy(Observer):
        def observe(self, seen):
            taught.append(seen)

    store = tmp_path / "store"
    with jetdraft.load(bundle.path, threads=1, store=store) as own:
        monkeypatch.setattr(own.planner, "_learners", [Spy()])
        for how, is_taught in ((ANY | {"stop_and_exit": head()}, False), ({}, True)):
            taught = []
            silent = nullcontext() if is_taught else pytest.warns(match="keeps nothing")
            with silent:
                own.generate(PERIOD, **how, **FREE)
            assert bool(taught) == bool(own.parts.store.entries) == is_taught


def test_the_text_fills_the_buffers(model, head):
    how = FREE | {"max_new_tokens": 400, "method": "lookup", "num_draft_tokens": 5}
    made = model.generate(PERIOD, stop_and_exit=head(bias=EXIT), **ANY, **how)
    prompt = made.stats.prompt_tokens
    assert len(made.token_ids) + prompt == model.bundle.target.contract.capacity


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({}, ["--exact"], ["--no-exact", "neither the text"]),
        ({"base": "other"}, ["--no-exact"], ["another target"]),
        ({"layer": 1}, ["--no-exact"], ["behind layers 1", "behind layer 2"]),
        ({"weight": np.zeros((2, 2), np.float32)}, ["--no-exact"], ["damaged"]),
        ({"bias": np.full(3, np.nan, np.float32)}, ["--no-exact"], ["damaged"]),
    ],
    ids=["exact", "target", "layer", "shape", "nan"],
)
def test_a_head_that_cannot_be_used(bundle, head, changes, flags, said):
    line = ["generate", bundle.path, "-p", "def", "--stop-and-exit", head(**changes)]
    assert_refused(cli(*line, *flags), *said)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_threshold": 1.5}, "stop threshold 1.5 .* 0 to 1"),
        ({"exit_threshold": "high"}, "exit_threshold 'high' is not a number"),
        ({"stop_and_exit": 3}, "not a path"),
        ({"stop_threshold": 0.7}, "stop threshold has no meaning without a head"),
        ({"exit_threshold": 0.0}, "exit threshold has no meaning without a head"),
        (
            {"stop_and_exit": "head", "drafting": {"select_kv": True}},
            "read all KV rows; leave stop and exit or select_kv out",
        ),
    ],
)
def test_options_that_cannot_be_used(model, fields, words):
    with pytest.raises(OptionError, match=words):
        model.generate("def", exact=False, **fields)


def test_a_head_that_is_not_there(bundle, tmp_path, head):
    line = ["generate", bundle.path, "-p", "def", "--no-exact", "--stop-and-exit"]
    for missing in (tmp_path / "none", tmp_path / ("x" * 300)):
        assert_refused(cli(*line, missing), "no folder", "jetdraft train sec")
    (tmp_path / FILE).write_bytes(b"PK no zip")
    assert_refused(cli(*line, tmp_path), "damaged")
    line[1] = toy_bundle(tmp_path / "without")
    assert_refused(cli(*line, head()), "--exit-after")


@pytest.mark.parametrize("layer", [0, 4])
def test_an_exit_that_cuts_nothing(target, tmp_path, layer):
    line = ["export", target, "-o", tmp_path / "b", "--exit-after", layer, "--fast"]
    assert_refused(cli(*line), "does not cut 4 layers")
    assert not (tmp_path / "b").exists()
    data = Path(target).parent / "text.txt"
    line = ["train", "sec", target, "--data", data, "-o", tmp_path / "h"]
    assert_refused(cli(*line, "--exits", layer), "give 1 to 3")
    assert not (tmp_path / "h").exists()


def test_weights_without_a_hash_are_refused_before_anything_is_measured(
    target, tmp_path
):
    file = write_gguf(tmp_path / "model.gguf", llama_config()).path
    folder = tmp_path / "pickled"
    shutil.copytree(target, folder)
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for source, said in ((file, "is a GGUF file"), (folder, "no weights in .safe")):
        result = cli("export", source, "-o", tmp_path / "b", "--exit-after", 1)
        assert_refused(result, said)
        assert "measure" not in result.stderr
        assert not (tmp_path / "b").exists()


# --- the training ---------------------------------------------------------------------


def test_labels_are_those_of_the_paper():
    right = torch.tensor([[False, True, False, False], [True, False, False, False]])
    labels = ExitHeads.labels(right, torch.tensor([False, False, True, False]))
    assert labels.tolist() == [[2, 1, 2, 0], [1, 2, 2, 0]]


def prepared(target, output, layers=(LAYER,), options=QUICK):
    text = Path(target).parent / "text.txt"
    return made(SecTask, target, output, [text], SecSettings(layers), options)


def test_a_trained_head_exits_where_the_lower_layers_know_the_text(
    target, bundle, model, tmp_path
):
    learning = replace(QUICK, steps=60, sequence_length=48, learning_rate=1e-2)
    run = prepared(target, tmp_path / "head", (1, LAYER), learning)
    figures = run.run(nothing)
    assert figures["layers"]["2"]["right"] > 0.8
    described = json.loads((tmp_path / "head" / "exit.json").read_text())
    assert described["validation"] == figures
    with np.load(tmp_path / "head" / FILE) as arrays:
        assert set(arrays) == {
            "base",
            *(f"{n}.{i}" for n in ("weight", "classifier", "bias") for i in "12"),
        }
    how = {"stop_and_exit": tmp_path / "head", "exit_threshold": 0.5, **FREE}
    made = model.generate(PERIOD, **how)
    assert made.stats.exited_tokens > 20
    plain = model.generate(PERIOD, **FREE).token_ids
    same = sum(a == b for a, b in zip(made.token_ids, plain, strict=False))
    assert same > 30


def test_the_mean_over_parts_of_a_batch_is_that_of_the_batch(target, tmp_path):
    """Processes have a part each, with other numbers of learned tokens."""
    run = prepared(target, tmp_path / "h")
    ids = run.corpus.training[0].ids
    examples = [Example.completed(ids[:size], 1) for size in (17, 5)]

    def loss(processes, part):
        run.accelerator = SimpleNamespace(
            num_processes=processes,
            # One process knows its own rows, and accelerate adds the others up.
            reduce=lambda count, how: torch.tensor({"sum": 16 + 4, "mean": 10}[how]),
            device=torch.device("cpu"),
        )
        with torch.no_grad():
            return run.task.loss(run, run.module, collate(part)).item()

    parts = [loss(2, [example]) for example in examples]
    assert sum(parts) / 2 == pytest.approx(loss(1, examples), abs=1e-5)


def test_the_module_is_the_head_of_the_runtime(target, bundle, tmp_path):
    run = prepared(target, tmp_path / "h")
    run.run(nothing)
    states = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(0))
    base = bundle.target.halves.base
    head = ExitHead.load(tmp_path / "h", base, LAYER, SIZE)
    with torch.no_grad():
        rates = run.module._rates(LAYER, states).softmax(-1).numpy()
        scores = run.module._scores(LAYER, states)
        moved = torch.tensor(head.exit_states(states.numpy()))
        again = run.module.lm_head(run.module.norm(moved))
    np.testing.assert_allclose(head.rates(states.numpy()), rates, atol=1e-5)
    np.testing.assert_allclose(again, scores, atol=1e-4)
