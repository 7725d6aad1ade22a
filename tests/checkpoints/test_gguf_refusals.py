"""GGUF files that cannot be exported: one line, exit code 2, and nothing written."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.errors import CheckpointError
from tests.cli.running import assert_refused
from tests.cli.running import jetdraft as command
from tests.ggufs import adding, one, write_gguf
from tests.tiny import drafter_config, llama_config, save_checkpoint
from tools.recipes.__main__ import main as recipes

SMALL = llama_config(num_hidden_layers=1)
Q = "model.layers.0.self_attn.q_proj.weight"


def assert_no_bundle(folder, *arguments, said):
    """One line, exit code 2, and nothing in the folder but what was there."""
    before = sorted(folder.iterdir())
    assert_refused(command("export", *arguments, "-o", folder / "bundle"), *said)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.97, 0.9999])
def test_a_file_that_is_cut_off(tmp_path, share):
    file = write_gguf(tmp_path / "model.gguf", SMALL).path
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    assert_no_bundle(tmp_path, file, said=["is cut off", "fetch it again"])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty; fetch it again"),
        (b"def f(x):\n", "is not a GGUF file, it begins with b'def '"),
        (b"PK\x03\x04" + bytes(999), "give a GGUF file, or the folder of a checkpoint"),
    ],
)
def test_a_file_that_never_was_one(tmp_path, data, said):
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    assert_no_bundle(tmp_path, file, said=[said])


def add_a_weight(writer):
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))


def with_field(name, value):
    """Changes the value of a field that the file has."""
    return {"change": lambda w: setattr(w.kv_data[0][name], "value", value)}


def of(family, name=None):
    """Calls a file one of that family, and gives it a field of the family."""

    def change(writer):
        with_field("general.architecture", family)["change"](writer)
        adding({f"{family}.{name}": 4} if name else {})(writer)

    return {"change": change}


def repeat_a_token(writer):
    tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
    tokens.append(tokens[20])
    writer.kv_data[0]["tokenizer.ggml.token_type"].value.append(1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (of("rwkv6"), "is a 'rwkv6' model"),
        (with_field("tokenizer.ggml.merges", ["x yz"]), "the tokenizer of"),
        (with_field("tokenizer.ggml.model", "bert"), "a tokenizer of the kind 'bert'"),
        (with_field("tokenizer.ggml.token_type", [1, 1]), "2 types of tokens"),
        (with_field("llama.block_count", 10**6), "for 1000000 layers"),
        ({"change": repeat_a_token}, "the same token twice"),
        ({"rule": "klingon"}, "by the rule 'klingon'"),
        ({"change": add_a_weight}, "the weight 'blk.0.attn_q.bias'"),
        ({"kinds": lambda n: None if n == Q else Type.Q8_0}, "lacks the weights"),
        ({"change": adding({"split.count": 3})}, "one of 3 parts"),
        (of("qwen3moe", "expert_count"), "is a mixture of experts (expert"),
        (of("deepseek2", "attention.kv_lora_rank"), "latent attention"),
        (of("lfm2", "shortconv.l_cache"), "has convolution layers (short"),
        (of("rwkv6", "wkv.head_size"), "has recurrent layers (wkv"),
        (of("falcon-h1", "ssm.state_size"), "has recurrent layers (ssm"),
        (of("gemma3n", "attention.shared_kv_layers"), "share keys and val"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, changes, said):
    file = write_gguf(tmp_path / "model.gguf", SMALL, **changes).path
    assert_no_bundle(tmp_path, file, said=[said])


def test_weights_that_are_not_finite(tmp_path):
    written = write_gguf(tmp_path / "model.gguf", SMALL, one(Type.Q8_0))
    data = bytearray(written.path.read_bytes())
    stored = written.data["model.layers.0.mlp.up_proj.weight"].tobytes()
    place = data.index(stored)
    data[place : place + 2] = np.array([np.inf], "<f2").tobytes()
    written.path.write_bytes(data)
    assert_no_bundle(tmp_path, written.path, said=["not finite"])


def test_paths_that_are_no_file(tmp_path):
    said = ["no checkpoint at", "a GGUF file"]
    assert_no_bundle(tmp_path, tmp_path / "model.gguf", said=said)
    assert_no_bundle(tmp_path, "org/model.gguf", said=said)
    file = write_gguf(tmp_path / "model.gguf", SMALL).path
    assert_no_bundle(tmp_path, tmp_path, said=[f"give the file {file}"])


def test_a_drafter_with_another_tokenizer(tmp_path):
    target = write_gguf(tmp_path / "target.gguf", SMALL).path
    words = ("while", "yield", "lambda", "class", "async", "await", "raise")
    drafter = write_gguf(tmp_path / "drafter.gguf", SMALL, words=words).path
    said = ["has another tokenizer than"]
    assert_no_bundle(tmp_path, target, "--drafter", drafter, said=said)
    # A folder with the same tokenizer in another form is no other tokenizer.
    folder = save_checkpoint(tmp_path / "folder", drafter_config())
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["pre_tokenizer"]["trim_offsets"] = False
    fields["model"]["merges"] = [" ".join(m) for m in fields["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    options = ["--drafter", folder, "--fast", "--capacity", 64, "--max-width", 32]
    result = command("export", target, *options, "-o", tmp_path / "bundle")
    assert result.exit_code == 0, result.output


def test_verbs_that_need_a_folder_say_so(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", SMALL).path
    assert_refused(command("plan", file, "--device", "orin-nx-16gb"), "a GGUF file")
    said = ["leave --device out"]
    assert_no_bundle(tmp_path, file, "--device", "orin-nx-16gb", said=said)
    assert_refused(command(file, command=recipes), "is quantized already")
    text = tmp_path / "text.txt"
    text.write_text("def f(): pass\n" * 200)
    arguments = ["train", "stream", file, "--data", text, "-o", tmp_path / "out"]
    assert_refused(command(*arguments), "streams are trained for a folder")


def test_a_type_that_gguf_cannot_read(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "model.gguf", SMALL, one(Type.F16)).path

    def refuse(data, kind):
        raise NotImplementedError

    monkeypatch.setattr("jetdraft.checkpoints.gguf.dequantize", refuse)
    with pytest.raises(CheckpointError, match="of the type F16"):
        Checkpoint.load(str(file), torch.float32)
