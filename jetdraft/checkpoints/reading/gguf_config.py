"""Sets in a config what transformers does not read of a GGUF file's metadata.

It reads some fields of some families, by a list; a number that it leaves out keeps the
default of the config, which is another model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jetdraft.errors import UnsupportedModelError, printable

_NUMBERS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": (
        *("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    ),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
"""Fields behind the family's name, and the names that configs have for them."""

_NO_NUMBER = "the models of this family have no such number"

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}

_BASE = 10000.0
"""The base of rotations in a file that has none."""


@dataclass(frozen=True)
class FamilyFields:
    """The fields behind the name of the family; `field` gives any field of the file.

    The methods raise `UnsupportedModelError` for a number that the family's models
    do not have.

        FamilyFields("model.gguf", "llama", file.field).set_numbers(config)
    """

    source: str
    family: str
    field: Callable[[str], Any]

    def own(self, name: str) -> Any:
        """The value of a field; None for one that the file lacks."""
        return self.field(f"{self.family}.{name}")

    def set_numbers(self, config: Any) -> None:
        """Set the size of heads, norms, caps and windows."""
        size = self.own("attention.key_length")
        if size is not None and getattr(config, "head_dim", size) is not None:
            config.head_dim = size
        for name, attributes in _NUMBERS.items():
            value = self.own(name)
            known = [each for each in attributes if hasattr(config, each)]
            if value is not None and known:
                setattr(config, known[0], value or None)
            elif value and "epsilon" not in name:  # a model has one kind of norms
                raise self._refusal(name)
        if hasattr(config, "query_pre_attn_scalar"):
            # So does llama.cpp: the models of 27 B scale by another size.
            is_27b = _LAYERS_OF_27B.get(self.family) == config.num_hidden_layers
            width = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = width if is_27b else head_size(config)
        self._set_windows(config)
        parallel = getattr(config, "use_parallel_residual", False)
        self._check_equal("use_parallel_residual", parallel)
        self._check_equal("attention.value_length", head_size(config))

    def _set_windows(self, config: Any) -> None:
        """Set the width of windows, which layers of the families' own choice have."""
        name = "attention.sliding_window"
        window, kinds = self.own(name), getattr(config, "layer_types", None)
        has_windows = not kinds or "sliding_attention" in kinds
        if window and has_windows and hasattr(config, "sliding_window"):
            config.sliding_window = window
        elif window and window < config.max_position_embeddings:
            raise self._refusal(name)
        kinds = kinds or [""] * config.num_hidden_layers
        windows = [kind == "sliding_attention" for kind in kinds]
        pattern = self.own(f"{name}_pattern")
        if isinstance(pattern, int) and pattern > 0:  # all layers but each such one
            pattern = [place % pattern != 0 for place in range(1, len(kinds) + 1)]
        if pattern not in (None, windows):
            raise self._refusal(f"{name}_pattern")

    def set_rotations(self, config: Any, scaling: dict[str, Any] | None = None) -> None:
        """Set the base and the scaling of rotations, or this `scaling`."""
        parameters, base = config.rope_parameters, self.own("rope.freq_base") or _BASE
        full = parameters.get("full_attention", parameters)
        local = self.own("rope.freq_base_swa")
        full["rope_theta"] = base
        if "sliding_attention" in parameters:
            parameters["sliding_attention"]["rope_theta"] = local or _BASE
        elif local not in (None, base):
            raise self._refusal("rope.freq_base_swa")
        size, turned = head_size(config), self.own("rope.dimension_count")
        share = full.get("partial_rotary_factor")
        if turned is not None and turned != int(size * (share or 1)):
            if share is None:
                raise self._refusal("rope.dimension_count")
            full["partial_rotary_factor"] = turned / size
        own = self._scaling(config)
        if scaling and own:
            raise self._refusal("rope.scaling.factor")
        full.update(scaling or own)

    def _scaling(self, config: Any) -> dict[str, Any]:
        """The scaling of rotations by transformers' names; empty for none.

        As in llama.cpp a factor without a type is linear.
        """
        kind = self.own("rope.scaling.type") or "linear"
        factor = self.own("rope.scaling.factor") or self.own("rope.scale_linear") or 1
        strength = self.own("rope.scaling.attn_factor") or 1.0
        if kind not in ("none", "linear", "yarn"):
            raise UnsupportedModelError(
                f"{self.source} scales its rotations by {kind!r}, which is not known; "
                "export its Hugging Face folder"
            )
        if kind != "yarn" and strength != 1:
            raise self._refusal("rope.scaling.attn_factor")
        if kind == "none" or (kind == "linear" and factor == 1):
            return {}
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "linear":
            return scaling
        original = self.own("rope.scaling.original_context_length")
        bounds = {
            name: value
            for name in ("beta_fast", "beta_slow")
            if (value := self.own(f"rope.scaling.yarn_{name}")) is not None
        }
        return {
            **scaling,
            "original_max_position_embeddings": original
            or config.max_position_embeddings,
            "attention_factor": strength * (0.1 * math.log(factor) + 1),
            **bounds,
        }

    def _check_equal(self, name: str, expected: object) -> None:
        """Refuse a field with another value than the model has."""
        if self.own(name) not in (None, expected):
            raise self._refusal(name, f"its model here has {expected}")

    def _refusal(self, name: str, why: str = _NO_NUMBER) -> UnsupportedModelError:
        return refusal(self.source, f"{self.family}.{name}", self.own(name), why)


def refusal(source: str, name: str, value: object, why: str) -> UnsupportedModelError:
    """The error for a field that nothing here computes with.

    raise refusal("model.gguf", "llama.logit_scale", 0.5, "no model computes with it")
    """
    return UnsupportedModelError(
        f"{source} has {name} {printable(value, 40)}, and {why}; export its Hugging "
        "Face folder"
    )


def head_size(config: Any) -> int:
    """The numbers in a head's query.

    head_size(LlamaConfig())    # 128
    """
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)
