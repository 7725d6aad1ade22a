import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig

from jetdraft import errors
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streams import UNFINISHED, PromptSettings, StreamSettings
from jetdraft.methods.draft import task as draft_task
from jetdraft.methods.draft.task import ModelSettings, advised_config, cost_share
from jetdraft.methods.eagle.task import EagleSettings, EagleTask
from jetdraft.methods.ppd.task import PpdTask
from jetdraft.methods.stream.task import StreamTask
from jetdraft.train import heads, prompts, run_folder, teacher
from jetdraft.train.teacher import Lesson
from tests import cases, tiny
from tests.programs import assert_refused, succeed
from tests.programs import jetdraft as run_jetdraft
from tests.tiny import SIZES, VOCAB_SIZE, llama_config, save_checkpoint, save_probes
from tests.train.periodic import LONGER, QUICK, interrupt, made

LAYERS = 4
SMALL = ModelSettings(layers=1, hidden_size=32)
HEAD = EagleSettings(draft_vocabulary=40, unrolled=3)
STREAMS = StreamSettings(gamma=3, layers=2, lora_rank=8, prune_rank=2)


def prepared(target, output, text, settings=SMALL, options=QUICK):
    return made(draft_task.ModelTask, target, output, [text], settings, options)


def train(*args, **report):
    run = prepared(*args)
    return run, run.run(**report)


@pytest.mark.parametrize("loss", draft_task.LOSSES)
def test_a_new_drafter_learns_with_every_loss(target, text, tmp_path, loss):
    seen, settings = [], replace(SMALL, loss=loss)
    options = replace(LONGER, steps=40, batch_size=4, learning_rate=2e-2)
    train(target, tmp_path / "out", text, settings, options, report=seen.append)
    before, after = seen[0].validation, seen[-1].validation
    assert np.mean(after["agreement"]) > np.mean(before["agreement"]) + 0.3
    assert after["acceptance"][0] > before["acceptance"][0] + 0.1
    assert not (tmp_path / "out" / run_folder.STATE_FILE).exists()


@pytest.fixture(scope="module")
def cut(target, tmp_path_factory):
    folder, text = tmp_path_factory.mktemp("cut") / "out", Path(target).parent
    settings = replace(SMALL, draft_vocab=30)
    return train(target, folder, text / "text.txt", settings, LONGER)


def test_a_damaged_map_is_refused(cut, tmp_path):
    folder = shutil.copytree(cut[0].folder.path, tmp_path / "out")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, message in (
        (torch.full((30,), 999), "map 30 rows"),
        (torch.zeros(2, 2).long(), "is no list"),
    ):
        save_file({**tensors, "d2t": name}, file, metadata={"format": "pt"})
        with pytest.raises(errors.CheckpointError, match=message):
            Checkpoint.load(str(folder), torch.float32)


def first_figures(*args):
    seen = []
    with pytest.raises(KeyboardInterrupt):
        train(*args, report=lambda o: seen.append(o) or interrupt(0)(o))
    return seen[0].validation


def test_all_layers_of_the_target_are_the_target(target, text, tmp_path):
    settings = ModelSettings(from_layers=(0, 1, 2, 3))
    figures = first_figures(target, tmp_path / "all", text, settings)
    assert figures["acceptance"] == pytest.approx([1.0] * 4, abs=1e-2)
    assert figures["loss"] == pytest.approx(0.0, abs=1e-2)
    settings = ModelSettings(from_layers=(0, 3))
    model = prepared(target, tmp_path / "some", text, settings).module.drafter
    assert model.config.num_hidden_layers == 2
    own = Checkpoint.load(target, torch.float32).model.model.layers
    for layer, place in zip(model.model.layers, (0, 3), strict=True):
        wanted = own[place].mlp.up_proj.weight.float()
        assert torch.equal(layer.mlp.up_proj.weight, wanted)


