"""What cannot be read is refused in one line, which names it."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import VD, H, write
from tests.tiny import VOCAB_SIZE


def refusal(target, source) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_head(source, target, torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    return message


UNKNOWN = {
    "flat": (layouts.eagle3(residual_scale=2.0), "residual_scale=2.0"),
    "sliding": (layouts.eagle3(sliding_window=64), "sliding_window=64"),
    "layer types": (
        layouts.eagle3(layer_types=["sliding_attention"]),
        "layer_types=['sliding_attention']",
    ),
    "nested": (
        layouts.speculators(
            transformer_layer_config=layouts.layer_config(logit_scale=0.5)
        ),
        "logit_scale=0.5",
    ),
    "speculators": (layouts.speculators(mask_token_id=3), "mask_token_id=3"),
    "eagle_config": (
        layouts.eagle3(eagle_config={"parallel_draft_step": 2}),
        "parallel_draft_step",
    ),
    "without taps": (
        layouts.eagle3(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state=False",
    ),
    "kind": (layouts.speculators(speculators_model_type="peagle"), "'peagle'"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_key_is_named(target, tmp_path, case):
    """A flag that is not known could change what every row computes."""
    (config, tensors), name = UNKNOWN[case]
    assert name in refusal(target, write(tmp_path, config, tensors))


def test_medusa_and_hydra_refuse_unknown_keys(target, tmp_path):
    """Kinds of Hydra with more than an MLP are not computed."""
    config, tensors = layouts.medusa()
    source = write(tmp_path / "medusa", config | {"medusa_choices": 3}, tensors)
    assert "medusa_choices=3" in refusal(target, source)
    config, tensors = layouts.hydra()
    config["hydra_head_arch"] = "prefix-mlp"
    source = write(tmp_path / "hydra", config, tensors)
    assert "hydra_head_arch='prefix-mlp'" in refusal(target, source)


def other(changes=None, drop=(), replace=None, make=layouts.eagle3, **shape):
    config, tensors = make(**shape)
    tensors = {n: t for n, t in tensors.items() if n not in drop}
    return config | (changes or {}), tensors | (replace or {})


IDS = torch.arange(VD)
WRONG = {
    "fc of one tap": (
        other(replace={"fc.weight": torch.zeros(H, H)}),
        f"the fc of .* reads {H} numbers, but 3 states of this target have {3 * H}",
    ),
    "fc of EAGLE-1": (
        other(make=layouts.eagle1, replace={"fc.weight": torch.zeros(H, 3 * H)}),
        f"reads {3 * H} numbers",
    ),
    "no fc": (other(drop=["fc.weight"]), "no fc.weight"),
    "taps beyond the target": (
        other({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}),
        r"\[2, 18, 33\], but its 7 layers",
    ),
    "vocabulary": (other({"vocab_size": 32000}), "vocabulary of 32000 tokens"),
    "hidden size": (other({"hidden_size": 96}), "states of 96 numbers"),
    "target's size": (other({"target_hidden_size": 8}), "states of 8 numbers"),
    "no size": (other({"hidden_size": None}), "hidden_size=None"),
    "missing": (
        other(drop=["midlayer.self_attn.k_proj.weight"]),
        r"lacks weight 'stack.layers.0.self_attn.k_proj.weight'",
    ),
    "missing norm": (other(drop=["norm.weight"]), r"lacks weight 'norm.weight'"),
    "extra": (
        other(replace={"midlayer.self_attn.q_proj.bias": torch.zeros(H)}),
        r"unknown weight 'stack.layers.0.self_attn.q_proj.bias'",
    ),
    "shape": (
        other({"intermediate_size": 128}),
        r"mlp.down_proj.weight of .* is \[64, 96\].* need \[64, 128\]",
    ),
    "map out of range": (
        other(drop=["t2d"], replace={"d2t": torch.full((VD,), VOCAB_SIZE)}),
        "does not map 100 rows to different ids below 288",
    ),
    "map negative": (
        other(drop=["t2d"], replace={"d2t": -IDS - 1}),
        "does not map 100 rows",
    ),
    "map of ids, not offsets": (
        other(drop=["t2d"], replace={"d2t": torch.arange(VD) + 188}),
        "does not map 100 rows",
    ),
    "map of another length": (other({"draft_vocab_size": 50}), "does not map 50 rows"),
    "map never set": (
        other(
            replace={
                "d2t": torch.zeros(VD, dtype=torch.long),
                "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool),
            }
        ),
        "perhaps never set",
    ),
    "no map": (other(drop=["d2t"]), "has no d2t"),
    "no head": (
        ({"model_type": "llama"}, {"model.layers.0.mlp.up_proj.weight": torch.ones(1)}),
        "no head's; jetdraft reads EAGLE-1",
    ),
    "narrow head without an embedding": (
        other({"hidden_size": 32, "target_hidden_size": H}),
        "no embed_tokens.weight|reads 192|lacks|is \\[",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit(target, tmp_path, case):
    """One clear line each."""
    (config, tensors), message = WRONG[case]
    assert re.search(message, refusal(target, write(tmp_path, config, tensors)))


def test_files_that_are_no_files_of_tensors(target, tmp_path):
    """No code of a pickle is run."""
    config, tensors = layouts.eagle3()
    assert "no head at" in refusal(target, str(tmp_path / "nothing here" / "x" / "y"))
    source = write(tmp_path / "code", config, {})
    (tmp_path / "code" / "model.safetensors").unlink()
    assert "no weights" in refusal(target, source)

    class Code:
        def __reduce__(self):
            return (print, ("code ran",))

    (tmp_path / "code" / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))
    message = refusal(target, source)
    assert "damaged" in message or "code" in message
    torch.save({"a": Code()}, tmp_path / "code" / "pytorch_model.bin")
    assert "holds code" in refusal(target, source)
    (tmp_path / "code" / "config.json").write_text("[]")
    assert "is no object" in refusal(target, source)
    (tmp_path / "code" / "config.json").write_text("{")
    assert "no readable config.json" in refusal(target, source)
    source = write(tmp_path / "cut", config, tensors)
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "damaged" in refusal(target, source)
