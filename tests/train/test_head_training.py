"""Training heads of EAGLE: what is learned, and in which layout."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from jetdraft.errors import OutputError
from jetdraft.methods.eagle.task import EagleSettings, EagleTask
from jetdraft.train import teacher
from jetdraft.train.heads import unrolled_mask
from jetdraft.train.teacher import Lesson
from tests.tiny import VOCAB_SIZE
from tests.train.periodic import QUICK, made

LAYERS = 4
SETTINGS = EagleSettings(draft_vocabulary=40, unrolled=3)


def prepared(target, output, text, settings=SETTINGS, options=QUICK):
    return made(EagleTask, target, output, [text], settings, options)


def test_an_eagle3_folder_has_the_published_names(target, text, tmp_path):
    """What other engines look for; in half precision, of weights in float32."""
    small = replace(SETTINGS, inner=8, half=True)
    run = prepared(target, tmp_path / "out", text, small)
    fields, tensors = run.task.contents(run, run.weights, None)
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (fields["draft_vocab_size"], fields["intermediate_size"]) == (40, 8)
    outputs = fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert outputs == [1, 1, 0]  # layers 2, 2 and 1 of four are entered
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].sum() == 40
    assert tensors["fc.weight"].shape == (64, 192)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["lm_head.weight"].shape == (40, 64)
    assert not any("embed" in name for name in tensors)
    own = run.module.drafter.stack.layers[0].mlp.up_proj.weight
    assert (own.dtype, own.shape) == (torch.float32, (8, 64))
    assert torch.equal(tensors["midlayer.mlp.up_proj.weight"], own.half())


def test_the_draft_vocabulary_has_the_most_frequent_tokens(target, text, tmp_path):
    """They are counted in the training texts, and stand in the order of their ids."""
    few = replace(SETTINGS, draft_vocabulary=5)
    run = prepared(target, tmp_path / "out", text, few)
    counts = Counter(token for text in run.corpus.training for token in text.ids)
    chosen = run.task.ids.tolist()
    assert chosen == sorted(chosen)
    assert len(counts) > 5
    others = [count for token, count in counts.items() if token not in chosen]
    assert min(counts[token] for token in chosen) >= max(others)
    whole = replace(SETTINGS, draft_vocabulary=VOCAB_SIZE)
    assert prepared(target, tmp_path / "2", text, whole).task.ids is None


def test_unrolled_steps_are_those_of_a_draft(target, text, tmp_path):
    """Slot t of step i says what a draft from row t says in its step i."""
    torch.manual_seed(0)
    run = prepared(target, tmp_path / "out", text)
    head, rows = run.module.drafter.eval(), 9
    ids = torch.randint(VOCAB_SIZE, (1, rows + 4))
    features, slot = torch.randn(1, rows, 64), 4
    lesson = Lesson(ids[:, :rows], ids[:, :rows], [], features, None, None)
    head.fuse = lambda taps: features
    with torch.no_grad():
        predictions = run.task.predictions(head, lesson, learns=False)
        steps = [logits[0, slot] for _, logits in predictions]
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
    options = replace(QUICK, steps=2)

    def trained(name, settings):
        return prepared(target, tmp_path / name, text, settings, options).run()

    figures = trained("1", SETTINGS)
    cached = replace(SETTINGS, cache=tmp_path / "states")
    assert trained("2", cached)["losses"] == pytest.approx(figures["losses"], rel=1e-2)
    assert list((tmp_path / "states").glob("states-0-*.safetensors"))
    assert not list((tmp_path / "states").glob(".*"))
    monkeypatch.setattr(teacher, "compute_states", None)
    assert trained("3", cached)["losses"] == pytest.approx(figures["losses"], rel=1e-2)
    with pytest.raises(OutputError, match="other taps"):
        trained("4", replace(cached, taps=(1, 2, 3)))
