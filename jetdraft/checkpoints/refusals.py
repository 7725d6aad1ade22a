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
        config = read_json_file(file)
    except (OSError, JsonError):
        return  # transformers says what is wrong
    for name, value in _named_numbers(config):
        if name in LAYER_COUNT_FIELDS and value > MAX_LAYERS:
            raise CheckpointError(
                f"{printable(file)} has {printable(name, 60)} {value}, and at most "
                f"{MAX_LAYERS} layers are built; fetch it again"
            )


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
            raise CheckpointError(
                f"the config.json of {printable(source)} describes a larger model than "
                "its files hold; fetch it again"
            )

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
    *("sarvam_mla", "sarvam_moe"),
)
REFUSED_KINDS = (
    UnsupportedKind(
        "is a mixture of experts",
        (*EXPERTS, "expert_count"),
        ("moe",),
        least=2,
        unless="is_moe",
        but=EXPERT_FAMILIES,
    ),
    UnsupportedKind(
        "has recurrent layers",
        ("wkv.head_size",),
        (
            *("linear_attention", "hybrid", "hybrid_sliding", "recurrent"),
            *("mamba", "mamba2"),
        ),
        but=RECURRENT_FAMILIES,
    ),
    UnsupportedKind(
        "has layers that share keys and values", ("attention.shared_kv_layers",)
    ),
    UnsupportedKind("has latent attention (MLA)", ("attention.kv_lora_rank",)),
    UnsupportedKind("attends to the keys that an indexer selects", ("index_topk",)),
)

SCALES = (
    *("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "alibi"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier"),
    *("logits_scaling", "logit_scale", "scale_emb", "scale_depth"),
)
"""Fields that change what some families compute; without effect where 0 or 1."""


def check_scales(source: str, config: Any) -> None:
    """Raise `UnsupportedModelError` for one of `SCALES` that its family ignores."""
    for name in SCALES:
        value = getattr(config, name, None)
        if value not in (None, 0, 1) and not hasattr(type(config), name):
            raise UnsupportedModelError(
                f"{source} has {name} {printable(value, 20)}, which transformers "
                f"ignores in a model of type {config.model_type}; remove it from "
                "config.json if the model was trained without it"
            )


def check_kinds(source: str, field: Callable[[str], Any]) -> None:
    """Raise `UnsupportedModelError` for `REFUSED_KINDS`; `field` reads a field."""
    found = [(kind.words, next(kind.find_signs(field), None)) for kind in REFUSED_KINDS]
    said = [f"{words} ({sign})" for words, sign in found if sign is not None]
    if said:
        raise UnsupportedModelError(
            f"{source} {' and '.join(said)}, which jetdraft does not export yet; it "
            "exports dense decoders like Llama, Qwen3 and Gemma 3, see docs/models.md"
        )


_LAYER_PATTERN = re.compile(r"((?:.*?\.)?(?:layers?|blocks?|h))\.(\d+)\.(.*)")
# Marks an MTP module, numbered as the layer behind the last; only --head reads it.
_MTP_WEIGHT = "eh_proj."


def check_unread(source: str, read: Collection[str], unread: Collection[str]) -> None:
    """Raise `CheckpointError` for unread biases and layers after a stack's last."""
    for name in sorted(unread):
        if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in read:
            raise CheckpointError(
                f"{source} has the weight {printable(name, 100)}, and its config.json "
                "describes no such bias; fetch config.json again"
            )
    last: dict[str, int] = {}
    for stack, number, _ in _numbered_weights(read):
        last[stack] = max(number, last.get(stack, 0))
    layers = _numbered_weights(unread)
    behind = [layer for layer in layers if layer[1] > last.get(layer[0], layer[1])]
    modules = {layer[:2] for layer in behind if layer[2].startswith(_MTP_WEIGHT)}
    for stack, number, weight in sorted(behind):
        if (stack, number) not in modules:
            name = printable(f"{stack}.{number}.{weight}", 100)
            raise CheckpointError(
                f"{source} has the weight {name}, and its config.json describes "
                f"{last[stack] + 1} such layers; fetch config.json again"
            )


def _numbered_weights(names: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Yield (stack, layer number, rest of name) for names with a layer number."""
    for match in filter(None, map(_LAYER_PATTERN.match, names)):
        yield match[1], int(match[2]), match[3]
