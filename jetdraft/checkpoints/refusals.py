"""What is refused: configs beyond bounds, kinds of models, and layers not read."""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.initialization import no_init_weights

from jetdraft.checkpoints.layers import head_size
from jetdraft.contracts.tensors import EXPERTS
from jetdraft.errors import CheckpointError, UnsupportedModelError, printable
from jetdraft.parsing import JsonError, read_json_file

LAYER_COUNT_FIELDS = {
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
    *("decoder_num_hidden_layers", "num_encoder_blocks", "num_stages"),
    *("num_mtp_layers", "num_nextn_predict_layers", "num_residual_layers"),
}
MAX_LAYERS = 10_000  # The deepest published models have some hundreds.
# The bounds of a model whose files do not tell how many tensors they hold.
MAX_TENSORS, MAX_WEIGHTS = 100_000, 10**13
# How many times more tensors a model may have than its files, which may tie or fuse.
SPARE = 4
# The most weights in a byte of the files: packed integers have two bits or more.
WEIGHTS_PER_BYTE = 8


@dataclass(frozen=True)
class Bounds:
    """The most tensors, and weights in them, that a checkpoint's model may have."""

    tensors: int = MAX_TENSORS
    weights: int = MAX_WEIGHTS

    @classmethod
    def of(cls, source: str) -> "Bounds":
        """Return the bounds that the files of a folder set; defaults otherwise."""
        files = list(Path(source).glob("*.safetensors")) if source else []
        names = size = 0
        try:
            for file in files:
                size += file.stat().st_size
                with safe_open(file, "pt") as opened:
                    names += len(opened.keys())
        except (OSError, SafetensorError):
            return cls()  # loading it says what is wrong
        return cls(100 + SPARE * names, WEIGHTS_PER_BYTE * size) if names else cls()


def check_layers(source: str) -> None:
    """Raise `CheckpointError` for a config of more than `MAX_LAYERS` layers."""
    file = Path(source) / "config.json"
    if not os.path.isfile(file):
        return
    try:
        config = read_json_file(file, infinite=True)
    except (OSError, JsonError):
        return  # transformers says what is wrong
    for name, value in _named_numbers(config):
        if name in LAYER_COUNT_FIELDS and value > MAX_LAYERS:
            fact = f"{printable(file)} has {printable(name, 60)} {value}"
            fact += f", and at most {MAX_LAYERS} layers are built"
            raise CheckpointError(f"{fact}; fetch it again")


