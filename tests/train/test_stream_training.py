"""Training: what is learned, what is kept, and how it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import jetdraft
from jetdraft.errors import CheckpointError, DataError, OutputError, TrainingError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods.stream import task as stream_task
from jetdraft.methods.stream.task import StreamTask, StreamTaskSettings
from jetdraft.recipe import Recipe
from jetdraft.train.data import IGNORED, Corpus, Example, collate
from jetdraft.train.run_folder import STATE, RunFolder
from jetdraft.train.task import TrainingOptions
from tests.tiny import llama_config, save_checkpoint, tokenizer
from tests.train.periodic import PERIOD, QUICK, made, nothing, tuned

SETTINGS = StreamTaskSettings(gamma=3, layers=2, lora_rank=8, prune_rank=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("train") / "target"
    return str(save_checkpoint(folder, llama_config()))


def train(target, output, text, settings=SETTINGS, options=QUICK, report=nothing):
    run = made(StreamTask, target, output, [text], settings, options)
    return run, run.run(report)


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        ("lossless", {"steps": 80, "batch_size": 1, "sequence_length": 64}),
        ("shared", {"steps": 240, "batch_size": 1, "sequence_length": 96}),
    ],
    ids=["lossless", "shared"],
)
def test_a_trained_checkpoint_drafts(target, text, tmp_path, mode, size):
    """Overfitting a periodic text drives tokens per pass towards gamma + 1."""
    settings = StreamTaskSettings(gamma=3, layers=3, mode=mode, lora_rank=16)
    options = TrainingOptions(**size, learning_rate=1e-2)
    # A base that has to learn the text as well does so by chance: three seeds gave
    # 3.2, 2.6 and 1.6 tokens per pass after 200 steps.
    target = tuned(target, text, tmp_path / "tuned")
    _, figures = train(target, tmp_path / "out", text, settings, options)
    # The first tokens of a window cannot be guessed by anyone.
    assert min(figures["acceptance"]) > 0.8
    bundle = tmp_path / "bundle"
    float32 = ExportOptions(Recipe("none"), capacity=256, max_width=32)
    export(str(tmp_path / "out"), bundle, options=float32)
    model = jetdraft.load(bundle, threads=1)
    how = {"max_new_tokens": 60, "ignore_eos": True}
    plain = model.generate(PERIOD * 2, method="none", **how)
    found = model.generate(PERIOD * 2, method="stream", num_draft_tokens=3, **how)
    assert found.token_ids == plain.token_ids
    # 60 tokens take 16 passes at least: the first has no draft.
    assert found.stats.tokens_per_pass > 3
    _check_trees(model, plain.token_ids, **how)


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_streams_begin_at_the_size_of_hidden_states(target, text, tmp_path, mode):
    settings = StreamTaskSettings(gamma=3, layers=1, mode=mode, lora_rank=8)
    runs = [
        made(StreamTask, target, tmp_path / "o", [text], settings) for _ in range(2)
    ]
    one, other = (run.module.streams.embeddings for run in runs)
    assert torch.equal(one, other)
    ids = torch.tensor([runs[0].corpus.training[0].ids])
    model = AutoModelForCausalLM.from_pretrained(target)
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    # Three streams of 64 entries have a standard error of 5 %.
    assert one.std().item() == pytest.approx(states[-2].abs().median().item(), rel=0.3)
    assert not (tmp_path / "o").exists()


def _check_trees(model, plain, **how):
    """Here branches are accepted, through one graph or two, compacted or carried."""
    tree = {"tree": "k-ary", "branching": [2, 1, 1]}
    for exact in (True, False):
        for threshold in (None, 0.0, 0.02):
            if threshold is not None and model.bundle.target.halves is None:
                continue
            found = model.generate(
                PERIOD * 2,
                method="stream",
                drafting={**tree, "prune_threshold": threshold},
                exact=exact,
                **how,
            )
            assert found.token_ids == plain
            assert found.stats.accepted_tokens > 30


def test_the_base_lies_in_the_output_untouched(target, text, tmp_path):
    run, _ = train(target, tmp_path / "out", text)
    for file in Path(target).iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    described = json.loads((tmp_path / "out" / "streams.json").read_text())
    assert described["step"] == 4
    assert described["parameters"] == run.task.counts(run)
    assert described["positions"] == "row + stream"
    assert described["parameters"]["streams"] == 3 * 64 + 2 * 2 * 64


def test_lossless_training_leaves_the_main_rows_alone(target, text, tmp_path):
    reports = []
    train(target, tmp_path / "out", text, report=reports.append)
    seen = [r.validation["main_loss"] for r in reports if r.validation]
    assert len(seen) == 3
    assert len(set(seen)) == 1


def interrupt(progress):
    """Ctrl-C after the third step."""
    if progress.step == 3:
        raise KeyboardInterrupt


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "streams.safetensors")


@pytest.mark.parametrize("fast", [False, True])
def test_bfloat16_multiplies_only_where_it_is_fast(
    target, text, tmp_path, monkeypatch, fast
):
    halves = []

    def recorded(task, run, *arguments):
        halves.append(torch.is_autocast_enabled(run.device.type))
        return loss(task, run, *arguments)

    loss = StreamTask.loss
    monkeypatch.setattr(StreamTask, "loss", recorded)
    monkeypatch.setattr("jetdraft.train.training.is_fast", lambda device: fast)
    train(target, tmp_path / "out", text, options=replace(QUICK, steps=1))
    assert halves == [fast]


@pytest.mark.parametrize("last", [STATE, "streams.safetensors", "streams.json"])
def test_a_kill_in_the_last_save_is_mended_by_the_next_run(
    target, text, tmp_path, monkeypatch, last
):
    """`last` is the last file that was written; weights and state may differ then."""
    write = RunFolder._replace

    def killed(folder, name, contents):
        write(folder, name, contents)
        state = torch.load(tmp_path / "out" / STATE, weights_only=True)
        if name == last and state["step"] == QUICK.steps:
            raise SystemExit

    monkeypatch.setattr(RunFolder, "_replace", killed)
    with pytest.raises(SystemExit):
        train(target, tmp_path / "out", text)
    monkeypatch.undo()
    train(target, tmp_path / "out", text)
    train(target, tmp_path / "whole", text)
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        f.name for f in (tmp_path / "whole").iterdir()
    }
    expected = weights(tmp_path / "whole")
    for name, weight in weights(tmp_path / "out").items():
        torch.testing.assert_close(weight, expected[name])


@pytest.fixture
def stopped(target, text, tmp_path) -> Path:
    """A training that was interrupted after its third step."""
    output = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train(target, output, text, report=interrupt)
    assert (output / STATE).is_file()
    return output


@pytest.mark.parametrize("content", [b"", b"not a state", None])
def test_a_damaged_state_is_refused(target, text, stopped, content):
    file = stopped / STATE
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    before = (stopped / "streams.safetensors").read_bytes()
    with pytest.raises(OutputError, match="another folder"):
        train(target, stopped, text)
    assert (stopped / "streams.safetensors").read_bytes() == before


def test_a_folder_with_another_target_is_refused(target, text, stopped, tmp_path):
    for name in (STATE, "streams.json", "streams.safetensors"):
        (stopped / name).unlink()
    with pytest.raises(CheckpointError, match="let it go on"):
        export(str(stopped), tmp_path / "bundle")
    other = save_checkpoint(tmp_path / "other", llama_config(), seed=9)
    with pytest.raises(OutputError, match="holds another target"):
        train(str(other), stopped, text)


def test_a_target_that_gives_no_numbers_is_not_trained(text, tmp_path):
    folder = save_checkpoint(tmp_path / "target", llama_config())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrainingError, match="check the target"):
        train(str(folder), tmp_path / "out", text)


def test_an_interrupt_of_the_first_validation_can_be_gone_on_from(
    target, text, tmp_path
):
    def at_once(progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(target, tmp_path / "out", text, report=at_once)
    assert json.loads((tmp_path / "out" / "streams.json").read_text())["step"] == 0
    run, _ = train(target, tmp_path / "out", text)
    assert run.step == 4


def test_a_gradient_that_is_no_number_reaches_no_weight(
    target, text, tmp_path, monkeypatch
):
    """The loss of that step is still finite."""
    original, calls = stream_task.losses, []

    def losses(streamed, batch, gamma):
        found = original(streamed, batch, gamma)
        calls.append(1)
        if len(calls) == 5:
            # Of step 3, after two validations and two steps: an infinite slope at zero.
            nothing = (found.early * 0).abs()
            return replace(found, early=found.early + nothing.sqrt())
        return found

    monkeypatch.setattr(stream_task, "losses", losses)
    with pytest.raises(TrainingError, match="step 3"):
        train(target, tmp_path / "out", text)
    assert all(bool(w.isfinite().all()) for w in weights(tmp_path / "out").values())


def test_other_data_does_not_go_on(target, text, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(target, tmp_path / "out", text, report=interrupt)
    text.write_text(PERIOD * 101)
    with pytest.raises(OutputError, match=r"other settings \(data\)"):
        train(target, tmp_path / "out", text)


def test_a_target_with_streams_is_refused(target, text, tmp_path):
    train(target, tmp_path / "out", text)
    with pytest.raises(CheckpointError, match="already has streams"):
        train(str(tmp_path / "out"), tmp_path / "more", text)
    assert not (tmp_path / "more").exists()


def test_an_output_that_cannot_be_written(target, text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        train(target, tmp_path / "file" / "out", text)


def test_an_output_that_is_something_else(target, text, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="has no streams"):
        made(StreamTask, target, tmp_path / "out", [text], SETTINGS, QUICK)


# --- data -----------------------------------------------------------------------------


def read(*files, length=32, least=5, **options):
    return Corpus.read(files, tokenizer(), [0], length, least, **options)


def test_a_text_becomes_windows(text):
    corpus = read(text)
    assert {len(x.ids) for x in corpus.training} == {32}
    assert all(all(x.learned) for x in corpus.training)


def test_only_completions_are_learned(tmp_path):
    file = tmp_path / "data.jsonl"
    lines = [{"prompt": "def x", "completion": "return 12345"}] * 3
    file.write_text("\n".join(json.dumps(line) for line in lines))
    corpus = read(file)
    example = corpus.training[0]
    prompt = len(tokenizer().encode("def x").ids)
    assert example.learned == [False] * prompt + [True] * (len(example.ids) - prompt)
    assert example.ids[-1] == 0


def test_what_starts_a_text_starts_no_completion(tmp_path):
    from tokenizers.processors import TemplateProcessing

    words = tokenizer()
    words.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    file = tmp_path / "data.jsonl"
    line = json.dumps({"prompt": "def x", "completion": "return 12345"})
    file.write_text(f"{line}\n\n")
    corpus = Corpus.read([file], words, [0], 32, 5)
    assert corpus.validation[0].ids.count(0) == 2  # the start and the end


def test_padding_is_not_learned():
    batch = collate([Example([1, 2, 3], [True] * 3), Example([4], [True])])
    assert batch.ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.labels.tolist() == [[1, 2, 3], [4, IGNORED, IGNORED]]


def test_a_batch_depends_on_the_step_alone(text):
    one, other = read(text), read(text)
    other.batch(0, 4)
    assert torch.equal(one.batch(7, 4).ids, other.batch(7, 4).ids)
    assert not torch.equal(one.batch(7, 4).ids, one.batch(8, 4).ids)


def test_machines_share_a_batch(text):
    corpus = read(text)
    whole = corpus.batch(3, 4).ids
    parts = [corpus.batch(3, 4, part, 2).ids for part in (0, 1)]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), whole)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", "x", "the data has 1 of the 5 tokens"),
        ("a.txt", "", "the data has 0 of the 5 tokens"),
        ("a.jsonl", '{"prompt": "a", "completion": "b"}', "line 1 of .* has 3 tokens"),
        ("a.jsonl", "not json", "line 1 of .* is not an object"),
        ("a.jsonl", '{"prompt": "abcdef"}', "line 1 of .* is not an object"),
        ("a.jsonl", json.dumps({"text": "word " * 90}), "more tokens than the"),
    ],
)
def test_bad_data(tmp_path, name, content, match):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(DataError, match=match):
        read(file)


def test_missing_data(tmp_path):
    with pytest.raises(DataError, match="no data file"):
        read(tmp_path / "missing.txt")
