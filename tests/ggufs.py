import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.tiny import tokenizer

QK_NORMS, MLP = ("norm", "layernorm"), ("gate", "down", "up")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    **{f"self_attn.{n}_proj": "attn_output" for n in ("o", "out")},
    **{f"self_attn.{n}_{norm}": f"attn_{n}_norm" for n in "qk" for norm in QK_NORMS},
    **{f"conv.{n}": f"shortconv.{n}" for n in ("conv", "in_proj", "out_proj")},
    **{f"feed_forward.w{i}": f"ffn_{n}" for i, n in enumerate(MLP, 1)},
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in MLP},
    **{f"mlp.shared_expert.{n}_proj": f"ffn_{n}_shexp" for n in MLP},
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GEMMA = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
CONTROL = 3


@dataclass
class Written:
    """A file, and its model; `data` has quantized bytes by transformers' names."""

    path: Path
    model: Any
    data: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, Type] = field(default_factory=dict)


def one(kind: Type) -> Callable[[str], Type]:
    return lambda name: kind


def file_name(name: str, family: str) -> str:
    stem, kind = name.rsplit(".", 1)
    names = GEMMA if family == "gemma3" else NAMES
    if stem.startswith("model.layers."):
        _, _, number, rest = stem.split(".", 3)
        return f"blk.{number}.{names[rest]}.{kind}"
    return f"{names[stem]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as llama.cpp rotates them: neighbours, not halves."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def random_bytes(kind: Type, shape: tuple[int, int], seed: int) -> np.ndarray:
    numbers = np.random.default_rng(seed)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = shape[1] // weights
    data = numbers.integers(0, 256, (shape[0], blocks, size), dtype=np.uint8)
    halves = {
        **{"Q6_K": {208: (-4e-5, 4e-5)}, "Q3_K": {108: (-1e-3, 1e-3)}},
        **{"Q4_0": {0: (-0.02, 0.02)}, "Q5_0": {0: (-0.01, 0.01)}},
        **{"Q8_0": {0: (-2e-3, 2e-3)}},
        **{"Q4_1": {0: (0, 0.02), 2: (-0.4, 0.1)}},
        **{"Q5_1": {0: (0, 0.01), 2: (-0.4, 0.1)}},
        **{"Q4_K": {0: (0, 3e-4), 2: (0, 3e-3)}},
        **{"Q5_K": {0: (0, 2e-4), 2: (0, 3e-3)}},
    }[kind.name]
    for place, (low, high) in halves.items():
        half = numbers.uniform(low, high, data.shape[:2]).astype("<f2")
        data[..., place : place + 2] = half[..., None].view(np.uint8)
    return data.reshape(shape[0], -1)


def adding(fields: dict[str, Any]) -> Callable[[gguf.GGUFWriter], None]:
    kinds = {str: "string", float: "float32", bool: "bool", list: "array"}

    def change(writer: gguf.GGUFWriter) -> None:
        for name, value in fields.items():
            kind = kinds.get(type(value)) or ("int32" if value < 0 else "uint32")
            getattr(writer, f"add_{kind}")(name, value)

    return change


def write_gguf(
    path: Path,
    config: PreTrainedConfig,
    kinds: Callable[[str], Type | None] = lambda name: Type.Q8_0,
    family: str = "llama",
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    seed: int = 0,
    **options: Any,
) -> Written:
    """Write a random model; `kinds` maps the names of weights to types, or None."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    written = Written(path, model)
    writer = gguf.GGUFWriter(path, family)
    _write_config(writer, config)
    write_tokenizer(writer, **options)
    for number, (name, weight) in enumerate(model.state_dict().items()):
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        _write_weight(writer, written, name, weight, kinds, family, number)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _write_weight(
    writer: gguf.GGUFWriter,
    written: Written,
    name: str,
    weight: torch.Tensor,
    kinds: Callable[[str], Type | None],
    family: str,
    number: int,
) -> None:
    if weight.ndim == 3 and ".experts." in name:
        _write_stack(writer, name, weight, kinds(name))
        return
    config, place = written.model.config, file_name(name, family)
    kind = kinds(name) if weight.ndim == 2 else Type.F32
    kind = (
        Type.F32 if name.endswith(("mlp.gate.weight", "expert_gate.weight")) else kind
    )
    if kind is None:
        return
    floats = weight.numpy().squeeze().copy()  # a convolution has an axis of size 1
    if family == "gemma3" and "norm" in name:
        floats += 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    turned = next((n for part, n in heads.items() if part in name), 0)
    if family != "llama":
        turned = 0
    if kind in (Type.F32, Type.F16):
        stored = floats.astype(np.float16 if kind == Type.F16 else np.float32)
        writer.add_tensor(place, interleaved(stored, turned) if turned else stored)
        return
    try:
        data = quants.quantize(floats, kind)
    except NotImplementedError:
        data = random_bytes(kind, floats.shape, number)
    weight.copy_(torch.from_numpy(quants.dequantize(data, kind)))
    written.data[name], written.types[name] = data, kind
    data = interleaved(data, turned) if turned else data
    writer.add_tensor(place, np.ascontiguousarray(data), raw_dtype=kind)


def _write_stack(
    writer: gguf.GGUFWriter, name: str, stack: torch.Tensor, kind: Type | None
) -> None:
    gate_up = dict(zip(("gate", "up"), stack.chunk(2, 1), strict=True))
    for what, part in ({"down": stack} if "down" in name else gate_up).items():
        place = f"blk.{name.split('.')[2]}.ffn_{what}_exps.weight"
        floats = part.numpy().copy()
        if kind == Type.F16:
            writer.add_tensor(place, floats.astype(np.float16))
            continue
        data = quants.quantize(floats, kind)
        part.copy_(torch.from_numpy(quants.dequantize(data, kind)))
        writer.add_tensor(place, data, raw_dtype=kind)


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    heads = config.num_key_value_heads
    if config.model_type == "lfm2":  # its layers of convolutions have none
        heads = [heads * (kind != "conv") for kind in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_head_count_kv(heads)
    epsilon = "norm_eps" if config.model_type == "lfm2" else "rms_norm_eps"
    writer.add_layer_norm_rms_eps(getattr(config, epsilon))
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    size = getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    writer.add_rope_dimension_count(size)
    if experts := getattr(config, "num_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if shared := getattr(config, "shared_expert_intermediate_size", 0):
            writer.add_expert_shared_feed_forward_length(shared)
    elif getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)


def write_tokenizer(
    writer: gguf.GGUFWriter,
    rule: str = "gpt-2",
    words: tuple[str, ...] | None = None,
    begin: bool | None = False,
    template: str | None = None,
) -> None:
    model = json.loads((tokenizer(words) if words else tokenizer()).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [CONTROL if number == 0 else 1 for number in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    if begin is not None:
        writer.add_add_bos_token(begin)
    if template is not None:
        writer.add_chat_template(template)