def test_streams_that_tune_the_target_are_the_teacher(text, tmp_path):
    """A drafter for the base would guess the text of another model."""
    folder = save_checkpoint(tmp_path / "target", llama_config())
    save_probes(folder, StreamSettings(gamma=2, layers=1, mode="shared", lora_rank=4))
    run = prepared(str(folder), tmp_path / "out", text)
    loaded, other = (Checkpoint.load(str(folder), torch.float32) for _ in range(2))
    plain = other.model
    for model in (loaded.model, plain):
        model.set_attn_implementation("sdpa")
    ids = torch.tensor([[5, 7, 9]])
    with torch.no_grad():
        base = loaded.model(input_ids=ids).logits
        tuned = loaded.add_probes(1.0).model.state_dict()
        taught = run.target.model(input_ids=ids).logits
        plain.load_state_dict(tuned)
        wanted = plain(input_ids=ids).logits
    torch.testing.assert_close(taught, wanted, atol=1e-5, rtol=1e-4)
    assert (taught - base).abs().max() > 0.1


def test_a_drafter_goes_on_from_a_checkpoint(target, text, tmp_path, cut):
    run, figures = cut
    start = ModelSettings(start=str(run.folder.path))
    again = first_figures(target, tmp_path / "2", text, start, LONGER)
    assert again["loss"] == pytest.approx(figures["loss"], abs=1e-3)
    read = Checkpoint.load(str(tmp_path / "2"), torch.float32)
    assert torch.equal(read.draft_ids, run.task.ids)
    with pytest.raises(errors.OptionError, match="its own draft vocabulary of 30"):
        prepared(target, tmp_path / "3", text, replace(start, draft_vocab=9))


def test_a_checkpoint_of_another_tokenizer_is_refused(target, text, tmp_path):
    other = save_checkpoint(tmp_path / "other", llama_config(), tokenizer=False)
    words = ("hello", "world", "nothing", "the", "same", "abcdefgh")
    tiny.save_tokenizer(other, words=words)
    with pytest.raises(errors.PairError, match="another tokenizer"):
        prepared(target, tmp_path / "o", text, ModelSettings(start=str(other)))


@pytest.mark.parametrize("rows", [VOCAB_SIZE - 8, VOCAB_SIZE + 32])
def test_a_start_of_another_padding_gets_the_target_s(target, text, tmp_path, rows):
    config = llama_config(vocab_size=rows, num_hidden_layers=1)
    start = save_checkpoint(tmp_path / "start", config, seed=1)
    first_figures(target, tmp_path / "o", text, ModelSettings(start=str(start)))
    assert (tmp_path / "o" / UNFINISHED).is_file()
    loaded = Checkpoint.load(str(tmp_path / "o"), torch.float32)
    assert loaded.vocab_size == loaded.model.config.vocab_size == VOCAB_SIZE


@cases(
    "steps, words",
    (100, "each 100 times in 100 steps; give more texts or fewer --steps"),
    (20, "from 2 sequences, each 20 times in 20 steps"),
    (None, "each 50 times in 50 steps"),
)
def test_few_texts_are_told(target, tmp_path, steps, words):
    data = lines(tmp_path / "t.jsonl", [{"text": "for self in range"}] * 3)
    run = prepared(target, tmp_path / "o", data, SMALL, replace(QUICK, steps=steps))
    assert run.task.headline(run).endswith(words)


@pytest.mark.parametrize("draft_vocab", [None, 30])
def test_labels_from_the_disk_teach_the_same(
    target, text, tmp_path, monkeypatch, draft_vocab
):
    settings = replace(SMALL, draft_vocab=draft_vocab)
    options = replace(QUICK, steps=2)

    def figures(name, settings):
        return train(target, tmp_path / name, text, settings, options)[1]

    cached = replace(settings, cache=tmp_path / "labels", cache_tokens=20)
    first = figures("2", cached)
    assert first["loss"] == pytest.approx(figures("1", settings)["loss"], rel=5e-2)
    assert not list((tmp_path / "labels").glob(".*"))
    monkeypatch.setattr(draft_task, "exact_labels", None)
    assert figures("3", cached) == first
    with pytest.raises(errors.OutputError, match="another draft vocabulary"):
        figures("4", replace(cached, draft_vocab=9))
    with pytest.raises(errors.OutputError, match="choose another folder"):
        figures("5", replace(cached, cache_tokens=9))


