"""The sizes of drafters, and their decoder layers from the code of transformers."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.cache_utils import Cache
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.errors import UnsupportedModelError, as_error

_PARAMETERS = inspect.signature(llama.LlamaDecoderLayer.forward).parameters
CACHE = "cache" if "cache" in _PARAMETERS else "past_key_values"


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a drafter; tap j is the state that enters the target's layer j."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int  # Tokens of the target; drafted tokens have its ids.
    draft_vocab_size: int  # Rows of the LM head.
    taps: tuple[int, ...] = ()
    num_layers: int = 1
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    # `rope_theta`, `rope_type` and its settings, which are not the target's.
    rope: Mapping[str, Any] = field(default_factory=dict)
    max_positions: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    slots: int = 1  # Tokens that a row drafts, or that a block has to be drafted.

    @classmethod
    def beside(cls, target: Any, width: int, **others: Any) -> Self:
        """Make the config of a head with the width and the tokens of a target."""
        rows = target.vocab_size
        ends = {"vocab_size": rows, "draft_vocab_size": rows}
        widths = dict.fromkeys(("hidden_size", "target_hidden_size"), width)
        return cls(**(widths | ends | others))

    @property
    def fields(self) -> dict[str, Any]:
        """The sizes of the decoder layers, by the names that transformers has."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": self.hidden_act,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_positions,
            "attention_bias": self.attention_bias,
        }

    @property
    def feature_size(self) -> int:
        """The width of a row of features, and of a carried row."""
        return self.hidden_size if self.taps else self.target_hidden_size


class HeadLayers(nn.Module):
    """A stack of decoder layers: `states` [b, n, h], `mask` [1, 1, n, slots] or None.

    The first layer of EAGLE-3 takes `embedded` [b, n, h] too.
    """

    def __init__(self, layers: list[nn.Module], rotary: nn.Module, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.rotary, self.config = rotary, config
        self.norm_class: type[nn.Module] = next(
            type(module)
            for name, module in layers[-1].named_modules()
            if "norm" in name and not isinstance(module, nn.Identity)
        )

    @property
    def window(self) -> int | None:
        """The sliding window of the first layer in rows; None without a window."""
        for module in self.layers[0].modules():
            if size := getattr(module, "sliding_window", None):
                return int(size)
        return None

    def norm(self, width: int) -> nn.Module:
        """Return a new norm over `width` numbers, as these layers have them."""
        name = "rms_norm_eps" if hasattr(self.config, "rms_norm_eps") else "norm_eps"
        return self.norm_class(width, eps=getattr(self.config, name))

    def forward(
        self,
        states: Tensor,
        positions: Tensor,
        cache: Cache | None,
        mask: Tensor | None,
        **first: Tensor,
    ) -> Tensor:
        """Return the last layer's states [b, n, h]; layer 0 alone gets `first`."""
        for index, layer in enumerate(self.layers):
            states = layer(
                states,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=self.rotations(states, positions),
                **{CACHE: cache},
                **(first if index == 0 else {}),
            )
            states = states[0] if isinstance(states, tuple) else states
        return states

    def rotations(self, states: Tensor, positions: Tensor) -> Any:
        """Cosines and sines of positions int64 [b, n], in the type of `states`."""
        kinds = getattr(self.rotary, "rope_type", None)
        if isinstance(kinds, dict):  # frequencies of their own for each kind of layer
            return self.rotary(states, positions, layer_type=self.config.layer_types[0])
        return self.rotary(states, positions)


def rotate_rows(rows: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate rows [b, heads, n, d] by `turns`: cosines and sines [b, n, d]."""
    cosines, sines = turns
    turned: Tensor = rows * cosines[:, None] + llama.rotate_half(rows) * sines[:, None]
    return turned


def project_heads(module: Any, name: str, rows: Tensor) -> Tensor:
    """Apply an attention's `{name}_proj`, and norm, to [b, n, h]: [b, heads, n, d]."""
    projected = getattr(module, f"{name}_proj")(rows)
    heads: Tensor = projected.unflatten(-1, (-1, module.head_dim))
    norm = getattr(module, f"{name}_norm", None)
    return (heads if norm is None else norm(heads)).transpose(1, 2)


def make_layers(config: HeadConfig) -> HeadLayers:
    """Return new layers of a config: Llama's, or with `qk_norm` Qwen3's."""
    config_class: Any = Qwen3Config if config.qk_norm else LlamaConfig
    layer_class = Qwen3DecoderLayer if config.qk_norm else llama.LlamaDecoderLayer
    own: dict[str, Any] = {} if config.qk_norm else {"mlp_bias": config.mlp_bias}
    own |= {"bos_token_id": None, "eos_token_id": None}
    whole = config_class(**config.fields, **own, rope_parameters=dict(config.rope))
    layers = [layer_class(whole, index) for index in range(config.num_layers)]
    return HeadLayers(layers, llama.LlamaRotaryEmbedding(whole), whole)


def make_target_layers(model: Any, count: int) -> HeadLayers:
    """Make `count` new layers of the target's kind; raises `UnsupportedModelError`."""
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    layer_class = type(decoder_layers(model)[-1])
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    # An unknown architecture may raise anything.
    fact = f"no MTP layer can be made of {layer_class.__name__}"
    fix = "export without the head (--head none)"
    with as_error(UnsupportedModelError, Exception, fact, fix):
        config.num_hidden_layers = count
        if hasattr(config, "layer_types"):
            kinds = getattr(config, "mtp_layer_types", None)
            config.layer_types = list(kinds or ["full_attention"] * count)
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0  # later layers than the dense ones
        if hasattr(config, "mlp_layer_types"):
            kinds = getattr(config, "mtp_mlp_layer_types", None)
            config.mlp_layer_types = list(kinds or ["sparse"] * count)
        layers = [layer_class(config, index) for index in range(count)]
    if rotary is None:
        fact = "has no rotary embedding, so its MTP layer cannot be made"
        raise UnsupportedModelError.of(model, fact, fix)
    return HeadLayers(layers, copy.deepcopy(rotary), config)
