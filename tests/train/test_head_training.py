"""Training heads: what is learned, in which layout, and how it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import DataError, OptionError, OutputError, TrainingError
from jetdraft.methods.medusa.module import Medusa
from jetdraft.train.head import head_training
from jetdraft.train.head.head_losses import Lesson, Objective, unrolled_mask
from jetdraft.train.head.head_training import HeadSettings, HeadTraining
from jetdraft.train.head.teacher import Teacher
from jetdraft.train.run_folder import STATE
from jetdraft.train.taught.precision import precision
from jetdraft.train.training import TrainingOptions
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint, tokenizer
from tests.train.periodic import learned_target, nothing

SETTINGS = HeadSettings(draft_vocabulary=40, unrolled=3)
QUICK = TrainingOptions(steps=4, batch_size=2, sequence_length=32, validate_every=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    """A target that knows the text which heads are to guess."""
    return learned_target(tmp_path_factory.mktemp("heads"), 6)


def train(
    target, output, text, settings=SETTINGS, options=QUICK, report=nothing, **how
):
    run = HeadTraining(target, output, [text], settings, options, **how)
    return run, run.run(report)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_a_trained_head_is_right_more_often(target, text, tmp_path, kind):
    """Overfitting a periodic text; the published folder reads back as it was."""
    seen = []
    settings = replace(SETTINGS, kind=kind)
    options = replace(
        QUICK, steps=100, sequence_length=48, learning_rate=1e-2, validate_every=50
    )
    run, figures = train(target, tmp_path / "out", text, settings, options, seen.append)
    before = seen[0].validation["acceptance"]
    assert len(figures["acceptance"]) == 3
    # The first tokens of a window cannot be guessed by anyone.
    assert min(figures["acceptance"]) > 0.8
    assert max(before) < 0.5
    checkpoint = Checkpoint.load(target, torch.float32)
    head = load_head(str(tmp_path / "out"), checkpoint, torch.float32)
    assert isinstance(head, Medusa) == (kind == "medusa")
    assert getattr(head.config, "eagle3", False) == (kind == "eagle3")
    _assert_same(head, run, checkpoint)
    figures_file = json.loads((tmp_path / "out" / "training.json").read_text())
    assert figures_file["validation"] == figures


def _assert_same(head, run, checkpoint):
    own = run.module.head.eval()
    features = torch.randn(1, 5, head.config.hidden_size)
    with torch.no_grad():
        if isinstance(head, Medusa):
            one, two = (h.logits(h(features)) for h in (head, own))
        else:
            assert head.config.taps == run.taps
            ids = torch.arange(5)[None]
            taps = [features + i for i in range(len(run.taps) or 1)]
            one, two = (h.lm_head(h(ids, h.fuse(taps), ids)[0]) for h in (head, own))
    torch.testing.assert_close(one, two)
    if getattr(head.config, "eagle3", False):
        assert torch.equal(head.ids, run.ids)
        assert len(run.ids) == 40


def test_an_eagle3_folder_has_the_published_names(target, text, tmp_path):
    """What other engines look for."""
    train(target, tmp_path / "out", text)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert fields["draft_vocab_size"] == 40
    outputs = fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert outputs == [1, 2, 2]  # layers 2, 3 and 3 of six are entered
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].sum() == 40
    assert tensors["fc.weight"].shape == (64, 192)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["lm_head.weight"].shape == (40, 64)
    assert not any("embed" in name for name in tensors)
    assert not (tmp_path / "out" / STATE).exists()


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_multiplies_in_bfloat16_where_that_is_fast(fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": fast})
    rows = torch.ones(2, 2)
    with precision(torch.device("cpu")):
        assert (rows @ rows).dtype == (torch.bfloat16 if fast else torch.float32)


def test_each_weight_has_one_optimizer(target, text, tmp_path):
    """Matrices inside the head have Muon; LM head and norms have AdamW."""
    run = HeadTraining(target, tmp_path / "out", [text], SETTINGS, QUICK)
    muon, adam = (
        [weight for group in optimizer.param_groups for weight in group["params"]]
        for optimizer in run.optimizers()
    )
    assert {id(w) for w in (*muon, *adam)} == {id(w) for w in run.weights.values()}
    assert len(muon) + len(adam) == len(run.weights)
    assert {id(run.weights["lm_head.weight"])} <= {id(weight) for weight in adam}
    assert all(weight.ndim == 2 for weight in muon)


def test_a_small_head_in_half_precision(target, text, tmp_path):
    """The state to resume from keeps float32; the folder that is published does not."""
    small = replace(SETTINGS, inner=8, half=True)
    run, _ = train(target, tmp_path / "out", text, small)
    head = load_head(
        str(tmp_path / "out"), Checkpoint.load(target, torch.float32), torch.float32
    )
    assert head.config.intermediate_size == 8
    layer = head.stack.layers[0]
    assert layer.mlp.up_proj.weight.shape == (8, 64)
    assert layer.mlp.up_proj.weight.dtype == torch.float16
    trained = run.module.head.stack.layers[0].mlp.up_proj.weight
    assert trained.dtype == torch.float32
    assert torch.equal(layer.mlp.up_proj.weight, trained.half())


def test_the_draft_vocabulary_has_the_most_frequent_tokens(target, text, tmp_path):
    """They are counted in the training texts, and stand in the order of their ids."""
    few = replace(SETTINGS, draft_vocabulary=5)
    run = HeadTraining(target, tmp_path / "out", [text], few, QUICK)
    counts = Counter(token for text in run.corpus.training for token in text.ids)
    chosen = run.ids.tolist()
    assert chosen == sorted(chosen)
    assert len(counts) > 5
    others = [count for token, count in counts.items() if token not in chosen]
    assert min(counts[token] for token in chosen) >= max(others)
    whole = replace(SETTINGS, draft_vocabulary=VOCAB_SIZE)
    assert HeadTraining(target, tmp_path / "2", [text], whole, QUICK).ids is None


def test_unrolled_steps_are_those_of_a_draft(target, text, tmp_path):
    """Slot t of step i says what a draft from row t says in its step i."""
    torch.manual_seed(0)
    run = HeadTraining(target, tmp_path / "out", [text], SETTINGS, QUICK)
    head, rows = run.module.head.eval(), 9
    ids = torch.randint(VOCAB_SIZE, (1, rows + 4))
    features, slot = torch.randn(1, rows, 64), 4
    lesson = Lesson(ids[:, :rows], ids[:, :rows], [], features, None, None)
    objective = Objective(head, 3).eval()
    head.fuse = lambda taps: features
    with torch.no_grad():
        steps = [logits[0, slot] for _, logits in objective._predictions(lesson)]
        cache = DynamicCache()
        positions = torch.arange(slot + 1)[None]
        hidden, carried = head(
            ids[:, 1 : slot + 2], features[:, : slot + 1], positions, cache
        )
        drafted = [head.lm_head(hidden)[0, -1]]
        for step in (1, 2):
            token = ids[:, slot + 1 + step, None]
            position = torch.tensor([[slot + step]])
            hidden, carried = head(token, carried[:, -1:], position, cache)
            drafted.append(head.lm_head(hidden)[0, -1])
    torch.testing.assert_close(torch.stack(steps), torch.stack(drafted))
    assert unrolled_mask(3, 1, features).shape == (1, 1, 3, 6)


def test_it_resumes_where_it_stopped(target, text, tmp_path):
    """A run that was interrupted ends with the weights of an uninterrupted run."""
    train(target, tmp_path / "whole", text)

    def stop(progress):
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(target, tmp_path / "cut", text, report=stop)
    assert (tmp_path / "cut" / STATE).is_file()
    with pytest.raises(OutputError, match=r"other settings.*unrolled"):
        train(target, tmp_path / "cut", text, replace(SETTINGS, unrolled=2))
    train(target, tmp_path / "cut", text)
    whole, cut = (
        load_file(tmp_path / n / "model.safetensors") for n in ("whole", "cut")
    )
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor)
    with pytest.raises(OutputError, match="holds a finished training"):
        train(target, tmp_path / "cut", text)


def test_a_loss_that_is_no_number_stops_it(target, text, tmp_path, monkeypatch):
    """What was saved before stays."""
    original, calls = head_training.total, []

    def total(sums, places):
        calls.append(sums)
        return original(sums, places) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(head_training, "total", total)
    with pytest.raises(TrainingError, match="the loss of step 3 is not a number"):
        train(target, tmp_path / "out", text)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_states_from_the_disk_teach_the_same(target, text, tmp_path, monkeypatch):
    """Every text runs through the target once."""
    _, figures = train(target, tmp_path / "1", text)
    _, cached = train(target, tmp_path / "2", text, cache=tmp_path / "states")
    assert cached["losses"] == pytest.approx(figures["losses"], rel=1e-2)
    assert list((tmp_path / "states").glob("states-0-*.safetensors"))
    assert not list((tmp_path / "states").glob(".*"))
    computed = []
    original = Teacher._computed
    monkeypatch.setattr(
        Teacher,
        "_computed",
        lambda self, ids: computed.append(ids) or original(self, ids),
    )
    _, again = train(target, tmp_path / "3", text, cache=tmp_path / "states")
    assert not computed
    assert again["losses"] == pytest.approx(figures["losses"], rel=1e-2)
    other = replace(SETTINGS, taps=(1, 2, 3))
    with pytest.raises(OutputError, match="other taps"):
        train(target, tmp_path / "4", text, other, cache=tmp_path / "states")


def test_texts_that_the_target_writes(target, tmp_path):
    """Prompts stay, completions are the target's, and only they are learned."""
    lines = [{"prompt": "for self", "completion": "#" * 12} for _ in range(8)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(line) for line in lines))
    settings, told = replace(SETTINGS, regenerate=True), []
    how = {"progress": lambda *state: told.append(state)}
    run = HeadTraining(target, tmp_path / "1", [data], settings, QUICK, **how)
    assert told[-1] == ("write", 8, 8)
    prompt = tokenizer().encode("for self").ids
    before = HeadTraining(target, tmp_path / "2", [data], SETTINGS, QUICK)
    for text, old in zip(run.corpus.training, before.corpus.training, strict=True):
        assert text.ids[: len(prompt)] == prompt
        assert text.learned == [i >= len(prompt) for i in range(len(text.ids))]
        assert text.ids != old.ids
    told.clear()
    again = HeadTraining(target, tmp_path / "1", [data], settings, QUICK, **how)
    assert again.corpus.training == run.corpus.training
    assert told == [("write", 8, 8)]  # the second run read what the first wrote


