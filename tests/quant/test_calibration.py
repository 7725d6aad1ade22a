import numpy as np
import pytest
import torch

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streams import StreamSettings
from jetdraft.errors import DataError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.quant.calibration import Windows, second_moments
from jetdraft.recipe import Recipe
from tests.tiny import llama_config, save_checkpoint, save_streams

LAYER = [f"self_attn.{name}_proj" for name in "qkvo"]
LAYER += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
TEXT = "def f(self):\n    return self.x\n" * 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration") / "target"
    save_checkpoint(folder, llama_config())
    return Checkpoint.load(str(folder), torch.float32)


def windows(checkpoint, tmp_path, text=TEXT):
    (tmp_path / "text.txt").write_text(text)
    return Windows.of(tmp_path / "text.txt", checkpoint.tokenizer)


def test_a_text_becomes_equal_windows(checkpoint, tmp_path):
    found = windows(checkpoint, tmp_path).ids
    assert found.dtype == torch.int64
    assert found.shape[1] == 256
    short = windows(checkpoint, tmp_path, "def f(x)").ids
    assert len(short) == 1
    assert short.shape[1] > 2


@pytest.mark.parametrize(("text", "reason"), [("", "0 tokens"), ("d", "1 tokens")])
def test_a_text_without_tokens_is_refused(checkpoint, tmp_path, text, reason):
    with pytest.raises(DataError, match=reason):
        windows(checkpoint, tmp_path, text)


def test_a_text_that_cannot_be_read_is_refused(checkpoint, tmp_path):
    with pytest.raises(DataError, match="no data file"):
        Windows.of(tmp_path / "nothing", checkpoint.tokenizer)
    with pytest.raises(DataError, match="has no tokenizer"):
        Windows.of(tmp_path / "nothing", None)


def test_moments_are_those_of_the_inputs(checkpoint, tmp_path):
    """Of the first layer's projections: what the first norm gives."""
    model, text = checkpoint.model, windows(checkpoint, tmp_path)
    before = model.config._attn_implementation
    found = second_moments(model, text)
    assert model.config._attn_implementation == before
    linear = (n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    assert set(found) == {f"{name}.weight" for name in linear}
    layer = model.model.layers[0]
    with torch.no_grad():
        rows = layer.input_layernorm(model.model.embed_tokens(text.ids))
    rows = rows.reshape(-1, rows.shape[-1]).double()
    for name in ("q_proj", "k_proj", "v_proj"):
        moments = found[f"model.layers.0.self_attn.{name}.weight"]
        np.testing.assert_allclose(moments, (rows.T @ rows).numpy(), rtol=1e-4)
    for name, powers in second_moments(model, text, diagonal=True).items():
        np.testing.assert_allclose(powers, np.diagonal(found[name]), rtol=1e-4)
    own = {id(found[f"model.layers.0.{name}.weight"]) for name in LAYER}
    assert len(own) == 4, "q, k and v are fed the same, and so are gate and up"


def test_a_model_with_streams_is_calibrated_as_it_is_without(tmp_path):
    save_checkpoint(tmp_path / "c", llama_config(num_hidden_layers=2))
    settings = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
    save_streams(tmp_path / "c", settings)
    (tmp_path / "text.txt").write_text(TEXT)
    options = ExportOptions(
        Recipe.parse("int4-gptq-b32"), capacity=64, max_width=16,
        calibration=tmp_path / "text.txt",
    )  # fmt: skip
    export(str(tmp_path / "c"), tmp_path / "b", options=options)
    model = jetdraft.load(tmp_path / "b", threads=1)
    plain, drafted = (
        model.generate("def f", method=method, max_new_tokens=40).token_ids
        for method in ("none", "stream")
    )
    assert plain == drafted
