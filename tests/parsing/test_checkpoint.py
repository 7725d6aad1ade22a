"""Checkpoints of strangers: their code does not run, and damage is one line."""

import json
import os
import pickle
import shutil

import pytest
import torch

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.refusals import LAYER_COUNT_FIELDS
from jetdraft.errors import CheckpointError
from tests.cli.running import jetdraft
from tests.tiny import drafter_config, save_checkpoint

EVIL = """
import pathlib
pathlib.Path({mark!r}).write_text("ran")
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class EvilConfig(PretrainedConfig):
    model_type = "evil"
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "whole"
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    config = drafter_config(**sizes, eos_token_id=2)
    return save_checkpoint(folder, config, tokenizer=False)


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "checkpoint")


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def load(folder):
    return Checkpoint.load(str(folder), torch.float32)


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_a_checkpoint_s_code_does_not_run_whatever_the_terminal_says(
    folder, tmp_path, part
):
    mark = tmp_path / "mark"
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    if part == "config":
        edit(folder, model_type="evil", auto_map={"AutoConfig": "evil.EvilConfig"})
    else:
        classes = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
        tokenizer = {"tokenizer_class": "EvilTokenizer", "auto_map": classes}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    command = ("export", folder, "-o", tmp_path / "bundle", "--quantize", "none")
    ended = jetdraft(*command, stdin="y\n" * 50)
    assert not mark.exists()
    assert ended.exit_code == 2, ended.output
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in ended.stderr


class Call:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02garbage", b"PK\x03\x04", pickle.dumps(Call())]
)
def test_a_damaged_pickle_is_one_line(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot load|are damaged") as refused:
        load(folder)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "16"}, {"num_attention_heads": None},
        {"num_hidden_layers": [1]}, {"vocab_size": {}}, {"rms_norm_eps": "small"},
        {"rope_parameters": 5}, {"model_type": 5}, {"quantization_config": 5},
        {"eos_token_id": "x"}, {"eos_token_id": [[1]]}, {"architectures": 5},
    ],
)  # fmt: skip
def test_a_config_of_wrong_types_is_one_line(folder, changes):
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit(folder, **changes)
    try:
        load(folder)
    except CheckpointError as error:
        assert str(error).isprintable()  # noqa: PT017
    else:
        assert "architectures" in changes, "transformers does not need it"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 1_000_000}, "has num_hidden_layers 1000000"),
        ({"num_hidden_layers": 10**15}, "at most 10000 layers"),
        ({"num_hidden_layers": 10_000}, "a larger model than its files hold"),
        ({"vocab_size": 10**9}, "a larger model than its files hold"),
        ({"hidden_size": 10**6}, "a larger model than its files hold"),
        ({"intermediate_size": 10**12}, "a larger model than its files hold"),
        ({"head_dim": 10**10}, "a larger model than its files hold"),
        *(
            ({"text_config": {name: 10**9}}, f"has {name} 1000000000, and at most")
            for name in sorted(LAYER_COUNT_FIELDS)
        ),
    ],
)
def test_what_a_config_asks_for_beyond_its_files_is_not_built(folder, changes, said):
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=said):
        load(folder)


def test_a_number_that_counts_no_layers_is_not_bounded(folder):
    """As Gemma 3n and Gemma 4 have it."""
    edit(folder, vocab_size_per_layer_input=262_144, hidden_size_per_layer_input=10**5)
    assert load(folder).vocab_size == 32


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "more.safetensors")
    with pytest.raises(CheckpointError, match="is a pipe or a device"):
        load(folder)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "a\ud800b"])
def test_a_name_that_no_checkpoint_can_have_is_one_line(name):
    with pytest.raises(CheckpointError) as refused:
        load(name)
    assert str(refused.value).isprintable()


def test_an_end_of_text_that_cannot_occur_is_left_out(folder):
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit(folder, eos_token_id=[-1, 2, 99])
    assert load(folder).eos_token_ids == (2,)
