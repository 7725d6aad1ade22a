"""Bounds of memory and types that a caller chooses without knowing it."""

import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from jetdraft.cli import main
from jetdraft.errors import OptionError
from jetdraft.runtime.conversation import Conversation
from jetdraft.runtime.passes.graph import MAX_WIDE_BINDINGS
from tests.cli.running import assert_refused

PROMPT = "The robot sees"


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint64, np.uint8])
def test_a_seed_may_be_one_of_numpy_s(toy_model, kind):
    options = {"temperature": 1.0, "max_new_tokens": 8}
    expected = toy_model.generate(PROMPT, seed=7, **options)
    result = toy_model.generate(PROMPT, seed=kind(7), **options)
    assert result.token_ids == expected.token_ids
    assert type(result.stats.seed) is int


def wide(graph):
    bindings = {**graph._bindings, **graph._wide_bindings}
    return [size for size in bindings if size.width > 16]


@pytest.mark.parametrize("method", ["draft", "cascade"])
def test_bindings_of_prompts_of_all_lengths_are_bounded(toy_model, method):
    ids = (toy_model.prompt(PROMPT * 40).tolist())[:200]
    drafter = toy_model.parts.drafter
    for length in range(2, 66):
        toy_model.forget()
        options = {"method": method, "num_draft_tokens": 3, "max_new_tokens": 2}
        toy_model.generate(token_ids=ids[:length], **options)
        assert len(wide(drafter)) <= MAX_WIDE_BINDINGS
        assert len(wide(toy_model.parts.target)) <= MAX_WIDE_BINDINGS
    assert {size.answers for size in wide(drafter)} == {1}, "logits of whole prompts"


def test_the_same_text_after_a_binding_was_dropped(toy_model):
    ids = (toy_model.prompt(PROMPT * 40).tolist())[:200]
    options = {"method": "draft", "num_draft_tokens": 3, "max_new_tokens": 8}
    plain = {"method": "none", "max_new_tokens": 8}
    for length in (40, *range(20, 64), 40):
        toy_model.forget()
        drafted = toy_model.generate(token_ids=ids[:length], **options)
        toy_model.forget()
        assert (
            drafted.token_ids
            == toy_model.generate(token_ids=ids[:length], **plain).token_ids
        )


@pytest.mark.parametrize("arguments", [["check", "--no-run"], ["generate", "-p", "x"]])
def test_a_full_device_as_output_is_one_line(toy_model, arguments):
    verb, *options = arguments
    command = [
        sys.executable,
        "-m",
        "jetdraft",
        verb,
        str(toy_model.bundle.path),
        *options,
    ]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1] == "error: the disk is full; free some space"
    assert "Traceback" not in ended.stderr
    assert "ignored" not in ended.stderr


def test_names_in_errors_cannot_steer_the_terminal(tmp_path):
    result = CliRunner().invoke(main, ["check", str(tmp_path / "a\x1b[2J\u202eb")])
    assert_refused(result, "a\\x1b[2J\\u202eb")


def test_nested_json_is_refused_everywhere(toy_model, tmp_path):
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000)
    with pytest.raises(OptionError, match="nested deeper"):
        Conversation(toy_model).load(file)
    assert_refused(
        CliRunner().invoke(main, ["plan", str(file), "--device", "orin-nano-4gb"]),
        "nested deeper",
    )
