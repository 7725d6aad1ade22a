"""Weights that stay as they are stored."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.step import Step, kv_shapes
from jetdraft.export.tracer import trace
from tests.exports import exported
from tests.tiny import SIZES, llama_config, save_checkpoint

IDS = torch.arange(30)[None]


@pytest.fixture
def half(tmp_path):
    """A checkpoint of one layer whose file holds halves."""
    folder = save_checkpoint(tmp_path / "half", llama_config(num_hidden_layers=1))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.half().save_pretrained(folder)
    return folder


def logits(model):
    with torch.no_grad():
        model.set_attn_implementation("eager")
        return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("large", [0, 1 << 28])
def test_halves_are_computed_with_in_single_precision(half, large, monkeypatch):
    monkeypatch.setattr("jetdraft.checkpoints.parameters.LARGE_TABLE", large)
    model = Checkpoint.load(str(half), torch.float32).model
    whole = transformers.AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    assert torch.equal(logits(model), logits(whole))
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_they_are_halves_again_when_a_pass_fails(half):
    model = Checkpoint.load(str(half), torch.float32).model
    with pytest.raises(IndexError):
        model(torch.tensor([[1 << 20]]))
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert torch.isfinite(logits(model)).all()


def test_what_a_model_computes_for_itself_is_not_rounded(tmp_path):
    """Gemma multiplies its embeddings with the root of their size."""
    config = transformers.Gemma3TextConfig(**{**SIZES, "hidden_size": 72}, head_dim=16)
    folder = save_checkpoint(tmp_path / "gemma", config, tokenizer=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.bfloat16().save_pretrained(folder)
    found = Checkpoint.load(str(folder), torch.float32).model
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    assert torch.equal(logits(found), logits(whole))
    rounded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert not torch.equal(logits(rounded.float()), logits(whole)), "it would matter"


def test_a_traced_graph_holds_no_copy_of_a_matrix(half):
    checkpoint = Checkpoint.load(str(half), torch.float32)
    shapes = kv_shapes(checkpoint.model)
    # As the next test has it, which then needs no trace.
    contract = StepContract(288, 64, 32, "float32", shapes, spare_slots=1)
    graph = trace(Step(checkpoint.model, contract), checkpoint.weight_names()).graph
    matrices = [
        value.const_value
        for value in graph.initializers.values()
        if value.const_value is not None and len(value.const_value.shape) == 2
    ]
    assert len(matrices) == 1 + 7
    assert all(isinstance(each, ir.LazyTensor) for each in matrices)


def test_a_bundle_of_halves_is_that_of_the_same_numbers_in_single(half, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(half, dtype="float32")
    model.save_pretrained(tmp_path / "single")
    for name in ("half", "single"):
        exported(tmp_path / name, tmp_path / f"{name}-bundle", "int4", max_width=32)
    one, other = (
        np.fromfile(tmp_path / f"{name}-bundle" / "target.onnx.data", np.uint8)
        for name in ("half", "single")
    )
    np.testing.assert_array_equal(one, other)