def test_labels_from_the_disk_and_exact_labels_do_not_go_on_from_each_other(
    target, text, tmp_path
):
    stored = replace(SMALL, cache=tmp_path / "labels")
    first_figures(target, tmp_path / "out", text, stored)
    with pytest.raises(errors.OutputError, match=r"other settings \(cache\)"):
        train(target, tmp_path / "out", text)
    (tmp_path / "labels").rename(tmp_path / "moved")
    moved = replace(SMALL, cache=tmp_path / "moved")
    assert train(target, tmp_path / "out", text, moved)[0].step == QUICK.steps


def test_a_part_of_each_batch_is_the_drafters_own(target, text, tmp_path):
    options = replace(QUICK, batch_size=4)
    settings = replace(SMALL, on_policy_share=0.5, draft_vocab=30)
    run = prepared(target, tmp_path / "out", text, settings, options)
    plain = run.corpus.batch(0, 4)
    batch = run.task.batch(run, plain)
    own = [row for row in range(4) if not torch.equal(batch.ids[row], plain.ids[row])]
    assert own == [1, 3]
    for row in own:
        assert int((batch.labels[row] >= 0).nonzero()[0]) == 16
        assert torch.equal(batch.ids[row, :16], plain.ids[row, :16])
        assert set(batch.ids[row, 16:].tolist()) <= {0, *run.task.ids.tolist()}
    assert torch.equal(run.task.batch(run, plain).ids, batch.ids)
    run.step = 1
    assert not torch.equal(run.task.batch(run, plain).ids[1], batch.ids[1])


def lines(file, rows):
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file


def test_the_advised_size_is_the_largest_that_is_cheap(tmp_path):
    config = llama_config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=12, vocab_size=2048
    )
    base = Checkpoint.load(str(save_checkpoint(tmp_path / "t", config)), torch.float32)
    whole, widths = config.to_dict(), []
    for draft_vocab in (None, 256):
        advised = advised_config(base, None, None, draft_vocab)
        share = cost_share(advised.to_dict(), whole, draft_vocab)
        assert share <= draft_task.MAX_READ_SHARE
        sizes = advised.num_hidden_layers, advised.hidden_size + 64
        wider = draft_task.new_config(base, *sizes).to_dict()
        assert cost_share(wider, whole, draft_vocab) > draft_task.MAX_READ_SHARE
        widths.append(advised.hidden_size * advised.num_hidden_layers)
    assert widths[1] > widths[0]
    assert advised_config(base, 3, None, None).num_hidden_layers == 3
    assert advised_config(base, 2, 320, None).hidden_size == 320


def test_steps_and_size_are_advised_and_said(target, text, tmp_path):
    texts = lines(tmp_path / "t.jsonl", [{"text": "for self in range"}] * 9_999)
    run = prepared(target, tmp_path / "o", texts, None, replace(QUICK, steps=None))
    assert run.steps == 200 * run.parameters // 64
    line = run.task.headline(run)
    assert f"{run.parameters} weights, a step at " in line
    assert "(200 a weight, advised 200)" in line
    assert "\n" not in line


def prepared_head(target, output, text, settings=HEAD, options=QUICK):
    return made(EagleTask, target, output, [text], settings, options)


def test_an_eagle3_folder_has_the_published_names(target, text, tmp_path):
    small = replace(HEAD, inner=8, half=True)
    run = prepared_head(target, tmp_path / "out", text, small)
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
    few = replace(HEAD, draft_vocabulary=5)
    run = prepared_head(target, tmp_path / "out", text, few)
    counts = Counter(token for text in run.corpus.training for token in text.ids)
    chosen = run.task.ids.tolist()
    assert chosen == sorted(chosen)
    assert len(counts) > 5
    others = [count for token, count in counts.items() if token not in chosen]
    assert min(counts[token] for token in chosen) >= max(others)
    whole = replace(HEAD, draft_vocabulary=VOCAB_SIZE)
    assert prepared_head(target, tmp_path / "2", text, whole).task.ids is None


