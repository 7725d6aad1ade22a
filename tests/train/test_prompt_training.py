"""Training prompt tokens: what is learned, what is refused, and how it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig

import jetdraft
from jetdraft.checkpoints.prompts import PromptSettings
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods.forecast.task import ForecastSettings, ForecastTask
from jetdraft.methods.ppd.task import PpdSettings, PpdTask
from jetdraft.recipe import Recipe
from jetdraft.train.prompts import visible
from tests.cli.running import assert_refused
from tests.cli.running import jetdraft as run_jetdraft
from tests.tiny import SIZES, llama_config, save_checkpoint
from tests.train.periodic import PERIOD, QUICK, made, nothing

LAYERS = 3
SETTINGS = PpdSettings(gamma=2, members=2)


def train(target, output, text, settings=SETTINGS, options=QUICK, report=nothing):
    task = ForecastTask if isinstance(settings, ForecastSettings) else PpdTask
    run = made(task, target, output, [text], settings, options)
    return run, run.run(report)


def test_trained_prompt_tokens_are_right_more_often(target, text, tmp_path):
    """On the text that the target knows, and in drafts of every shape."""
    seen = []
    options = replace(QUICK, steps=100, learning_rate=3e-2, sequence_length=48)
    options = replace(options, validate_every=100)
    settings = PpdSettings(gamma=3, members=2)
    _, figures = train(target, tmp_path / "out", text, settings, options, seen.append)
    before = seen[0].validation
    assert sum(figures["acceptance"]) > sum(before["acceptance"]) + 0.4
    assert all(map(float.__lt__, figures["losses"], before["losses"]))
    options = ExportOptions(Recipe("none"), capacity=256, max_width=32)
    export(str(tmp_path / "out"), tmp_path / "bundle", options=options)
    model = jetdraft.load(tmp_path / "bundle", threads=1)
    how = {"max_new_tokens": 60, "ignore_eos": True}
    plain = model.generate(PERIOD * 2, method="none", **how)
    for drafting in ({"rows": 12, "slots": 40}, {"tree": "chain"}, {"tree": "best"}):
        for exact in (True, False):
            drafted = model.generate(
                PERIOD * 2, method="ppd", drafting=drafting, exact=exact, **how
            )
            assert drafted.token_ids == plain.token_ids
            if "rows" in drafting:
                assert drafted.stats.tokens_per_pass > 1.5


def test_trained_forecasts_are_right_more_often(target, text, tmp_path):
    """Most of what is learned is the prefix."""
    seen, settings = [], ForecastSettings(gamma=2, prefix=4)
    options = replace(QUICK, steps=160, learning_rate=3e-2, sequence_length=48)
    options = replace(options, validate_every=160)
    run, figures = train(target, tmp_path / "out", text, settings, options, seen.append)
    assert run.parameters == 2 * 64 + 3 * 2 * 2 * 4 * 16
    before = seen[0].validation["acceptance"]
    assert sum(figures["acceptance"]) > sum(before) + 0.6
    options = ExportOptions(Recipe("none"), capacity=256, max_width=32)
    export(str(tmp_path / "out"), tmp_path / "bundle", options=options)
    model = jetdraft.load(tmp_path / "bundle", threads=1)
    how = {"max_new_tokens": 60, "ignore_eos": True}
    plain = model.generate(PERIOD * 2, method="none", **how)
    for exact in (True, False):
        drafted = model.generate(PERIOD * 2, method="forecast", exact=exact, **how)
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.tokens_per_pass > 1.5


def test_the_target_lies_in_the_output_untouched(target, text, tmp_path):
    run, _ = train(target, tmp_path / "out", text)
    for file in Path(target).iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    described = json.loads((tmp_path / "out" / "streams.json").read_text())
    assert described["parameters"] == run.parameters == 2 * 2 * 64
    assert [len(ranks) for ranks in described["ranks"]] == [8, 8]
    assert described["ranks"][0][0] == described["validation"]["acceptance"][0]


def interrupt(progress):
    """Ctrl-C after the third step."""
    if progress.step == 3:
        raise KeyboardInterrupt


def test_members_see_their_own_kind_only():
    """Two places with two prompt tokens of two members each."""
    seen = visible(torch.tensor([[1, 3]]), 4, PromptSettings(2, 2))[0, 0].int().tolist()
    first, second = [1, 1, 0, 0], [1, 1, 1, 1]
    assert seen == [
        [*first, 1, 0, 0, 0, 0, 0, 0, 0],
        [*first, 0, 1, 0, 0, 0, 0, 0, 0],
        [*first, 1, 0, 1, 0, 0, 0, 0, 0],
        [*first, 0, 1, 0, 1, 0, 0, 0, 0],
        [*second, 0, 0, 0, 0, 1, 0, 0, 0],
        [*second, 0, 0, 0, 0, 0, 1, 0, 0],
        [*second, 0, 0, 0, 0, 1, 0, 1, 0],
        [*second, 0, 0, 0, 0, 0, 1, 0, 1],
    ]


# --- bad input ------------------------------------------------------------------------


def test_bad_input_of_the_command_line(target, text, tmp_path):
    """From a text to drafts, and what is refused in one line."""
    out, bundle = tmp_path / "out", tmp_path / "bundle"
    command = ("train", "ppd", target, "--data", text, "-o", out)
    size = ("--batch-size", "2", "--sequence-length", "32")
    refused = run_jetdraft(*command, "--insertions", "0", *size)
    assert_refused(refused, "insertions 0 is out of range; give 1 to 4096")
    assert not out.exists()
    trained = run_jetdraft(*command, "--steps", "2", *size)
    assert trained.exit_code == 0, trained.output
    assert "training 192 weights of 3 prompt tokens, 0." in trained.stderr
    again = run_jetdraft("train", "ppd", out, "--data", text, "-o", tmp_path / "more")
    assert_refused(again, "already has streams or prompt tokens")
    _assert_exports_refused(out, bundle)
    sizes = ("--capacity", 128, "--max-width", 32, "--fast")
    exported = run_jetdraft("export", out, "-o", bundle, *sizes)
    assert exported.exit_code == 0, exported.output
    shown = run_jetdraft("check", "--no-run", bundle).stdout
    assert "prompts       3 with 1 embeddings each" in shown


def test_forecasts_from_the_command_line(target, text, tmp_path):
    out, bundle = tmp_path / "out", tmp_path / "bundle"
    command = ("train", "forecast", target, "--data", text, "-o", out)
    size = ("--batch-size", "2", "--sequence-length", "32", "--steps", "2")
    refused = run_jetdraft(*command, "--prefix", "0", *size)
    assert_refused(refused, "prefix 0 is out of range; give 1 to 1024")
    trained = run_jetdraft(*command, "--prefix", "3", *size)
    assert trained.exit_code == 0, trained.output
    assert "training 832 weights of 4 forecasts" in trained.stderr
    tensors = load_file(out / "streams.safetensors")
    for changed in (
        {"prompts.embeddings": tensors["prompts.embeddings"]},
        {**tensors, "prompts.keys": torch.zeros(3, 2, 3, 8)},
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
    other = save_checkpoint(out.parent / "other", llama_config(), seed=9)
    model.write_bytes((other / "model.safetensors").read_bytes())
    refused = run_jetdraft("export", out, "-o", bundle)
    assert_refused(refused, "trained for other weights")
    model.write_bytes(own)
    assert not bundle.exists()


def test_a_target_with_windows_is_refused(text, tmp_path):
    folder = save_checkpoint(
        tmp_path / "windows", MistralConfig(**SIZES, sliding_window=16)
    )
    with pytest.raises(UnsupportedModelError, match="windows"):
        train(str(folder), tmp_path / "out", text)
