"""The weights and buffers of a decoder's layers, counted from its config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jetdraft.contracts.constants import EXPERTS, WIDEST
from jetdraft.errors import CheckpointError, UnsupportedModelError

Config = Mapping[str, Any]
# The fields that say how many experts a token uses.
_USED = ("num_experts_per_tok", "top_k_experts", "moe_k")
# The fields that count experts which every token uses, and that give their width.
_SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
_SHARED_SIZE = ("shared_expert_intermediate_size", "shared_intermediate_size")
# Fields of sizes that a config may lack; each may be 0.
OPTIONAL = (
    *(*EXPERTS, *_USED, *_SHARED, *_SHARED_SIZE, "moe_intermediate_size"),
    *("global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "laurel_rank"),
    *("sliding_window", "altup_num_inputs"),
)
# The families whose queries have a gate beside them, where their config says nothing.
_GATED = ("qwen3_next", "qwen3_5")
# The fields that count dense layers before the layers with experts.
_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


class LayerCounts(NamedTuple):
    """Weights, and numbers in buffers, of a layer or of all layers.

    `matrices` counts what every row is multiplied with, `expert` the weights of an
    expert. A token adds `kv_values` to the buffers of layers that see all rows, and
    `window_values` to the buffers of layers with a window. A layer with a recurrent
    state has `state_values`, and keeps `kept_values` of a pass of `WIDEST` rows.
    """

    matrices: int = 0
    expert: int = 0
    kv_values: int = 0
    window_values: int = 0
    state_values: int = 0
    kept_values: int = 0


def experts_of(config: Config) -> tuple[int, int]:
    """The experts of a layer, and how many a token uses; (0, 0) for a dense model."""
    counts = [config.get(name) for name in EXPERTS]
    most = max((int(n) for n in counts if isinstance(n, int)), default=0)
    switches = config.get("is_moe"), config.get("enable_moe_block")
    if most < 2 or False in switches:
        return 0, 0
    used = _first(config, _USED)
    if type(used) is not int or not 1 <= used <= most:
        raise UnsupportedModelError(
            "the config is of a mixture of experts, and does not say how many of them "
            f"a token uses ({', '.join(_USED)}); give a model's whole config.json"
        )
    return most, used


def count_layers(config: Config) -> LayerCounts:
    """Count all layers of a config whose sizes were checked."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    first_shared = layers - int(config.get("num_kv_shared_layers") or 0)
    kinds = _kinds(config)
    counts = [
        _count_layer(config, index, kinds[index], index >= first_shared)
        for index in range(layers)
    ]
    total = LayerCounts(*map(sum, zip(*counts, strict=True)))
    # The projections of embeddings that each layer has, and of Gemma 3n's streams.
    width = _layer_width(config)
    streams = int(config.get("altup_num_inputs") or 1) - 1
    more = hidden * layers * width + streams * 2 * hidden * hidden
    return total._replace(matrices=total.matrices + more)


def layer_table(config: Config) -> int:
    """The numbers in the table of embeddings that each layer has."""
    rows = int(config.get("vocab_size_per_layer_input") or config["vocab_size"])
    return rows * int(config["num_hidden_layers"]) * _layer_width(config)


def _layer_width(config: Config) -> int:
    """The width of the embeddings that each layer has; 0 without any."""
    if str(config.get("model_type")).startswith("gemma4_unified"):
        return 0  # its config has the field all the same
    return int(config.get("hidden_size_per_layer_input") or 0)


def _kinds(config: Config) -> list[str]:
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    every = config.get("full_attention_interval")
    if kinds is None and every:
        turns = range(1, layers + 1)
        kinds = ["linear_attention" if n % every else "full_attention" for n in turns]
    kinds = list(kinds or ["full_attention"] * layers)
    if len(kinds) < layers:
        raise CheckpointError(
            f"the config has {len(kinds)} layer_types for {layers} layers; give a "
            "causal language model's config"
        )
    return kinds