def test_an_empty_completion_is_one_line(target, tmp_path):
    """A target without an end of text learns nothing from it."""
    folder = save_checkpoint(
        tmp_path / "t", llama_config(num_hidden_layers=6, eos_token_id=None)
    )
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "for self in range", "completion": ""}')
    for settings in (SETTINGS, replace(SETTINGS, regenerate=True)):
        with pytest.raises(DataError, match=r"line 1 of .* has an empty completion"):
            HeadTraining(str(folder), tmp_path / "o", [data], settings, QUICK)


def test_a_prompt_alone_is_completed(target, tmp_path):
    """Also without --regenerate."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "for self in range"}\n' * 3)
    run = HeadTraining(target, tmp_path / "1", [data], SETTINGS, QUICK)
    assert all(text.is_written for text in run.corpus.training)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "eagle2"}, "unknown kind 'eagle2'"),
        ({"unrolled": 0}, "unrolled 0 is out of range"),
        ({"draft_vocabulary": 0}, "draft vocabulary 0 is out of range"),
        ({"taps": (2, 9)}, r"the taps \[2, 9\] are not all layers"),
        ({"unrolled": 31}, "too short for 31 steps; give 33"),
    ],
)
def test_settings_that_cannot_be_used(target, text, tmp_path, settings, message):
    """One line each."""
    with pytest.raises(OptionError, match=message):
        HeadTraining(target, tmp_path / "o", [text], HeadSettings(**settings), QUICK)


def test_a_text_that_is_too_short(target, tmp_path):
    """A sequence needs two tokens more than the unrolled steps."""
    file = tmp_path / "text.txt"
    file.write_text("a")
    with pytest.raises(DataError, match="1 of the 5 tokens"):
        HeadTraining(target, tmp_path / "o", [file], SETTINGS, QUICK)


TWO = """
import sys
import torch
from accelerate import PartialState
from pathlib import Path
from dataclasses import replace
from tests.train.test_head_training import QUICK, SETTINGS, train
torch.cpu.get_capabilities = dict
target, output, text = sys.argv[1:]
train(target, Path(output), Path(text), SETTINGS, replace(QUICK, steps=2))
assert PartialState().num_processes == 2
"""


def test_two_processes_learn_what_one_learns(target, text, tmp_path, monkeypatch):
    """Each has a part of the batch, and gloo averages their gradients.

    In float32: bfloat16 rounds a part otherwise than the whole.
    """
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    train(target, tmp_path / "one", text, options=replace(QUICK, steps=2))
    script = tmp_path / "two.py"
    script.write_text(TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(script), target, str(tmp_path / "two")]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [*command, str(text)],
        env={
            **os.environ,
            "PYTHONPATH": root,
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    for name, tensor in one.items():
        # Half of a batch would differ by 1e-3.
        distance = (two[name].float() - tensor.float()).norm()
        assert distance <= 1e-6 * tensor.float().norm(), name