def test_unrolled_steps_are_those_of_a_draft(target, text, tmp_path):
    """Slot t of step i says what a draft from row t says in its step i."""
    torch.manual_seed(0)
    run = prepared_head(target, tmp_path / "out", text)
    head, rows = run.module.drafter.eval(), 9
    ids = torch.randint(VOCAB_SIZE, (1, rows + 4))
    features, slot = torch.randn(1, rows, 64), 4
    lesson = Lesson(ids[:, :rows], ids[:, :rows], [], features, None, None)
    head.fuse = lambda taps: features
    with torch.no_grad():
        predictions = run.task.predictions(head, lesson, learns=False)
        steps = [logits[0, slot] for _, logits in predictions]
        cache, positions = DynamicCache(), torch.arange(slot + 1)[None]
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
    assert heads.unrolled_mask(3, 1, features).shape == (1, 1, 3, 6)


def test_states_from_the_disk_teach_the_same(target, text, tmp_path, monkeypatch):
    options = replace(QUICK, steps=2)

    def trained(name, settings):
        return prepared_head(target, tmp_path / name, text, settings, options).run()

    figures = trained("1", HEAD)
    cached = replace(HEAD, cache=tmp_path / "states")
    assert trained("2", cached)["losses"] == pytest.approx(figures["losses"], rel=1e-2)
    assert list((tmp_path / "states").glob("states-0-*.safetensors"))
    assert not list((tmp_path / "states").glob(".*"))
    monkeypatch.setattr(teacher, "compute_states", None)
    assert trained("3", cached)["losses"] == pytest.approx(figures["losses"], rel=1e-2)
    with pytest.raises(errors.OutputError, match="other taps"):
        trained("4", replace(cached, taps=(1, 2, 3)))


def test_members_see_their_own_kind_only():
    mask = prompts.prompt_mask(torch.tensor([[1, 3]]), 4, PromptSettings(2, 2))
    first, second = [1, 1, 0, 0], [1, 1, 1, 1]
    assert mask[0, 0].int().tolist() == [
        [*first, 1, 0, 0, 0, 0, 0, 0, 0], [*first, 0, 1, 0, 0, 0, 0, 0, 0],
        [*first, 1, 0, 1, 0, 0, 0, 0, 0], [*first, 0, 1, 0, 1, 0, 0, 0, 0],
        [*second, 0, 0, 0, 0, 1, 0, 0, 0], [*second, 0, 0, 0, 0, 0, 1, 0, 0],
        [*second, 0, 0, 0, 0, 1, 0, 1, 0], [*second, 0, 0, 0, 0, 0, 1, 0, 1],
    ]  # fmt: skip


def test_bad_input_of_the_command_line(target, text, tmp_path):
    out, bundle = tmp_path / "out", tmp_path / "bundle"
    command = ("train", "ppd", target, "--data", text, "-o", out)
    size = ("--batch-size", "2", "--sequence-length", "32")
    trained = succeed(*command, "--steps", "2", *size)
    assert "training 192 weights of 3 prompt tokens, 0." in trained.stderr
    again = run_jetdraft("train", "ppd", out, "--data", text, "-o", tmp_path / "more")
    assert_refused(again, "already has streams or prompt tokens")
    _assert_exports_refused(out, bundle)
    sizes = ("--capacity", 128, "--max-width", 32, "--fast")
    succeed("export", out, "-o", bundle, *sizes)
    shown = run_jetdraft("check", "--no-run", bundle).stdout
    assert all(w in shown for w in ("streams       gamma 3,", "members 1,"))


