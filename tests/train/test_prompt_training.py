"""Training prompt tokens and streams: what they see, what stays, what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MistralConfig

from jetdraft.checkpoints.streams import PromptSettings, StreamSettings
from jetdraft.errors import CheckpointError, UnsupportedModelError
from jetdraft.methods.ppd.task import PpdTask
from jetdraft.methods.stream.task import StreamTask
from jetdraft.train.prompts import prompt_mask
from tests.cli.running import assert_refused, succeed
from tests.cli.running import jetdraft as run_jetdraft
from tests.tiny import SIZES, llama_config, save_checkpoint, save_streams
from tests.train.periodic import QUICK, made

LAYERS = 4


def test_members_see_their_own_kind_only():
    mask = prompt_mask(torch.tensor([[1, 3]]), 4, PromptSettings(2, 2))
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
    assert "prompts       3 with 1 embeddings each" in shown


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
    """Each damage is mended after its refusal."""
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
    own = model.read_bytes()
    config = llama_config(num_hidden_layers=4)
    other = save_checkpoint(out.parent / "other", config, seed=9)
    model.write_bytes((other / "model.safetensors").read_bytes())
    refused = run_jetdraft("export", out, "-o", bundle)
    assert_refused(refused, "trained for other weights")
    model.write_bytes(own)
    assert not bundle.exists()


def test_a_target_with_windows_is_refused(text, tmp_path):
    config = MistralConfig(**SIZES, sliding_window=16)
    folder = save_checkpoint(tmp_path / "windows", config)
    with pytest.raises(UnsupportedModelError, match="windows"):
        made(PpdTask, str(folder), tmp_path / "out", [text])


SETTINGS = StreamSettings(gamma=3, layers=2, lora_rank=8, prune_rank=2)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("train") / "tuned"
    return str(save_checkpoint(folder, llama_config()))


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_streams_begin_at_the_size_of_hidden_states(tuned, text, tmp_path, mode):
    settings = replace(SETTINGS, layers=1, mode=mode)
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
    run = made(StreamTask, tuned, folder, [text], SETTINGS, QUICK)
    run.run(reports.append)
    seen = [r.validation["main_loss"] for r in reports if r.validation]
    assert len(seen) == 3
    assert len(set(seen)) == 1
    described = json.loads((folder / "streams.json").read_text())
    assert described["positions"] == "row + stream"
    assert described["parameters"] == run.task.counts(run)
    assert described["parameters"]["streams"] == 3 * 64 + 2 * 2 * 64


def test_a_target_with_streams_is_refused(text, tmp_path):
    folder = save_checkpoint(tmp_path / "target", llama_config())
    save_streams(folder, StreamSettings(gamma=2, layers=1, lora_rank=4))
    with pytest.raises(CheckpointError, match="already has streams"):
        made(StreamTask, str(folder), tmp_path / "more", [text], SETTINGS, QUICK)
    assert not (tmp_path / "more").exists()
