"""Training heads: what is learned, in which layout, and how it goes on."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import OutputError
from jetdraft.methods.eagle.task import EagleObjective, EagleSettings, EagleTask
from jetdraft.methods.medusa.module import Medusa
from jetdraft.methods.medusa.task import MedusaTask
from jetdraft.train.heads import HeadSettings, unrolled_mask
from jetdraft.train.machine import precision
from jetdraft.train.run_folder import STATE
from jetdraft.train.teacher import Lesson, Teacher
from tests.tiny import VOCAB_SIZE
from tests.train.periodic import QUICK, made, nothing

LAYERS = 6
SETTINGS = EagleSettings(draft_vocabulary=40, unrolled=3)
MEDUSA = HeadSettings(unrolled=3)


def train(target, output, text, settings=SETTINGS, options=QUICK, report=nothing):
    task = EagleTask if isinstance(settings, EagleSettings) else MedusaTask
    run = made(task, target, output, [text], settings, options)
    return run, run.run(report)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_a_trained_head_is_right_more_often(target, text, tmp_path, kind):
    """Overfitting a periodic text; the published folder reads back as it was."""
    seen = []
    settings = MEDUSA if kind == "medusa" else replace(SETTINGS, kind=kind)
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
    is_eagle3 = {"eagle3": True, "eagle1": False}.get(kind)
    assert getattr(head.config, "eagle3", None) == is_eagle3
    _assert_same(head, run, checkpoint)
    figures_file = json.loads((tmp_path / "out" / "training.json").read_text())
    assert figures_file["validation"] == figures


def _assert_same(head, run, checkpoint):
    own = run.module.drafter.eval()
    features = torch.randn(1, 5, head.config.hidden_size)
    with torch.no_grad():
        if isinstance(head, Medusa):
            one, two = (h.logits(h(features)) for h in (head, own))
        else:
            assert head.config.taps == run.task.taps
            ids = torch.arange(5)[None]
            taps = [features + i for i in range(len(run.task.taps) or 1)]
            one, two = (h.lm_head(h(ids, h.fuse(taps), ids)[0]) for h in (head, own))
    torch.testing.assert_close(one, two)
    if getattr(head.config, "eagle3", False):
        assert torch.equal(head.ids, run.task.ids)
        assert len(run.task.ids) == 40


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
    run = made(EagleTask, target, tmp_path / "out", [text], SETTINGS, QUICK)
    muon, adam = (
        [weight for group in optimizer.param_groups for weight in group["params"]]
        for optimizer in run.task.optimizers(run)
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
    trained = run.module.drafter.stack.layers[0].mlp.up_proj.weight
    assert trained.dtype == torch.float32
    assert torch.equal(layer.mlp.up_proj.weight, trained.half())


def test_the_draft_vocabulary_has_the_most_frequent_tokens(target, text, tmp_path):
    """They are counted in the training texts, and stand in the order of their ids."""
    few = replace(SETTINGS, draft_vocabulary=5)
    run = made(EagleTask, target, tmp_path / "out", [text], few, QUICK)
    counts = Counter(token for text in run.corpus.training for token in text.ids)
    chosen = run.task.ids.tolist()
    assert chosen == sorted(chosen)
    assert len(counts) > 5
    others = [count for token, count in counts.items() if token not in chosen]
    assert min(counts[token] for token in chosen) >= max(others)
    whole = replace(SETTINGS, draft_vocabulary=VOCAB_SIZE)
    assert (
        made(EagleTask, target, tmp_path / "2", [text], whole, QUICK).task.ids is None
    )


def test_unrolled_steps_are_those_of_a_draft(target, text, tmp_path):
    """Slot t of step i says what a draft from row t says in its step i."""
    torch.manual_seed(0)
    run = made(EagleTask, target, tmp_path / "out", [text], SETTINGS, QUICK)
    head, rows = run.module.drafter.eval(), 9
    ids = torch.randint(VOCAB_SIZE, (1, rows + 4))
    features, slot = torch.randn(1, rows, 64), 4
    lesson = Lesson(ids[:, :rows], ids[:, :rows], [], features, None, None)
    objective = EagleObjective(head, 3, False).eval()
    head.fuse = lambda taps: features
    with torch.no_grad():
        steps = [logits[0, slot] for _, logits in objective.predictions(lesson)]
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


def test_states_from_the_disk_teach_the_same(target, text, tmp_path, monkeypatch):
    """Every text runs through the target once."""
    _, figures = train(target, tmp_path / "1", text)
    cached_settings = replace(SETTINGS, cache=tmp_path / "states")
    _, cached = train(target, tmp_path / "2", text, cached_settings)
    assert cached["losses"] == pytest.approx(figures["losses"], rel=1e-2)
    assert list((tmp_path / "states").glob("states-0-*.safetensors"))
    assert not list((tmp_path / "states").glob(".*"))
    computed = []
    original = Teacher.computed
    monkeypatch.setattr(
        Teacher,
        "computed",
        lambda self, ids: computed.append(ids) or original(self, ids),
    )
    _, again = train(target, tmp_path / "3", text, cached_settings)
    assert not computed
    assert again["losses"] == pytest.approx(figures["losses"], rel=1e-2)
    other = replace(cached_settings, taps=(1, 2, 3))
    with pytest.raises(OutputError, match="other taps"):
        train(target, tmp_path / "4", text, other)