def _count_layer(config: Config, index: int, kind: str, shares: bool) -> LayerCounts:
    hidden = config["hidden_size"]
    if kind == "linear_attention":
        mixing = _linear_attention(config)
    elif kind == "conv":  # three parts, and the output
        rows = int(config.get("conv_L_cache") or 3) - 1
        mixing = LayerCounts(
            4 * hidden * hidden, state_values=rows * hidden, kept_values=WIDEST * hidden
        )
    else:
        own = (config.get("per_layer_config") or {}).get(str(index), {})
        mixing = _attention({**config, **own}, kind, shares)
    matrices, expert = _feed_forward(config, index, shares)
    narrow = _layer_width(config) + int(config.get("laurel_rank") or 0)
    matrices += 2 * hidden * narrow
    return mixing._replace(matrices=mixing.matrices + matrices, expert=expert)


def _attention(config: Config, kind: str, shares: bool) -> LayerCounts:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = int(config.get("num_key_value_heads") or heads)
    size = int(config.get("head_dim") or hidden // heads)
    values = 2  # keys have a matrix, and values
    if kind == "full_attention" and config.get("attention_k_eq_v"):
        values = 1
        kv_heads = int(config.get("num_global_key_value_heads") or kv_heads)
    if kind == "full_attention":
        size = int(config.get("global_head_dim") or size)
    # q, k, v and o; a gated output doubles q.
    family = str(config.get("model_type"))
    gated = config.get("attn_output_gate", family.startswith(_GATED))
    columns = (2 + bool(gated)) * heads
    columns += 0 if shares else values * kv_heads
    kept = 0 if shares else 2 * kv_heads * size
    slides = kind == "sliding_attention" and bool(config.get("sliding_window"))
    return LayerCounts(
        hidden * columns * size,
        kv_values=kept * (not slides),
        window_values=kept * slides,
    )


def _linear_attention(config: Config) -> LayerCounts:
    """Count q, k, v, the gate and the output, a convolution, and matrices of heads."""
    heads, size = config["linear_num_value_heads"], config["linear_key_head_dim"]
    keys = config["linear_num_key_heads"] * size
    values = heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    window = int(config.get("linear_conv_kernel_dim") or 4) - 1
    # Of a row: what enters the convolution, and keys, values and two gates of heads.
    row = channels + keys + values + 2 * heads
    return LayerCounts(
        config["hidden_size"] * (2 * keys + 3 * values),
        state_values=values * size + window * channels,
        kept_values=WIDEST * row,
    )


def _feed_forward(config: Config, index: int, shares: bool) -> tuple[int, int]:
    """Weights of the MLP of a layer that every row reads, and of an expert."""
    hidden, (experts, _) = config["hidden_size"], experts_of(config)
    if not experts or _is_dense(config, index):
        return 3 * hidden * _inner_size(config, index, shares), 0
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    beside = _first(config, _SHARED_SIZE)
    if config.get("enable_moe_block"):
        beside = _inner_size(config, index, shares)
    if beside is None:
        beside = width * int(_first(config, _SHARED) or 0)
    return 3 * hidden * int(beside) + hidden * experts, 3 * hidden * width


def _is_dense(config: Config, index: int) -> bool:
    kinds = config.get("mlp_layer_types")
    if kinds:
        return bool(kinds[index] == "dense")
    step = _first(config, ("decoder_sparse_step", "moe_layer_interval")) or 1
    is_dense = index < int(_first(config, _DENSE) or 0) or (index + 1) % step > 0
    return is_dense or index in (config.get("mlp_only_layers") or ())


def _inner_size(config: Config, index: int, shares: bool) -> int:
    """The width inside the MLP of a layer, which LFM2 computes from its config."""
    sizes = config["intermediate_size"]
    size = int(sizes[index] if isinstance(sizes, list) else sizes)
    if config.get("block_auto_adjust_ff_dim"):
        part = int(float(config.get("block_ffn_dim_multiplier") or 1) * (2 * size // 3))
        multiple = int(config.get("block_multiple_of") or 256)
        size = -(-part // multiple) * multiple
    return size * (2 if shares and config.get("use_double_wide_mlp") else 1)


def _first(config: Config, names: tuple[str, ...]) -> Any:
    return next((config[n] for n in names if config.get(n) is not None), None)
