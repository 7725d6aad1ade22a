"""Tiny random checkpoints, made in a moment and never downloaded, and their exports."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from jetdraft import Bundle, Model, load
from jetdraft.checkpoints import streams
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import weights_sha256
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe

END_OF_TEXT = "<|endoftext|>"
# End-of-text, 256 bytes and 31 merges: exactly the tokenizer's size.
VOCAB_SIZE = 288
WORDS = ("the", "self", "return", "import", "def", "print", "for", "range", "in")

# What most configs of transformers take: 4 heads of 16 over 2 KV heads.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
SIZES |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512}
SIZES |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
# Larger than transformers' 0.02, so that logits are not flat.
SIZES |= {"initializer_range": 0.2}


def llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, "tie_word_embeddings": True, **changes})


def drafter_config(**changes: Any) -> LlamaConfig:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    return llama_config(**{**small, **changes})


_TWO = {**SIZES, "num_hidden_layers": 2, "head_dim": 16}
_DELTA: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
_DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 8}
GROUPED = {**_DELTA, "linear_num_value_heads": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2}
_MAMBA |= {"mamba_d_state": 16, "mamba_expand": 2}
_CONV = {**SIZES, "layer_types": ["conv", "full_attention", "conv"]}
_GRANITE = {**_TWO, **_MAMBA, "layer_types": ["mamba", "attention"]}
_NEMOTRON = {**SIZES, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2}
_NEMOTRON |= {"ssm_state_size": 16, "expand": 2, "head_dim": 16}

# How a config of each family with recurrent states is made.
HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "lfm2": lambda: transformers.Lfm2Config(**_CONV, block_auto_adjust_ff_dim=False),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_TWO, **GROUPED),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_TWO, **GROUPED, num_experts=0
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**_TWO, **_DELTA),
    "bamba": lambda: transformers.BambaConfig(**_TWO, **_MAMBA, attn_layer_indices=[1]),
    "falcon_h1": lambda: transformers.FalconH1Config(**_TWO, **_MAMBA, mamba_d_ssm=128),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **_GRANITE, num_local_experts=0, shared_intermediate_size=96
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_NEMOTRON, layers_block_type=["mamba", "attention", "mlp"]
    ),
}

_CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_EXPERTS: dict[str, Any] = {"num_experts": 8, **_CHOSEN}
_ROUTED: dict[str, Any] = {"n_routed_experts": 8, **_CHOSEN}
_LOCAL = {**SIZES, "num_hidden_layers": 2, "num_local_experts": 6}
_SHARED = {**_TWO, **_EXPERTS, "shared_expert_intermediate_size": 80}

_KINDS = ["sliding_attention", "full_attention"]
_WINDOWS = {"layer_types": _KINDS, "sliding_window": 8, "global_head_dim": 32}
_WINDOWS |= {"hidden_size_per_layer_input": 0}

# How a config of each family with experts is made, with sizes that all differ.
MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_TWO, **_EXPERTS, norm_topk_prob=True
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**_SHARED, mlp_only_layers=[0]),
    "olmoe": lambda: transformers.OlmoeConfig(
        **_LOCAL, num_experts_per_tok=3, clip_qkv=1.5
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_LOCAL),
    "phimoe": lambda: transformers.PhimoeConfig(**_LOCAL),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_LOCAL, head_dim=16, num_experts_per_tok=2, sliding_window=16
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **_LOCAL, embedding_multiplier=3.0, residual_multiplier=0.5
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **_TWO, **_ROUTED, first_k_dense_replace=1, n_group=2, topk_group=1
    ),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
        **_TWO,
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=48,
        moe_num_shared_experts=1,
    ),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **_CONV, **_EXPERTS, num_dense_layers=1
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**_SHARED, **GROUPED),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**_SHARED, **GROUPED),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **_GRANITE,
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=80,
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **_TWO, **_EXPERTS, **_WINDOWS, enable_moe_block=True, top_k_experts=2
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_NEMOTRON,
        **_ROUTED,
        layers_block_type=["mamba", "attention", "moe"],
        moe_shared_expert_intermediate_size=80,
        n_group=1,
        topk_group=1,
    ),
}
_OF_LAYERS: dict[str, Any] = {**SIZES, "num_hidden_layers": 6, "head_dim": 16}
_OF_LAYERS |= {"layer_types": _KINDS * 3, "sliding_window": 8}
_OF_LAYERS |= {"num_kv_shared_layers": 2, "final_logit_softcapping": 1.0}
_OF_LAYERS |= {"vocab_size_per_layer_input": VOCAB_SIZE}
_OF_LAYERS |= {"hidden_size_per_layer_input": 32}
_VALUES_OF_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
# Its last tokens have no embeddings, and read the embeddings of token 0.
_OF_GEMMA3N = {**_OF_LAYERS, "vocab_size_per_layer_input": VOCAB_SIZE - 40}
_OF_GEMMA3N |= {"activation_sparsity_pattern": [0.5, 0.0] * 3, "laurel_rank": 8}
_UNIFIED = {**_OF_LAYERS, **_VALUES_OF_KEYS, "global_head_dim": 32}
_UNIFIED |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
SHARING: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **_OF_GEMMA3N, altup_num_inputs=3
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **_OF_LAYERS, global_head_dim=32, use_double_wide_mlp=True
    ),
    "gemma4, values of keys": lambda: transformers.Gemma4UnifiedTextConfig(**_UNIFIED),
}
"""How configs are made of models with windows, whose last layers share the keys and
values of earlier layers, or whose layers have heads of two sizes."""


def save_checkpoint(
    folder: Path, config: PreTrainedConfig, seed: int = 0, tokenizer: bool = True
) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def save_assistant(folder: Path, target: Any, seed: int = 5) -> str:
    sizes = {**_OF_LAYERS, "hidden_size": 32, "num_hidden_layers": 3}
    sizes |= {"layer_types": [*_KINDS[:1] * 2, _KINDS[1]], "intermediate_size": 48}
    sizes |= dict.fromkeys(("hidden_size_per_layer_input", "num_kv_shared_layers"), 0)
    sizes |= {"vocab_size_per_layer_input": 0, "final_logit_softcapping": None}
    if "unified" in target.model_type:  # it has no embeddings of layers
        sizes = {n: s for n, s in sizes.items() if "per_layer" not in n}
        sizes |= _VALUES_OF_KEYS
    kind = target.model_type.replace("_text", "_assistant")
    text, width = type(target)(**sizes, global_head_dim=32), target.hidden_size
    of_both = {"text_config": text, "backbone_hidden_size": width}
    config = transformers.AutoConfig.for_model(kind, **of_both)
    return str(save_checkpoint(folder, config, seed, tokenizer=False))


Probes = streams.StreamSettings | streams.PromptSettings


def save_probes(folder: Path, settings: Probes, seed: int = 0) -> Path:
    """Random streams or prompt tokens of a checkpoint, beside it."""
    model = Checkpoint.load(str(folder), torch.float32).model
    settings = replace(settings, base=weights_sha256(folder))
    torch.manual_seed(seed)
    if isinstance(settings, streams.PromptSettings):
        probed = streams.PromptedModel(model, streams.Prompts.empty(settings, model))
    else:
        streams.add_adapters(model, settings)
        own = streams.Streams(settings, model.config.hidden_size)
        probed = streams.StreamedModel(model, own)
    weights = {n: torch.randn_like(w) * 0.2 for n, w in probed.task.items()}
    save_file(weights, folder / streams.WEIGHTS)
    (folder / streams.SETTINGS).write_text(json.dumps(asdict(settings)))
    return folder


def save_tokenizer(
    folder: Path, words: tuple[str, ...] = WORDS, added: Sequence[AddedToken] = ()
) -> Path:
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(words, added), eos_token=END_OF_TEXT
    ).save_pretrained(folder)
    return folder


def tokenizer(
    words: tuple[str, ...] = WORDS, added: Sequence[AddedToken] = ()
) -> Tokenizer:
    """End-of-text is 0, then bytes, then merges, and last the tokens in `added`."""
    vocab = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in words:
        # In the alphabet of byte-level BPE, "Ġ" stands for a space.
        left = "Ġ"
        for right in word:
            if left + right not in vocab and len(vocab) < VOCAB_SIZE - len(added):
                merges.append((left, right))
                vocab.append(left + right)
            left += right
    assert len(vocab) == VOCAB_SIZE - len(added), "give more words"
    ids = {token: index for index, token in enumerate(vocab)}
    made = Tokenizer(models.BPE(vocab=ids, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    made.add_tokens([*added])
    return made


def exported(
    source: str | Path,
    output: Path,
    recipe: str = "none",
    drafter: str | Path | None = None,
    head: str | Path | None = None,
    drafter_recipe: str = "none",
    **options: Any,
) -> Bundle:
    recipes = Recipe.parse(recipe, 32), Recipe.parse(drafter_recipe, 32)
    sizes = {"capacity": 64, "max_width": 16, "fast": True}
    settings = ExportOptions(*recipes, **{**sizes, **options})
    own, beside = (str(path) if path else None for path in (drafter, head))
    return export(str(source), output, own, settings, head=beside)


def exported_model(
    source: str | Path, output: Path, *more: Any, **options: Any
) -> Model:
    """The model of a bundle that is exported with these options."""
    return load(exported(source, output, *more, **options).path, threads=1)


def eager_logits(model: Any, ids: list[int]) -> Any:
    """What a model of torch says of a text [rows, vocabulary], as an array."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def bundle_logits(bundle: Path, ids: list[int]) -> Any:
    with load(bundle) as model:
        return model.parts.target.run(ids).logits


def refused(
    error: type[Exception], said: str, source: str | Path, *more: Any, **options: Any
) -> None:
    """Assert that an export refuses this in a line, and writes nothing."""
    with TemporaryDirectory() as folder:
        with pytest.raises(error, match=said) as refusal:
            exported(source, Path(folder) / "bundle", *more, **options)
        assert "\n" not in str(refusal.value)
        assert not [*Path(folder).iterdir()]
