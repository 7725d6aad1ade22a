"""Writes a Llama checkpoint as GGUF, without llama.cpp's own converter.

That converter refuses tokenizers it has no fingerprint for; the peers are fed token
ids, so here the vocabulary is only carried along.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURE = gguf.MODEL_ARCH.LLAMA


def write(checkpoint: Path, file: Path) -> None:
    """Convert `checkpoint` to a float16 GGUF file."""
    config = AutoConfig.from_pretrained(checkpoint)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[ARCHITECTURE])
    _add_shape(writer, config)
    _add_vocabulary(writer, config, checkpoint / "tokenizer.json")
    for name, tensor in _tensors(checkpoint, config):
        kind = np.float32 if tensor.ndim == 1 else np.float16
        writer.add_tensor(name, tensor.float().numpy().astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if config.model_type != "llama" or rope["rope_type"] != "default":
        raise ValueError("Only plain Llama checkpoints with default RoPE convert.")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_vocabulary(writer: gguf.GGUFWriter, config: Any, tokenizer: Path) -> None:
    values = json.loads(tokenizer.read_text())
    special = {token["content"] for token in values["added_tokens"]}
    ids = values["model"]["vocab"] | {
        t["content"]: t["id"] for t in values["added_tokens"]
    }
    texts = {index: text for text, index in ids.items()}
    tokens = [texts.get(index, f"[{index}]") for index in range(config.vocab_size)]
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [kinds.CONTROL if token in special else kinds.NORMAL for token in tokens]
    )
    merges = values["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(config.eos_token_id)


def _tensors(checkpoint: Path, config: Any) -> Iterator[tuple[str, Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16)
    rotated = {"q_proj": config.num_attention_heads}
    rotated["k_proj"] = config.num_key_value_heads
    names = gguf.get_tensor_name_map(ARCHITECTURE, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = rotated.get(name.split(".")[-2])
        yield (
            names.get_name(name, try_suffixes=(".weight",)),
            _interleave(tensor, heads) if heads else tensor,
        )


def _interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows in GGUF's order: RoPE's two halves of each head alternate."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)
