import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForSeq2SeqLM, BartConfig, MarianConfig, T5Config

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.methods.block.module import SourceDrafter, source_config, source_fields
from tests.tiny import VOCAB_SIZE, save_tokenizer

T5: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "d_model": 64, "d_kv": 16, "d_ff": 96}
T5 |= {"num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
T5 |= {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8}
T5 |= {"relative_attention_max_distance": 16, "initializer_factor": 1.0}
T5 |= {"decoder_start_token_id": 3, "eos_token_id": 0, "pad_token_id": 1}
BART: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "d_model": 64, "encoder_layers": 2}
BART |= {"decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
BART |= {"max_position_embeddings": 64, "init_std": 0.2, "decoder_start_token_id": 2}
BART |= {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 1}
BART |= {"forced_eos_token_id": None}
CONFIGS = {"t5": T5Config(**T5), "bart": BartConfig(**BART)}
CONFIGS |= {"marian": MarianConfig(**BART)}
START = {"t5": 3, "bart": 2, "marian": 2}
SOURCE = [5, 9, 200, 31, 64, 77, 12, 5, 9, 200, 31, 8]


def save(folder: Path, config: Any, tokenizer: bool = True) -> Path:
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    return save_tokenizer(folder) if tokenizer else folder


def save_drafter(folder: Path, target: str | Path, slots: int, layers: int = 1) -> str:
    checkpoint = Checkpoint.load(str(target), torch.float32)
    drafter = SourceDrafter(source_config(checkpoint, layers, slots), checkpoint.model)
    shared = {id(weight) for weight in checkpoint.model.parameters()}
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: weight.detach()
        + 0.2 * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in drafter.named_parameters()
        if id(weight) not in shared
    }
    tensors["masks"] = torch.randn(drafter.masks.shape, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    fields = source_fields(checkpoint, drafter.config)
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)
