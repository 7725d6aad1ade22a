"""What published checkpoints have and tiny ones lack, each in a tiny checkpoint."""

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.model_reader import check_exportable
from jetdraft.export.exporter import ExportOptions
from jetdraft.recipe import Recipe
from tests import same_text, tiny
from tests.checkpoints.heads.test_mtp import edit
from tests.programs import python

INT8 = Recipe("int8", 32)
LARGE_VOCABULARY = 151_936
EXPORT = """
import sys
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
options = ExportOptions(Recipe("int8", 32), capacity=128, max_width=16)
export(sys.argv[1], sys.argv[2], options=options)
# The peak since this program began; ru_maxrss includes the process that forked.
lines = dict(line.split(":") for line in open("/proc/self/status"))
print(int(lines["VmHWM"].split()[0]) * 1024)
"""


def options(**more) -> ExportOptions:
    return ExportOptions(INT8, capacity=64, max_width=16, **more)


@pytest.fixture(scope="module")
def settled(tmp_path_factory) -> jetdraft.Model:
    folder = tmp_path_factory.mktemp("settled")
    tiny.save_checkpoint(folder / "checkpoint", tiny.drafter_config())
    transformers.GenerationConfig(
        eos_token_id=[5, 9], do_sample=True, temperature=0.7, top_p=0.8, top_k=20
    ).save_pretrained(folder / "checkpoint")
    with pytest.warns(UserWarning, match="passed over: .* eos_token <.endoftext.>"):
        return tiny.exported_model(folder / "checkpoint", folder / "bundle", "int8")


def test_generation_config_decides_ends_and_sampling(settled):
    """Its ends go before the ends of config.json, which has 0 alone."""
    assert settled.bundle.eos_token_ids == (5, 9)
    assert settled.bundle.generation == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_a_language_model_is_read_alone(name, tmp_path):
    config, level = tiny.SHARING[name](), ("model.", "model.language_model.", 1)
    tiny.save_checkpoint(tmp_path, config, tokenizer=False)
    alone = Checkpoint.load(str(tmp_path), torch.float32).model.parameters()
    tower = {"model.vision_tower.encoder.layers.99.weight": torch.ones(2)}
    edit(tmp_path, lambda own: {n.replace(*level): t for n, t in own.items()} | tower)
    whole = {"model_type": name, "text_config": config.to_dict(), "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    check_exportable(str(tmp_path))
    found = Checkpoint.load(str(tmp_path), torch.float32).model.parameters()
    assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))


@pytest.mark.parametrize("end", [5, 9])
@pytest.mark.parametrize("method", ["none", "lookup"])
def test_any_of_several_ends_stops_a_text(settled, end, method):
    how = {"logit_bias": {end: 100.0}, "max_new_tokens": 8, "method": method}
    ended = settled.generate("the self", **how)
    assert ended.token_ids == [end]
    assert ended.stats.finish_reason == "stop"
    going_on = settled.generate("the self", logit_bias={0: 100.0}, max_new_tokens=8)
    assert going_on.token_ids == [0] * 8


def test_a_character_split_over_tokens_comes_whole(settled):
    pytest.importorskip("llguidance")
    text = "naïve 日本 🚀"
    stream = list(settled.stream("the", regex=text, max_new_tokens=40))
    pieces = [piece.text for piece in stream]
    # The text ends with an end of this checkpoint: a letter, which is not shown.
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(len(piece.token_ids) for piece in stream) == len(text.encode()) + 1


def test_shards_are_read_as_one_and_a_missing_shard_is_one_line(tmp_path):
    tiny.save_checkpoint(tmp_path / "whole", tiny.drafter_config())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    tiny.save_tokenizer(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    weights = [
        tiny.exported(tmp_path / name, tmp_path / f"{name}-bundle", "int8")
        for name in ("whole", "shards")
    ]
    first, second = (
        (bundle.path / f"{bundle.target.file}.data").read_bytes() for bundle in weights
    )
    assert first == second
    sorted((tmp_path / "shards").glob("*.safetensors"))[1].unlink()
    tiny.refused(jetdraft.JetdraftError, "shards", tmp_path / "shards", "int8")


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_in_parts_and_integers_in_a_file_give_the_same_bytes(
    tied, tmp_path, monkeypatch
):
    config = tiny.drafter_config(tie_word_embeddings=tied)
    source = tiny.save_checkpoint(tmp_path / "source", config)

    def written(name):
        bundle = tiny.exported(source, tmp_path / name, "q4_0", max_width=16)
        return (bundle.path / f"{bundle.target.file}.data").read_bytes()

    whole = written("whole")
    monkeypatch.setattr("jetdraft.quant.weights.NUMBERS_AT_ONCE", 1000)
    monkeypatch.setattr("jetdraft.quant.edits.SPILLED_BYTES", 1)
    assert written("parts") == whole


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> tuple[Path, jetdraft.Model]:
    folder = tmp_path_factory.mktemp("wide")
    tiny.save_checkpoint(
        folder / "checkpoint", tiny.drafter_config(vocab_size=LARGE_VOCABULARY)
    )
    model = tiny.exported_model(folder / "checkpoint", folder / "bundle", "int8")
    return folder / "checkpoint", model


def test_a_large_tied_head_is_stored_once(wide):
    checkpoint, model = wide
    bundle = model.bundle
    graph = ir.load(bundle.path / bundle.target.file).graph
    (gather,) = [n for n in graph if n.op_type == "GatherBlockQuantized"]
    head = [n for n in graph if n.op_type == "MatMulNBits"][-1]
    assert gather.inputs[0].name == head.inputs[1].name
    size = (bundle.path / f"{bundle.target.file}.data").stat().st_size
    # int8 and one scale per 32 weights, which the two operators read in two shapes.
    assert size < 1.3 * LARGE_VOCABULARY * (32 + 2 * 4)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = [3, 70_001, 151_935, 12]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, -1].numpy()
    logprob = model.generate(token_ids=ids, logprobs=5, max_new_tokens=1)
    assert logprob.token_ids == [int(expected.argmax())]
    total = np.log(np.exp(expected.astype(np.float64) - expected.max()).sum())
    assert logprob.logprobs[0].logprob == pytest.approx(-total, abs=0.05)


def test_a_large_vocabulary_is_drafted_exactly(wide):
    how = {"token_ids": [3, 70_001, 9, 3, 70_001], "repetition_penalty": 1.1}
    for drafted in same_text(wide[1], ["lookup", "auto"], max_new_tokens=20, **how):
        assert max(drafted.token_ids) > 1000, "the tail was never chosen"


def test_an_export_needs_little_more_than_a_shard(tmp_path):
    config = tiny.drafter_config(
        hidden_size=1024, intermediate_size=16_000, num_attention_heads=8
    )
    folder = tmp_path / "checkpoint"
    tiny.save_checkpoint(folder, config, tokenizer=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size="70MB")
    tiny.save_tokenizer(folder)
    shards = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert len(shards) > 3
    assert sum(shards) > 200e6
    shown = python(EXPORT, folder, tmp_path / "bundle")
    assert int(shown.splitlines()[-1]) < 1.5 * max(shards) + 2e9
