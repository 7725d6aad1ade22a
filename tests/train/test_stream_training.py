"""Training streams: how they begin, and what stays of the target."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from jetdraft.checkpoints.streams import StreamSettings
from jetdraft.errors import CheckpointError
from jetdraft.methods.stream.task import StreamTask
from tests.tiny import llama_config, save_checkpoint, save_streams
from tests.train.periodic import QUICK, made

SETTINGS = StreamSettings(gamma=3, layers=2, lora_rank=8, prune_rank=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("train") / "target"
    return str(save_checkpoint(folder, llama_config()))


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_streams_begin_at_the_size_of_hidden_states(target, text, tmp_path, mode):
    settings = replace(SETTINGS, layers=1, mode=mode)
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


def test_lossless_training_leaves_the_main_rows_alone(target, text, tmp_path):
    reports, folder = [], tmp_path / "out"
    run = made(StreamTask, target, folder, [text], SETTINGS, QUICK)
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
