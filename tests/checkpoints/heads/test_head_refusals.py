"""What cannot be read is refused in one line, which names it."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import pytest
import torch

from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_reader import check_head, load_head
from jetdraft.errors import CheckpointError
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import VD, H, write
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint


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
        r"lacks weight 'midlayer.self_attn.k_proj.weight'",
    ),
    "missing norm": (other(drop=["norm.weight"]), r"lacks weight 'norm.weight'"),
    "extra": (
        other(replace={"midlayer.self_attn.q_proj.bias": torch.zeros(H)}),
        r"unknown weight 'midlayer.self_attn.q_proj.bias'",
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
        "holds no head that jetdraft knows; it reads heads of EAGLE-1",
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


VALUES = {
    "negative rope": ({"rope_theta": -1}, "has rope_theta=-1"),
    "rope of zero": ({"rope_parameters": {"rope_theta": 0}}, "has rope_theta=0"),
    "factor": ({"rope_scaling": {"type": "linear", "factor": -2}}, "has factor=-2"),
    "norm of text": ({"rms_norm_eps": "NaN"}, "has rms_norm_eps='NaN'"),
    "negative norm": ({"rms_norm_eps": -1e-5}, "has rms_norm_eps=-1e-05"),
    "activation": ({"hidden_act": "swoosh"}, "has hidden_act='swoosh'; it needs an"),
}


@pytest.mark.parametrize("case", VALUES)
@pytest.mark.parametrize("make", [layouts.eagle1, layouts.eagle3])
def test_values_that_cannot_work(target, tmp_path, make, case):
    """They load, and then every row is NaN."""
    changes, message = VALUES[case]
    config, tensors = make()
    source = write(tmp_path, config | changes, tensors)
    assert f"the config of {source} {message}" in refusal(target, source)


def med(drop=(), replace=None):
    config, tensors = layouts.medusa()
    kept = {n: t for n, t in tensors.items() if n not in drop}
    return config, kept | (replace or {})


NAN, INTEGERS = torch.full((layouts.FF, H), torch.nan), torch.ones(layouts.FF, H).int()
UP = "midlayer.mlp.up_proj.weight"
NAMES = {
    "a NaN": (other(replace={UP: NAN}), f"{UP} of .* has a NaN"),
    "integers": (other(replace={UP: INTEGERS}), f"{UP} of .* is int32"),
    "lacks": (other(drop=[UP]), f"lacks weight '{UP}'"),
    "prefixed": (
        other(drop=[f"model.{UP}"], prefix="model.midlayer."),
        f"lacks weight 'model.{UP}'",
    ),
    "Medusa": (med(drop=["1.0.linear.bias"]), "lacks weight '1.0.linear.bias'"),
    "Medusa's shape": (
        med(replace={"2.1.weight": torch.ones(5, H)}),
        r"2.1.weight of .* is \[5, 64\]",
    ),
    "Medusa's NaN": (
        med(replace={"0.0.linear.bias": torch.full((H,), torch.inf)}),
        "0.0.linear.bias of .* an infinite",
    ),
    "a gap": (
        med(drop=["1.0.linear.weight", "1.0.linear.bias", "1.1.weight"]),
        "has the heads 0, 2, which",
    ),
    "Hydra": (
        other(make=layouts.hydra, drop=["hydra_mlp.1.0.res_connection.weight"]),
        "lacks weight 'hydra_mlp.1.0.res_connection.weight'",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_tensors_have_the_names_of_the_file(target, tmp_path, case):
    """Not those of the module that they become."""
    (config, tensors), message = NAMES[case]
    assert re.search(message, refusal(target, write(tmp_path, config, tensors)))


def test_a_whole_model_is_no_head(target, tmp_path):
    """Neither the target itself without an MTP module, nor another model."""
    assert "has no MTP module" in refusal(target, target.source)
    config, other_model = llama_config(), tmp_path / "model"
    save_checkpoint(other_model, config, tokenizer=False)
    message = refusal(target, str(other_model))
    assert "is a whole model, not a head; give it as --drafter" in message


def test_modules_of_speculators_name_what_is_read(target, tmp_path):
    """MTP is read, but not in the form of speculators."""
    config, tensors = layouts.speculators(speculators_model_type="mtp")
    message = refusal(target, write(tmp_path, config, tensors))
    assert "reads eagle3 and dflash; an MTP module is read from the folder" in message


def test_most_is_said_without_the_target(tmp_path):
    """A target may take a minute to load."""
    for source in ("/no/such/head", write(tmp_path / "a", {}, {"x": torch.ones(1)})):
        with pytest.raises(CheckpointError, match="no head"):
            check_head(HeadFiles.read(source), "target")
    config, tensors = layouts.eagle3()
    files = HeadFiles.read(write(tmp_path / "b", config, tensors))
    check_head(files, "target")
    files = replace(files, config=config | {"rope_theta": -1})
    with pytest.raises(CheckpointError, match="rope_theta=-1"):
        check_head(files, "target")
    for make in (layouts.eagle3, layouts.medusa, layouts.hydra):
        config, tensors = make()
        source = write(tmp_path / "d", config | {"odd": 3}, tensors)
        with pytest.raises(CheckpointError, match="has odd=3"):
            check_head(HeadFiles.read(source), "target")