def test_forecasts_from_the_command_line(target, text, tmp_path):
    out, bundle = tmp_path / "out", tmp_path / "bundle"
    command = ("train", "forecast", target, "--data", text, "-o", out)
    size = ("--batch-size", "2", "--sequence-length", "32", "--steps", "2")
    trained = succeed(*command, "--prefix", "3", *size)
    assert "training 1024 weights of 4 forecasts" in trained.stderr
    tensors = load_file(out / "streams.safetensors")
    for changed in (
        {"prompts.embeddings": tensors["prompts.embeddings"]},
        {**tensors, "prompts.keys": torch.zeros(4, 2, 3, 8)},
    ):
        save_file(changed, out / "streams.safetensors")
        refused = run_jetdraft("export", out, "-o", bundle)
        assert_refused(refused, "does not fit streams.json")
    assert not bundle.exists()


def _assert_exports_refused(out, bundle):
    settings, weights = out / "streams.json", out / "streams.safetensors"
    model = out / "model.safetensors"
    good, embeddings = json.loads(settings.read_text()), load_file(weights)
    [name] = embeddings
    for fields in ({**good, "mode": "wishes"}, {**good, "gamma": "3"}):
        settings.write_text(json.dumps(fields))
        assert_refused(run_jetdraft("export", out, "-o", bundle), "cannot be read")
    settings.write_text(json.dumps(good))
    for tensors in ({}, {name: torch.zeros(3, 32)}, {name: torch.zeros(2, 64)}):
        save_file(tensors, weights)
        refused = run_jetdraft("export", out, "-o", bundle)
        assert_refused(refused, "does not fit streams.json")
    save_file(embeddings, weights)
    own, config = model.read_bytes(), llama_config(num_hidden_layers=4)
    other = save_checkpoint(out.parent / "other", config, seed=9)
    model.write_bytes((other / "model.safetensors").read_bytes())
    refused = run_jetdraft("export", out, "-o", bundle)
    assert_refused(refused, "trained for other weights")
    model.write_bytes(own)
    assert not bundle.exists()


def test_a_target_with_windows_or_streams_is_refused(text, tmp_path):
    config = MistralConfig(**SIZES, sliding_window=16)
    folder = save_checkpoint(tmp_path / "windows", config)
    with pytest.raises(errors.UnsupportedModelError, match="windows"):
        made(PpdTask, str(folder), tmp_path / "out", [text])
    folder = save_checkpoint(tmp_path / "target", llama_config())
    save_probes(folder, StreamSettings(gamma=2, layers=1, lora_rank=4))
    with pytest.raises(errors.CheckpointError, match="already has streams"):
        made(StreamTask, str(folder), tmp_path / "more", [text], STREAMS, QUICK)
    assert not (tmp_path / "more").exists()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("train") / "tuned"
    return str(save_checkpoint(folder, llama_config()))


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_streams_begin_at_the_size_of_hidden_states(tuned, text, tmp_path, mode):
    settings = replace(STREAMS, layers=1, mode=mode)
    runs = [made(StreamTask, tuned, tmp_path / "o", [text], settings) for _ in range(2)]
    one, other = (run.module.streams.embeddings for run in runs)
    assert torch.equal(one, other)
    ids = torch.tensor([runs[0].corpus.training[0].ids])
    model = AutoModelForCausalLM.from_pretrained(tuned)
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    # Three streams of 64 entries have a standard error of 5 %.
    assert one.std().item() == pytest.approx(states[-2].abs().median().item(), rel=0.3)
    assert not (tmp_path / "o").exists()


def test_lossless_training_leaves_the_main_rows_alone(tuned, text, tmp_path):
    reports, folder = [], tmp_path / "out"
    run = made(StreamTask, tuned, folder, [text], STREAMS, QUICK)
    run.run(reports.append)
    seen = [r.validation["main_loss"] for r in reports if r.validation]
    assert (len(seen), len(set(seen))) == (3, 1)
    described = json.loads((folder / "streams.json").read_text())
    assert described["positions"] == "row + stream"
    assert described["parameters"] == run.task.counts(run)
    assert described["parameters"]["streams"] == 3 * 64 + 2 * 2 * 64
