from __future__ import annotations

import dataclasses
import json
import statistics

import pytest
from fit import fit, leave_one_out, read, runtime_mb
from transformers import AutoConfig, AutoModelForCausalLM

from jetdraft.devices.dimensions import Dimensions
from jetdraft.devices.roofline import BYTES, FITTED, RUNTIME_MB, Load
from jetdraft.errors import CheckpointError, OptionError, UnsupportedModelError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
QWEN = {
    **LLAMA,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 4,
}


def counted(config):
    """Weights of the matrices that transformers makes of a config."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    matrices = [p for p in model.parameters() if p.ndim == 2 and min(p.shape) > 8]
    return sum(matrix.numel() for matrix in matrices)


@pytest.mark.parametrize(
    "config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, QWEN]
)
def test_weights_are_those_of_the_model(config):
    assert Dimensions.of(config).weights == counted(config)


def test_what_a_token_leaves_behind():
    sizes = Dimensions.of(LLAMA)
    assert sizes.kv_values == 3 * 2 * 2 * 16
    hybrid = Dimensions.of(QWEN)
    assert hybrid.kv_values == 1 * 2 * 2 * 32
    assert hybrid.state_values == 3 * 4 * 16 * 16


def test_a_vision_model_is_its_text_part():
    whole = {"text_config": LLAMA, "vision_config": {"hidden_size": 999}}
    assert Dimensions.of(whole) == Dimensions.of(LLAMA)


def test_memory_counts_a_tied_head_once():
    sizes = Dimensions.of(LLAMA)
    tied = dataclasses.replace(sizes, tied=True)
    apart = Load.of(sizes, "int4").memory_mb(10) - Load.of(tied, "int4").memory_mb(10)
    assert apart == pytest.approx(sizes.head * BYTES["int4"] / 1e6)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "is no JSON"),
        ("[]", "does not describe a decoder"),
        ("{}", "does not describe a decoder"),
        ('{"text_config": 5}', "does not describe a decoder"),
        (json.dumps({**LLAMA, "hidden_size": "x"}), "hidden_size is 'x'"),
    ],
)
def test_configs_that_are_none(tmp_path, content, match):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=match):
        Dimensions.read(tmp_path)


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(UnsupportedModelError, match="dense model"):
        Dimensions.of({**LLAMA, "num_experts": 8})


def test_an_unknown_quantization():
    with pytest.raises(OptionError, match="'int3'; choose none, int8, int4"):
        Load.of(Dimensions.of(LLAMA), "int3")


def test_the_constants_are_those_that_fit_the_published_rows():
    rows, found = read()
    known = fit(rows)
    assert known.bandwidth == pytest.approx(FITTED.bandwidth, rel=0.01)
    assert known.pass_ms == pytest.approx(FITTED.pass_ms, rel=0.01)
    assert known.compute == pytest.approx(FITTED.compute, rel=0.01)
    assert runtime_mb(rows, found["capacity"]) == pytest.approx(RUNTIME_MB, rel=0.01)


def test_each_published_row_is_predicted_from_the_others():
    """Plain decoding within 15% (median) and 30% (worst), memory within 20%."""
    rows, found = read()
    errors = leave_one_out(rows, found["capacity"])
    speeds = [abs(error.speed) for error in errors]
    assert len(speeds) == len(rows) >= 20
    assert statistics.median(speeds) < 0.15
    assert max(speeds) < 0.30
    memory = [abs(error.memory) for error in errors if error.memory is not None]
    assert len(memory) == 20
    assert max(memory) < 0.20


def test_trees_of_sixty_rows_keep_what_was_published_of_them():
    """The share of tokens per pass that is left as a gain."""
    rows, found = read()
    for tree in found["trees"]:
        [row] = [
            r
            for r in rows
            if (r.device.name, r.model) == (tree["device"], tree["model"])
        ]
        kept = row.predict_ms(FITTED) / row.predict_ms(FITTED, 60)
        assert kept == pytest.approx(
            tree["speedup"] / tree["tokens_per_pass"], rel=0.27
        )
