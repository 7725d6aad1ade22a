"""Buffers that are longer than the texts that a model was trained on."""

import warnings

import pytest
import transformers

from jetdraft.export import graphs
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.seams import warn_of_length
from jetdraft.recipe import Recipe
from tests.tiny import SIZES, llama_config, save_checkpoint

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}


def model(config):
    return transformers.AutoModelForCausalLM.from_config(config)


def test_an_export_warns_of_rows_that_no_training_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "trace", None)  # it warns before it traces
    config = llama_config(num_hidden_layers=1, max_position_embeddings=48)
    save_checkpoint(tmp_path / "checkpoint", config)
    options = ExportOptions(Recipe("none"), capacity=64, max_width=16)
    said = "LlamaForCausalLM was trained on texts of 48 tokens.* hold 64.*--capacity 48"
    with pytest.warns(UserWarning, match=said), pytest.raises(TypeError):
        export(str(tmp_path / "checkpoint"), tmp_path / "bundle", options=options)


def test_frequencies_of_each_kind_of_layer_count():
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 2},
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": LOCAL, "full_attention": LOCAL},
    )
    with pytest.warns(UserWarning, match="texts of 512 tokens"):
        warn_of_length(model(config), 513)


@pytest.mark.parametrize(
    ("config", "capacity"),
    [
        (llama_config(), 512),
        (llama_config(rope_parameters=YARN), 2048),
        (transformers.BloomConfig(vocab_size=288, hidden_size=64, n_head=4), 4096),
    ],
    ids=["short", "scaled", "no positions"],
)
def test_nothing_is_said_of_others(config, capacity):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_length(model(config), capacity)
