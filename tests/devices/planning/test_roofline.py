import dataclasses
import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from jetdraft.devices.planning.cost_model import Dimensions, LoadedDecoder
from jetdraft.errors import CheckpointError, UnsupportedModelError
from jetdraft.recipe import Recipe
from tests.tiny import SIZES

LLAMA = {**SIZES, "model_type": "llama", "vocab_size": 128}
QWEN = {
    **LLAMA, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 32,
    "attn_output_gate": True, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "full_attention_interval": 4,
}  # fmt: skip

LFM2 = {
    **LLAMA, "model_type": "lfm2", "tie_embedding": True, "block_multiple_of": 32,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": True,
}  # fmt: skip


def counted(config):
    """The weights of the matrices in transformers' model of a config."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    matrices = [p for p in model.parameters() if p.ndim == 2 and min(p.shape) > 8]
    return sum(matrix.numel() for matrix in matrices)


@pytest.mark.parametrize(
    "config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, QWEN, LFM2]
)
def test_weights_are_those_of_the_model(config):
    assert Dimensions.of(config).weights == counted(config)


def test_the_values_that_a_token_adds_to_the_caches():
    sizes = Dimensions.of(LLAMA)
    assert sizes.kv_values == 3 * 2 * 2 * 16
    hybrid = Dimensions.of(QWEN)
    assert hybrid.kv_values == 1 * 2 * 2 * 32
    assert hybrid.state_values == 3 * (4 * 16 * 16 + 3 * (2 * 32 + 64))
    assert Dimensions.of(LFM2).kv_values == 1 * 2 * 2 * 16
    assert Dimensions.of(LFM2).state_values == 2 * 2 * 64


def test_mamba_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="Mamba layers"):
        Dimensions.of({**LLAMA, "mamba_d_state": 16})
    attends = {**LLAMA, "mamba_d_state": 16, "layer_types": ["attention"] * 3}
    assert Dimensions.of(attends) == Dimensions.of(LLAMA)


def test_a_vision_model_is_its_text_part():
    whole = {"text_config": LLAMA, "vision_config": {"hidden_size": 999}}
    assert Dimensions.of(whole) == Dimensions.of(LLAMA)


@pytest.mark.parametrize(
    ("config", "change", "size"),
    [(LLAMA, {"tied": True}, 2 * 128 * 64), (LFM2, {"state_values": 0}, 3 * 4 * 256)],
)
def test_memory_counts_a_tied_head_once_and_states_thrice(config, change, size):
    """States before a pass, after it, and at the end of the prompt."""
    sizes, recipe = Dimensions.of(config), Recipe.parse("int4-b64-headnone")
    changed = dataclasses.replace(sizes, **change)
    more, less = (LoadedDecoder(n, recipe).memory_mb(10) for n in (sizes, changed))
    assert more - less == pytest.approx(size / 1e6)


@pytest.mark.parametrize(
    ("name", "layers", "head"),
    [
        ("none", 2, 2),
        ("int4", 0.5 + 2 / 128, 0.5 + 2 / 128),
        ("int4-b32-head8", 0.5 + 2 / 32, 1 + 2 / 32),
        ("int4-b32-headnone", 0.5 + 2 / 32, 2),
        ("int8-k_quant-b64", 1 + 3 / 64, 1 + 3 / 64),
        ("int4-b32-up0.2", 0.5 + 2 / 32 + 0.5 * 2 / 3, 0.5 + 2 / 32),
    ],
)
def test_bytes_of_a_recipe(name, layers, head):
    """The model has three layers; scales are halves."""
    load = LoadedDecoder(Dimensions.of(LLAMA), Recipe.parse(name))
    assert load.weight_bytes == pytest.approx(layers)
    assert load.head_bytes == pytest.approx(head)
    assert load.kv_bytes == 2
    assert LoadedDecoder(load.sizes, Recipe.parse(f"{name}-kv8")).kv_bytes == 1


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "is not JSON"),
        ("[]", "does not describe a decoder"),
        ('{"is_encoder_decoder": true}', "a plan predicts decoders only"),
        ("{}", "does not describe a decoder"),
        ('{"text_config": 5}', "does not describe a decoder"),
        (json.dumps({**LLAMA, "hidden_size": "x"}), "hidden_size is 'x'"),
    ],
)
def test_files_that_are_not_configs(tmp_path, content, match):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=match):
        Dimensions.read(tmp_path)


def test_one_expert_is_no_mixture():
    assert Dimensions.of({**LLAMA, "num_experts": 1})
    assert Dimensions.of({**LLAMA, "num_experts": 8, "is_moe": False})


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(UnsupportedModelError, match="dense model"):
        Dimensions.of({**LLAMA, "num_experts": 8})
    with pytest.raises(UnsupportedModelError, match="mixture of experts"):
        Dimensions.of({**LLAMA, "n_routed_experts": 64})
