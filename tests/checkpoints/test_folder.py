"""What may be in the folder of a checkpoint, and the errors of its loaders."""

import json
from functools import partial

import pytest
import torch

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import first_line
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.errors import CheckpointError
from tests.checkpoints.heads import layouts

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(params=["head", "target"])
def read(request):
    load = partial(Checkpoint.load, dtype=torch.float32)
    return {"head": HeadFiles.read, "target": load}[request.param]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in two shards."""
    layouts.write(tmp_path, *layouts.eagle3(), "shards of model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    "place", ["../other/x.safetensors", "/etc/x", "a/../../x", "..\\x", "C:\\x"]
)
def test_a_shard_outside_the_folder(folder, read, place):
    """An index of strangers must not choose which files are read."""
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["fc.weight"] = place
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside the folder"):
        read(str(folder))


def test_a_missing_shard(folder, read):
    """The one that the index lists and the folder lacks."""
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard {SHARD}, which its"):
        read(str(folder))


def test_an_index_of_a_format_that_was_not_fetched(folder):
    """Many repositories have their weights twice."""
    index = {"weight_map": {"fc.weight": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "fc.weight" in HeadFiles.read(str(folder)).tensors


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_an_index_that_is_none(folder, read, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json cannot be read"):
        read(str(folder))


SENTENCE = "The checkpoint has model type `nonsense`, which is not known"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("one\ntwo", "one"),
        ("wrong:\n  two\nthree", "wrong: two"),
        (f"{SENTENCE}. It is new", f"{SENTENCE}. It is new"),
        (f"{SENTENCE}. {'This could be. ' * 20}", SENTENCE),
        ("", "ValueError"),
    ],
)
def test_of_a_long_line_the_first_sentence_is_left(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line