def _named_numbers(value: object, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield the numbers in a JSON value, each after the name of its field."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named_numbers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _named_numbers(inner, name)
    elif isinstance(value, (int, float)):
        yield name, value


def build_skeleton(source: str, model_class: Any, config: Any, bounds: Bounds) -> Any:
    """Make a config's model without weights; `CheckpointError` beyond `bounds`."""
    tensors = weights = 0

    def count(module: object, name: str, parameter: torch.Tensor | None) -> None:
        nonlocal tensors, weights
        tensors += 1
        weights += 0 if parameter is None else parameter.numel()
        if tensors > bounds.tensors or weights > bounds.weights:
            fact = f"the config.json of {printable(source)} describes a larger model"
            raise CheckpointError(f"{fact} than its files hold; fetch it again")

    hook = register_module_parameter_registration_hook(count)
    with hook, no_init_weights(), torch.device("meta"):
        return model_class.from_config(config, trust_remote_code=False)


@dataclass(frozen=True)
class UnsupportedKind:
    """A kind of models, and what shows it in a config.

    It has `least` or more parts in one of `fields`, unless the field `unless` is false,
    or a layer of one of `types`, unless it is of a family in `but`.
    """

    words: str
    fields: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    least: int = 1
    unless: str = ""
    but: tuple[str, ...] = ()

    def find_signs(self, field: Callable[[str], Any]) -> Iterator[str]:
        """Yield the fields and layer types that show that a model is of this kind."""
        if field("model_type") in self.but:
            return
        for name in self.fields if field(self.unless) is not False else ():
            value = field(name)
            counts = value if isinstance(value, list) else [value]
            most = max((n for n in counts if isinstance(n, int)), default=0)
            if most >= self.least:
                yield f"{name} {printable(most, 20)}"
        for name in ("layer_types", "layers_block_type", "block_types"):
            types = field(name)
            if isinstance(types, (list, tuple)):
                yield from (f"{name} {t}" for t in self.types if t in types)


RECURRENT_FAMILIES = (
    *("lfm2", "qwen3_5_text", "qwen3_next", "olmo_hybrid"),
    *("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"),
    *("lfm2_moe", "qwen3_5_moe_text", "lfm3", "zamba2"),
)
EXPERT_FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "gpt_oss", "granitemoe"),
    *("granitemoehybrid", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text", "nemotron_h"),
    *("glm4_moe", "ernie4_5_moe", "aria_text", "cohere2_moe", "dots1", "exaone_moe"),
    *("flex_olmo", "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3"),
    *("kolibri1", "laguna", "mellum", "mimo_v2_flash", "minimax_m2", "solar_open"),
    *("afmoe", "axk1", "beam", "deepseek_v2", "deepseek_v3", "flint", "glm4_moe_lite"),
    *("sarvam_mla", "sarvam_moe", "gemma4_text"),
)
_UNCOMPARED = "has experts of a family that was not compared with transformers"
_COUNTS, _INDEXERS = (*EXPERTS, "expert_count"), ("index_topk", "index_topk_blocks")
_RWKV, _RECURRENT = (
    ("wkv.head_size",),
    ("linear_attention", "hybrid", "hybrid_sliding", "recurrent", "mamba", "mamba2"),
)
REFUSED_KINDS = (
    UnsupportedKind(_UNCOMPARED, _COUNTS, ("moe",), 2, "is_moe", EXPERT_FAMILIES),
    UnsupportedKind("has recurrent layers", _RWKV, _RECURRENT, but=RECURRENT_FAMILIES),
    UnsupportedKind(
        "has layers that share keys and values", ("attention.shared_kv_layers",)
    ),
    UnsupportedKind("has latent attention (MLA)", ("attention.kv_lora_rank",)),
    UnsupportedKind("attends to the keys that an indexer selects", _INDEXERS),
    UnsupportedKind("scales queries by positions", ("attn_temperature_tuning",)),
)

FAMILY_FIELDS = (
    "attn_logit_softcapping final_logit_softcapping clip_qkv alibi "
    "attention_multiplier embedding_multiplier residual_multiplier logits_scaling "
    "logit_scale scale_emb scale_depth scale_embedding embedding_scale "
    "routed_scaling_factor router_scaling_factor moe_routed_scaling_factor "
    "moe_router_scaling_factor route_scale n_group moe_router_logit_softcapping "
    "router_logit_softcapping swiglu_limit query_pre_attn_scalar qk_scale_factor "
    "attention_value_scale output_multiplier lm_head_multiplier key_multiplier "
    "attention_in_multiplier attention_out_multiplier logits_soft_cap "
    "output_logit_soft_cap mup_enabled use_mup parallel_attn "
    "attn_temperature_tuning attention_chunk_size use_attention_gate "
    "enable_moe_block num_kv_shared_layers hidden_size_per_layer_input "
    "attention_k_eq_v scale_attn_by_inverse_layer_idx"
)
"""Fields that some families compute with; null, 0 and 1 (not true) change nothing."""
_SIGMOID_ROUTERS = (
    "axk1 beam deepseek_v3 dots1 exaone_moe glm4_moe glm4_moe_lite hy_v3 "
    "mimo_v2_flash minimax_m2 nemotron_h solar_open"
)
_NORMS = "use_qk_norm", "qk_norm", "qk_layernorm"
_NORM_PATTERN = re.compile(r"\b(q|qk|query)_?(layer)?_?norm")


