"""Drafters before they are trained: new, or cut from their target."""

from __future__ import annotations

import copy
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.errors import OptionError
from jetdraft.train.drafter.advice import SHARE, cost_share

HEAD_SIZES = (64, 32, 16, 8)
"""Sizes of an attention head; the first that divides the width is taken."""

STEP = 64
"""New widths are multiples of it."""

MOST_LAYERS = 4
WIDTH_PER_LAYER = 96
"""A drafter is wide rather than deep, since each layer launches its kernels."""


def new_config(target: Checkpoint, layers: int, hidden_size: int) -> LlamaConfig:
    """A Llama of this size with the target's vocabulary and positions.

    Raises `OptionError` for a width that no head divides.
    """
    text = target.model.config.get_text_config(decoder=True)
    sizes = [size for size in HEAD_SIZES if hidden_size % size == 0]
    if not sizes:
        raise OptionError(
            f"hidden size {hidden_size} is not a multiple of {HEAD_SIZES[-1]}; give "
            f"for example a multiple of {STEP}"
        )
    heads = hidden_size // sizes[0]
    shared = [n for n in range(1, max(1, heads // 3) + 1) if heads % n == 0]
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=-(-hidden_size * 8 // 3 // STEP) * STEP,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared[-1],
        head_dim=sizes[0],
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(target.eos_token_ids) or None,
        pad_token_id=None,
    )


def advised_config(
    target: Checkpoint,
    layers: int | None,
    hidden_size: int | None,
    draft_vocab: int | None,
) -> LlamaConfig:
    """The config of the largest drafter whose step costs `SHARE` of a pass at most.

    A size that is given stays. The smallest, if none is that cheap. Raises
    `CheckpointError` for a target whose cost cannot be planned.
    """
    whole = target.model.config.to_dict()

    def affordable(depth: int) -> LlamaConfig | None:
        most = whole_width(target) if hidden_size is None else 0
        widths = [hidden_size] if hidden_size else range(STEP, most + 1, STEP)
        cheap = [
            config
            for config in (new_config(target, depth, width) for width in widths)
            if cost_share(config.to_dict(), whole, draft_vocab) <= SHARE
        ]
        return cheap[-1] if cheap else None

    depths = [layers] if layers else range(MOST_LAYERS, 0, -1)
    for depth in depths:
        config = affordable(depth)
        wide = config is not None and config.hidden_size >= WIDTH_PER_LAYER * depth
        if config is not None and (wide or depth == depths[-1] or hidden_size):
            return config
    return new_config(target, layers or 1, hidden_size or STEP)


def whole_width(target: Checkpoint) -> int:
    """The width of the target's LM head."""
    return int(target.model.get_output_embeddings().weight.shape[1])


def first_layers(target: Checkpoint, layers: tuple[int, ...]) -> Any:
    """A copy of the target that has these of its layers, in this order.

    Embedding, final norm and LM head are the target's. Raises `OptionError`.
    """
    list_of_layers = decoder_layers(target.model)
    if any(not 0 <= layer < len(list_of_layers) for layer in layers):
        raise OptionError(
            f"the layers {list(layers)} are not all layers of this target; give "
            f"--from-layers with numbers from 0 to {len(list_of_layers) - 1}"
        )
    model = type(target.model)(_shortened(target.model.config, layers))
    modules = target.model.named_modules()
    prefix = next(name for name, module in modules if module is list_of_layers) + "."
    weights = target.model.state_dict()
    kept = {name: w for name, w in weights.items() if not name.startswith(prefix)}
    for number, layer in enumerate(layers):
        own = list_of_layers[layer].state_dict()
        kept |= {f"{prefix}{number}.{name}": weight for name, weight in own.items()}
    model.load_state_dict(kept)
    return model


def _shortened(config: Any, layers: tuple[int, ...]) -> Any:
    """The config of a model that has these layers only."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = len(layers)
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in layers]
    return config


def new_model(config: LlamaConfig) -> Any:
    """An untrained drafter in float32."""
    return LlamaForCausalLM(config)
