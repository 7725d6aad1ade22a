"""The toy bundle's drafter: its arrays, its checkpoint, and sets of other weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import onnx_ir as ir

from jetdraft.bundle import Bundle
from jetdraft.learning import lessons
from jetdraft.learning.lessons import ARRAYS, CHOICE_FILE, PARTIAL, Choice
from jetdraft.manifest import sha256_of

HEAD = 16


def arrays_of(bundle: Path, small: bool = False) -> dict[str, np.ndarray]:
    return {
        name: np.array(value.const_value.numpy())
        for name, value in ir.load(bundle / "drafter.onnx").graph.initializers.items()
        if small or isinstance(value.const_value, ir.ExternalTensor)
    }


def put_on_trial(
    folder: Path, bundle: Path, arrays: Mapping[str, np.ndarray], before: str = ""
) -> str:
    folder.mkdir(exist_ok=True)
    partial = Path(mkdtemp(prefix=PARTIAL, dir=folder))
    np.savez(partial / ARRAYS, **arrays)
    name = sha256_of(partial / ARRAYS)
    if not (folder / name).exists():  # a training that was killed wrote it already
        partial.rename(folder / name)
    choose(folder, Choice(name, before, lessons.drafter_sha256(Bundle.open(bundle))))
    return name


def choose(folder: Path, choice: Choice) -> None:
    (folder / CHOICE_FILE).write_text(json.dumps(asdict(choice)))


def random_arrays(bundle: Path, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        name: draw.normal(0, 0.2, array.shape).astype(array.dtype)
        for name, array in arrays_of(bundle).items()
        if array.ndim == 2 and "weight" in name
    }


def save_drafter(bundle: Path, folder: Path) -> Path:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.tiny import drafter_config

    arrays, layer = arrays_of(bundle, small=True), "model.layers.0."
    width = arrays["model.norm.weight"].shape[0]
    attention = arrays["linear.merged.weight"].T
    both = arrays["linear_4.merged.weight"].T
    inner = len(both) // 2
    states: dict[str, Any] = {
        "model.embed_tokens.weight": arrays["model.embed_tokens.weight"],
        "model.norm.weight": arrays["model.norm.weight"],
        f"{layer}self_attn.q_proj.weight": attention[:width],
        f"{layer}self_attn.k_proj.weight": attention[width : width + HEAD],
        f"{layer}self_attn.v_proj.weight": attention[width + HEAD :],
        f"{layer}mlp.gate_proj.weight": both[:inner],
        f"{layer}mlp.up_proj.weight": both[inner:],
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        states[f"{layer}{name}.weight"] = arrays[f"{layer}{name}.weight"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        states[f"{layer}{name}.weight"] = arrays[f"{layer}{name}.weight.turned"].T
    sizes = {"vocab_size": len(states["model.embed_tokens.weight"])}
    sizes |= {"hidden_size": width, "intermediate_size": inner}
    sizes |= {"num_attention_heads": width // HEAD}
    model = LlamaForCausalLM(drafter_config(**sizes, eos_token_id=[0, 1]))
    tensors = {n: torch.tensor(np.ascontiguousarray(a)) for n, a in states.items()}
    left = model.load_state_dict(tensors, strict=False)
    assert left.missing_keys == ["lm_head.weight"]
    assert not left.unexpected_keys
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_file=str(bundle / "tokenizer.json")
    ).save_pretrained(folder)
    return folder