def check_family_fields(source: str, config: Any) -> None:
    """Raise `UnsupportedModelError` for `FAMILY_FIELDS` that the family ignores."""
    for name in FAMILY_FIELDS.split():
        value = getattr(config, name, None)
        if value is not True and value in (None, 0, 1):
            continue
        is_usual = name == "query_pre_attn_scalar" and value == head_size(config)
        is_known = hasattr(type(config), name) or name in config.attribute_map
        if not (is_usual or is_known):
            raise _ignored(source, config, name, value)
    kind, known = config.model_type, dict[str, object]()
    if kind in _SIGMOID_ROUTERS.split():
        known = {"scoring_func": "sigmoid"}
    elif kind == "deepseek_v2":
        known = {"scoring_func": "softmax", "norm_topk_prob": False}
    for name, computed in known.items():
        if (value := getattr(config, name, None)) not in (None, computed):
            raise _ignored(source, config, name, value)


def check_modules(source: str, model: Any) -> None:
    """Raise `UnsupportedModelError` for query norms or rotated parts that it lacks."""
    config = model.config.get_text_config(decoder=True)
    asked = [name for name in _NORMS if getattr(config, name, None)]
    if asked and not any(_NORM_PATTERN.search(n) for n, _ in model.named_modules()):
        raise _ignored(source, config, asked[0], getattr(config, asked[0]))
    rope, name = getattr(config, "rope_parameters", None) or {}, "partial_rotary_factor"
    if rope.get("rope_type") == "default" and rope.get(name, 1) not in (None, 1):
        sizes = {n: 2 * len(b) for n, b in model.named_buffers() if "inv_freq" in n}
        if head_size(config) in sizes.values():
            raise _ignored(source, config, name, rope[name])


def _ignored(source: str, config: Any, name: str, value: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source} has {name} {printable(value, 20)}, which transformers ignores in a "
        f"model of type {config.model_type}; remove it from config.json if the model "
        "was trained without it"
    )


def check_kinds(source: str, field: Callable[[str], Any]) -> None:
    """Raise `UnsupportedModelError` for `REFUSED_KINDS`; `field` reads a field."""
    found = [(kind.words, next(kind.find_signs(field), None)) for kind in REFUSED_KINDS]
    said = [f"{words} ({sign})" for words, sign in found if sign is not None]
    said = said[found[0][1] is not None :] or said  # experts are a reason alone
    if said:
        fact = f"{source} {' and '.join(said)}, which jetdraft does not export yet"
        raise UnsupportedModelError(f"{fact}; see docs/models.md")


_LAYER_PATTERN = re.compile(r"((?:.*?\.)?(?:layers?|blocks?|h))\.(\d+)\.(.*)")
# Marks an MTP module, numbered as the layer behind the last; only --head reads it.
_MTP_WEIGHT = "eh_proj."
# Masks and frequencies that old files have, and scales of a cache of 8 bits.
_BUFFERS = re.compile(
    r"(.*\.)?((\w+_)?inv_freq|(causal_)?mask|masked_bias|att\w+\.bias|(kv|[qkv])_scale)"
)


def check_unread(source: str, read: Collection[str], unread: Collection[str]) -> None:
    """Raise `CheckpointError` for what a layer has, or layers, beyond the config."""
    inner = {layer[:2] for layer in _numbered_weights(read)}
    last = dict(sorted(inner))
    layers = _numbered_weights(unread)
    modules = {layer[:2] for layer in layers if layer[2].startswith(_MTP_WEIGHT)}
    for name in sorted(unread):
        path, _, kind = name.rpartition(".")
        stack, number, weight = next(_numbered_weights([name]), ("", 0, name))
        is_inner = (stack, number) in inner and not _BUFFERS.fullmatch(weight)
        surplus = ""
        if is_inner or (kind == "bias" and f"{path}.weight" in read):
            surplus = f"no such {kind}"
        elif number > last.get(stack, number) and (stack, number) not in modules:
            surplus = f"{last[stack] + 1} such layers"
        if surplus:
            fact = f"{source} has the weight {printable(name, 100)}, and its "
            fact += f"config.json describes {surplus}"
            raise CheckpointError(f"{fact}; fetch config.json again")


def _numbered_weights(names: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Yield (stack, layer number, rest of name) for names with a layer number."""
    for match in filter(None, map(_LAYER_PATTERN.match, names)):
        yield match[1], int(match[2]), match[3]
