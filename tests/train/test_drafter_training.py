"""Training drafters: what is learned, in which layout, and how it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streams import UNFINISHED, StreamSettings
from jetdraft.errors import (
    CheckpointError,
    DataError,
    OptionError,
    OutputError,
    PairError,
)
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods.draft import task as draft_task
from jetdraft.methods.draft.task import (
    LOSSES,
    SHARE,
    ModelSettings,
    ModelTask,
    advised_config,
    cost_share,
    new_config,
)
from jetdraft.recipe import Recipe
from jetdraft.train.run_folder import STATE
from tests.tiny import (
    VOCAB_SIZE,
    llama_config,
    save_checkpoint,
    save_streams,
    save_tokenizer,
)
from tests.train.periodic import PERIOD, QUICK, made, nothing

LAYERS = 4
SMALL = ModelSettings(layers=1, hidden_size=32)
LONGER = replace(
    QUICK, steps=100, sequence_length=48, learning_rate=1e-2, validate_every=100
)


def train(target, output, text, settings=SMALL, options=QUICK, report=nothing):
    run = made(ModelTask, target, output, [text], settings, options)
    return run, run.run(report)


def written(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("loss", LOSSES)
def test_a_new_drafter_learns(target, text, tmp_path, loss):
    """With every loss; the folder reads back as it was."""
    seen = []
    settings = replace(SMALL, loss=loss)
    run, figures = train(target, tmp_path / "out", text, settings, LONGER, seen.append)
    before = seen[0].validation
    # The first tokens of a window cannot be guessed by anyone.
    assert min(figures["agreement"]) > 0.6 > max(before["agreement"]) + 0.3
    assert figures["acceptance"][0] > before["acceptance"][0] + 0.2
    assert figures["tokens_per_pass"][1] > 2.5
    checkpoint = Checkpoint.load(str(tmp_path / "out"), torch.float32)
    checkpoint.model.set_attn_implementation("sdpa")
    ids = torch.arange(7)[None]
    with torch.no_grad():
        one, two = (m(ids).logits for m in (checkpoint.model, run.module.model))
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
    assert json.loads((tmp_path / "out" / "drafter.json").read_text())["step"] == 100
    assert not (tmp_path / "out" / STATE).exists()


def test_a_cut_vocabulary_is_trained_and_exported(target, text, tmp_path):
    """The bundle drafts from the trained part, and the text stays the same."""
    settings = replace(SMALL, draft_vocab=30, half=True)
    run, figures = train(target, tmp_path / "out", text, settings, LONGER)
    assert min(figures["agreement"]) > 0.8
    tensors = written(tmp_path / "out")
    assert tensors["model.embed_tokens.weight"].shape == (VOCAB_SIZE, 32)
    assert tensors["model.embed_tokens.weight"].dtype == torch.float16
    assert tensors["t2d"].sum() == 30
    checkpoint = Checkpoint.load(str(tmp_path / "out"), torch.float32)
    assert torch.equal(checkpoint.draft_ids, run.task.ids)
    options = ExportOptions(Recipe("int8", 32), capacity=128, max_width=16, fast=True)
    with pytest.raises(OptionError, match="drafter was trained with its own"):
        export(
            target,
            tmp_path / "bundle",
            str(tmp_path / "out"),
            replace(options, draft_vocab=20),
        )
    bundle = export(target, tmp_path / "bundle", str(tmp_path / "out"), options)
    assert bundle.draft_vocabulary().tolist() == run.task.ids.tolist()
    with jetdraft.load(bundle.path, threads=1) as model:
        how = {"max_new_tokens": 40, "ignore_eos": True}
        plain = model.generate(PERIOD * 2, method="none", **how)
        drafted = model.generate(PERIOD * 2, method="draft", num_draft_tokens=3, **how)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.tokens_per_pass > 2.5


def test_a_damaged_map_is_refused(target, text, tmp_path):
    from safetensors.torch import save_file

    train(target, tmp_path / "out", text, replace(SMALL, draft_vocab=30))
    tensors = written(tmp_path / "out")
    for name, message in (
        (torch.full((30,), 999), "map 30 rows"),
        (torch.zeros(2, 2).long(), "is no list"),
    ):
        file = tmp_path / "out" / "model.safetensors"
        save_file({**tensors, "d2t": name}, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.load(str(tmp_path / "out"), torch.float32)


def first_figures(target, text, output, settings, options=QUICK):
    seen = []
    train(target, output, text, settings, options, seen.append)
    return seen[0].validation


def test_all_layers_of_the_target_are_the_target(target, text, tmp_path):
    settings = ModelSettings(from_layers=(0, 1, 2, 3))
    figures = first_figures(target, text, tmp_path / "all", settings)
    assert figures["acceptance"] == pytest.approx([1.0] * 4, abs=1e-2)
    assert figures["loss"] == pytest.approx(0.0, abs=1e-2)
    some, _ = train(target, tmp_path / "some", text, ModelSettings(from_layers=(0, 3)))
    assert some.module.model.config.num_hidden_layers == 2
    own = Checkpoint.load(target, torch.float32).model.model.layers
    fresh = made(
        ModelTask,
        target,
        tmp_path / "f",
        [text],
        ModelSettings(from_layers=(0, 3)),
        QUICK,
    )
    for layer, place in zip(fresh.module.model.model.layers, (0, 3), strict=True):
        assert torch.equal(
            layer.mlp.up_proj.weight, own[place].mlp.up_proj.weight.float()
        )


def test_streams_that_tune_the_target_are_the_teacher(text, tmp_path):
    """A drafter for the base would guess the text of another model."""
    folder = save_checkpoint(tmp_path / "target", llama_config())
    save_streams(folder, StreamSettings(gamma=2, layers=1, mode="shared", lora_rank=4))
    run = made(ModelTask, str(folder), tmp_path / "out", [text], SMALL, QUICK)
    loaded, other = (Checkpoint.load(str(folder), torch.float32) for _ in range(2))
    plain = other.model
    for model in (loaded.model, plain):
        model.set_attn_implementation("sdpa")
    ids = torch.tensor([[5, 7, 9]])
    with torch.no_grad():
        base = loaded.model(input_ids=ids).logits
        tuned = loaded.with_streams(1.0).model.state_dict()
        taught = run.target.model(input_ids=ids).logits
        plain.load_state_dict(tuned)
        wanted = plain(input_ids=ids).logits
    torch.testing.assert_close(taught, wanted, atol=1e-5, rtol=1e-4)
    assert (taught - base).abs().max() > 0.1


def test_a_drafter_goes_on_from_a_checkpoint(target, text, tmp_path):
    """With its weights and its draft vocabulary."""
    cut = replace(SMALL, draft_vocab=30)
    run, figures = train(target, tmp_path / "1", text, cut, LONGER)
    start = ModelSettings(start=str(tmp_path / "1"))
    one = replace(LONGER, steps=1)
    again = first_figures(target, text, tmp_path / "2", start, one)
    assert again["loss"] == pytest.approx(figures["loss"], abs=1e-3)
    assert torch.equal(
        Checkpoint.load(str(tmp_path / "2"), torch.float32).draft_ids, run.task.ids
    )
    with pytest.raises(OptionError, match="its own draft vocabulary of 30"):
        made(
            ModelTask,
            target,
            tmp_path / "3",
            [text],
            replace(start, draft_vocab=9),
            QUICK,
        )


def test_a_checkpoint_of_another_tokenizer_is_refused(target, text, tmp_path):
    other = save_checkpoint(tmp_path / "other", llama_config(), tokenizer=False)
    save_tokenizer(
        other, words=("hello", "world", "nothing", "the", "same", "abcdefgh")
    )
    with pytest.raises(PairError, match="another tokenizer"):
        made(
            ModelTask,
            target,
            tmp_path / "o",
            [text],
            ModelSettings(start=str(other)),
            QUICK,
        )


@pytest.mark.parametrize("rows", [VOCAB_SIZE - 8, VOCAB_SIZE + 32])
def test_a_start_of_another_padding_gets_the_target_s(target, text, tmp_path, rows):
    config = llama_config(vocab_size=rows, num_hidden_layers=1)
    start = save_checkpoint(tmp_path / "start", config, seed=1)
    train(target, tmp_path / "o", text, ModelSettings(start=str(start)))
    loaded = Checkpoint.load(str(tmp_path / "o"), torch.float32)
    assert loaded.vocab_size == loaded.model.config.vocab_size == VOCAB_SIZE


def test_a_stopped_drafter_is_whole_after_a_validation(target, text, tmp_path):
    def stop(progress):
        if progress.validation is not None and progress.step:
            raise KeyboardInterrupt

    options = replace(QUICK, validate_every=2)
    with pytest.raises(KeyboardInterrupt):
        train(target, tmp_path / "o", text, SMALL, options, report=stop)
    assert (tmp_path / "o" / UNFINISHED).is_file()
    loaded = Checkpoint.load(str(tmp_path / "o"), torch.float32)
    assert loaded.model.config.hidden_size == SMALL.hidden_size


def test_few_texts_are_told(target, tmp_path):
    data = lines(tmp_path / "t.jsonl", [{"text": "for self in range"}] * 3)
    often = replace(QUICK, steps=100, batch_size=2)
    run = made(ModelTask, target, tmp_path / "o", [data], SMALL, often)
    advice = "each 100 times in 100 steps; give more texts or fewer --steps"
    assert run.task.headline(run).endswith(advice)
    seldom = replace(QUICK, steps=20, batch_size=2)
    run = made(ModelTask, target, tmp_path / "p", [data], SMALL, seldom)
    assert run.task.headline(run).endswith(
        "from 2 sequences, each 20 times in 20 steps"
    )
    most = replace(QUICK, steps=None, batch_size=2)
    run = made(ModelTask, target, tmp_path / "q", [data], SMALL, most)
    assert run.task.headline(run).endswith("each 50 times in 50 steps")


@pytest.mark.parametrize("draft_vocab", [None, 30])
def test_labels_from_the_disk_teach_the_same(
    target, text, tmp_path, monkeypatch, draft_vocab
):
    """Every text runs through the target once."""
    settings = replace(SMALL, draft_vocab=draft_vocab)
    _, figures = train(target, tmp_path / "1", text, settings)
    cached = replace(settings, cache=tmp_path / "labels", cache_tokens=20)
    _, first = train(target, tmp_path / "2", text, cached)
    assert first["loss"] == pytest.approx(figures["loss"], rel=5e-2)
    assert not list((tmp_path / "labels").glob(".*"))
    monkeypatch.setattr(draft_task, "exact_labels", None)
    _, again = train(target, tmp_path / "3", text, cached)
    assert again == first
    with pytest.raises(OutputError, match="another draft vocabulary"):
        train(target, tmp_path / "4", text, replace(cached, draft_vocab=9))
    with pytest.raises(OutputError, match="choose another folder"):
        train(target, tmp_path / "5", text, replace(cached, cache_tokens=9))


def test_labels_from_the_disk_and_exact_labels_do_not_go_on_from_each_other(
    target, text, tmp_path
):
    def at_once(progress) -> None:
        raise KeyboardInterrupt

    cached = replace(SMALL, cache=tmp_path / "labels")
    with pytest.raises(KeyboardInterrupt):
        train(target, tmp_path / "out", text, cached, report=at_once)
    with pytest.raises(OutputError, match=r"other settings \(cache\)"):
        train(target, tmp_path / "out", text)
    (tmp_path / "labels").rename(tmp_path / "moved")
    moved = replace(SMALL, cache=tmp_path / "moved")
    assert train(target, tmp_path / "out", text, moved)[0].step == QUICK.steps


def test_a_part_of_each_batch_is_the_drafters_own(target, text, tmp_path):
    """A share of the rows; their prompts stay, and the same step gives the same."""

    class Alone:
        process_index, num_processes, device = 0, 1, torch.device("cpu")

    options = replace(QUICK, batch_size=4)
    settings = replace(SMALL, on_policy_share=0.5, draft_vocab=30)
    run = made(ModelTask, target, tmp_path / "out", [text], settings, options)
    plain = run.corpus.batch(0, 4)
    run.accelerator = Alone
    batch = run.task.batch(run, plain)
    own = [row for row in range(4) if not torch.equal(batch.ids[row], plain.ids[row])]
    assert own == [1, 3]
    for row in own:
        size = int((batch.labels[row] >= 0).nonzero()[0])
        assert size == 16
        assert torch.equal(batch.ids[row, :16], plain.ids[row, :16])
        assert set(batch.ids[row, 16:].tolist()) <= {0, *run.task.ids.tolist()}
    again = run.task.batch(run, plain)
    assert torch.equal(again.ids, batch.ids)
    run.step = 1
    assert not torch.equal(run.task.batch(run, plain).ids[1], batch.ids[1])


def lines(file, rows):
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "x" * 200},
            "1 of 2 lines .* the most in line 2; give --sequence-length",
        ),
        ({"prompt": ""}, "has 0 tokens"),
        ({"completion": "a"}, "is not an object with prompt"),
        ({"prompt": "a", "completion": 3}, "is not an object with prompt"),
    ],
)
def test_lines_that_cannot_be_used(target, tmp_path, row, message):
    data = lines(tmp_path / "task.jsonl", [{"prompt": "for self"}, row])
    with pytest.raises(DataError, match=message):
        made(ModelTask, target, tmp_path / "o", [data], SMALL, QUICK)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "mse"}, "unknown loss 'mse'; choose forward-kl"),
        ({"loss": "text", "on_policy_share": 0.5}, "leave --on-policy-share out"),
        ({"cache_tokens": 8}, "give --cache too"),
        ({"layers": 0}, "layers 0 is out of range"),
        ({"hidden_size": 7}, "hidden size 7 is out of range"),
        ({"hidden_size": 36}, "hidden size 36 is not a multiple of 8"),
        ({"beta": 0.5}, "loss forward-kl has no beta"),
        ({"loss": "js", "beta": 1.5}, "beta 1.5 is out of range"),
        ({"on_policy_share": 1.5}, "on policy share 1.5 is out of range"),
        ({"start": "x", "from_layers": (1,)}, "give --from or --from-layers"),
        ({"from_layers": (1,), "layers": 2}, "leave --layers and --hidden-size out"),
        ({"from_layers": (1, 9)}, r"the layers \[1, 9\] are not all layers"),
        ({"draft_vocab": VOCAB_SIZE}, "is not a part of the target's 288"),
        ({"cache": Path("x"), "on_policy_share": 0.5}, "leave --cache out"),
        ({"cache": Path("x"), "loss": "text"}, "leave --cache out"),
        ({"start": "/nowhere/at/all"}, "no checkpoint at"),
    ],
)
def test_settings_that_cannot_be_used(target, text, tmp_path, settings, message):
    """One line each, before anything is written."""
    with pytest.raises((OptionError, CheckpointError), match=message):
        made(
            ModelTask, target, tmp_path / "o", [text], ModelSettings(**settings), QUICK
        )
    assert not (tmp_path / "o").exists()


def test_the_advised_size_is_the_largest_that_is_cheap(tmp_path):
    """Of a target that is not tiny; and a draft vocabulary allows more."""
    config = llama_config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=12, vocab_size=2048
    )
    checkpoint = Checkpoint.load(
        str(save_checkpoint(tmp_path / "t", config)), torch.float32
    )
    whole = config.to_dict()
    widths = []
    for draft_vocab in (None, 256):
        advised = advised_config(checkpoint, None, None, draft_vocab)
        share = cost_share(advised.to_dict(), whole, draft_vocab)
        assert share <= SHARE
        sizes = advised.num_hidden_layers, advised.hidden_size + 64
        wider = new_config(checkpoint, *sizes).to_dict()
        assert cost_share(wider, whole, draft_vocab) > SHARE
        widths.append(advised.hidden_size * advised.num_hidden_layers)
    assert widths[1] > widths[0]
    fixed = advised_config(checkpoint, 3, None, None)
    assert fixed.num_hidden_layers == 3
    assert advised_config(checkpoint, 2, 320, None).hidden_size == 320


def test_steps_and_size_are_advised_and_said(target, text, tmp_path):
    texts = lines(tmp_path / "t.jsonl", [{"text": "for self in range"}] * 9_999)
    options = replace(QUICK, steps=None)
    run = made(ModelTask, target, tmp_path / "o", [texts], None, options)
    assert run.steps == 200 * run.parameters // 64
    line = run.task.headline(run)
    assert f"{run.parameters} weights, a step at " in line
    assert "(200 a weight, advised 200)" in line
    assert "\n" not in line
