"""The time and the memory of a pass, from a model's config.json and a device's rates.

ms(width) = fixed + bytes read / bandwidth + (width - 1) * operations per row / rate
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jetdraft import errors
from jetdraft.contracts.tensors import EXPERTS, WIDEST
from jetdraft.devices.device import PowerMode
from jetdraft.errors import CheckpointError, UnsupportedModelError, as_error, printable
from jetdraft.manifest import MANIFEST
from jetdraft.parsing import JsonError, read_json_file
from jetdraft.recipe import GRIDS, HEAD, SYMMETRIC, Recipe

CONFIG = "config.json"
# Bytes of a number in a recurrent state; a state is kept twice: now, after the prompt.
STATE_BYTES, STATE_PLACES = 4, 2
MAX_SIZE = 10_000_000  # The largest size that a config may have.
# Sizes that a config must have. Layers of linear attention need more: heads of keys and
# of values, and the size of each. Mamba2 has other names for them, Nemotron-H its own.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
LINEAR_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
MAMBA_SIZES = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head")
NEMOTRON_SIZES = ("n_groups", "mamba_num_heads", "ssm_state_size", "mamba_head_dim")
# The fields that say how many rows a convolution sees.
KERNELS = ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache")
# Kinds of layers by their names in other configs.
_KIND_NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KIND_NAMES |= {"mamba": "linear_attention", "attention": "full_attention"}
_BOTH = "both"  # A layer that attends beside a recurrence.
# The kinds of layers that a plan counts, and what to do about other kinds.
_KNOWN = {*_KIND_NAMES.values(), _BOTH, "conv"}
_KNOWN |= {"sliding_attention", "chunked_attention"}
_MEASURE = "export the model and measure it on the device"
# Other errors that a config raises whose fields have wrong types.
_MALFORMED = TypeError, ValueError, AttributeError
# Bytes of a float on a GPU, and on a CPU.
HALF_BYTES, SINGLE_BYTES = 2.0, 4.0
RUNTIME_MB = 813.0  # A session beside weights and KV; fitted, see docs/devices.md.
# The most bytes of a draft step, as a share of a target pass's (docs/devices.md).
MAX_READ_SHARE = 0.05
# Tokens to train on for each weight; training costs once, a weight in every draft.
TOKENS_PER_WEIGHT = 200
Config = Mapping[str, Any]
# The fields that say how many experts a token uses.
_USED = ("num_experts_per_tok", "top_k_experts", "moe_k")
# The fields that count experts which every token uses, and that give their width.
_SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
_SHARED_SIZE = (
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "shared_intermediate_size",
)
# Fields of sizes that a config may lack; each may be 0.
OPTIONAL = (
    *(*EXPERTS, *_USED, *_SHARED, *_SHARED_SIZE, "moe_intermediate_size"),
    *("global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "laurel_rank"),
    *("sliding_window", "altup_num_inputs", "moe_latent_size"),
)
# Sizes of a config by GGUF's names; windows are left out, which only save reading.
_GGUF_SIZES = {
    **{"hidden_size": "embedding_length", "num_hidden_layers": "block_count"},
    **{"intermediate_size": "feed_forward_length", "num_experts": "expert_count"},
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    **{"head_dim": "attention.key_length", "conv_L_cache": "shortconv.l_cache"},
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    **{"ssm_state_size": "ssm.state_size", "kv_lora_rank": "attention.kv_lora_rank"},
}
# The families whose queries have a gate beside them, where their config says nothing.
_GATED = ("qwen3_next", "qwen3_5")
# The fields that count dense layers before the layers with experts.
_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


@dataclass(frozen=True)
class LayerCounts:
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


@dataclass(frozen=True, kw_only=True)
class Dimensions(LayerCounts):
    """How many weights a decoder has, and how many numbers its caches hold.

    `head` counts the weights of the LM head; the embedding has as many, and where
    `tied` the two are one matrix. A pass reads `window_values` for the last `window`
    tokens only. A row uses `used` of the `experts` of each layer that has some. A
    `table` of embeddings for each layer is read by rows.
    """

    hidden_size: int
    layers: int
    head: int
    tied: bool
    window: int
    experts: int
    used: int
    table: int

    @classmethod
    def read(cls, path: Path) -> "Dimensions":
        """Read a config.json, its folder, or a GGUF file; raises `CheckpointError`."""
        file = path / CONFIG if path.is_dir() else path
        if (path / MANIFEST).is_file():
            fact = f"{path} is a bundle, and a plan reads checkpoints"
            fix = "give the folder or the config.json that it was exported from"
            raise CheckpointError(f"{fact}; {fix}")
        fix = "give the config.json or the GGUF file of a causal language model"
        refusal = CheckpointError(f"{file} does not describe a decoder; {fix}")
        with (
            errors.refusing(refusal, LookupError, ArithmeticError, *_MALFORMED),
            as_error(CheckpointError, OSError, f"cannot read {file}", fix),
            as_error(CheckpointError, JsonError, f"{file} is not JSON or GGUF", fix),
        ):
            if _is_gguf(file):
                return cls.of(_read_gguf(file)[0])
            return cls.of(read_json_file(file, infinite=True))

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Dimensions":
        """Count the weights of a parsed config.json, or of its text_config.

        Raises `CheckpointError`, or `UnsupportedModelError` for what no plan predicts.
        """
        whole, config = config, _usual_names(config.get("text_config", config))
        tied = whole.get("tie_word_embeddings", whole.get("tie_embedding"))
        mamba = any(config.get(name) for name in ("mamba_d_state", "ssm_state_size"))
        fact = ""
        if whole.get("is_encoder_decoder"):
            fact = "is of an encoder-decoder, and a plan predicts decoders only"
        elif mamba and _recurrent_sizes(config) == LINEAR_SIZES:
            fact = "has Mamba layers of a kind that a plan does not know"
        elif config.get("kv_lora_rank"):
            fact = "has latent attention, whose sizes a plan does not know"
        if fact:
            raise UnsupportedModelError(f"the config {fact}; {_MEASURE}")
        experts, used = experts_of(config)
        inner = "moe_intermediate_size" if experts else "intermediate_size"
        inner = inner if config.get(inner) is not None else "intermediate_size"
        layers = config["num_hidden_layers"]  # without it this is no decoder
        _check_sizes(config, (*SIZES, inner))
        if {"linear_attention", _BOTH} & {*_kinds(config)}:
            _check_sizes(config, _recurrent_sizes(config))
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads:
            fact = f"the config's {heads} heads cannot share {kv_heads} heads of keys"
            raise CheckpointError(f"{fact}; give a causal language model's config")
        rows = int(config.get("vocab_size_per_layer_input") or config["vocab_size"])
        counts = count_layers(config)
        return cls(
            **vars(counts),
            hidden_size=hidden,
            layers=layers,
            head=hidden * config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings") if tied is None else tied),
            window=int(config.get("sliding_window") or 0),
            experts=experts * bool(counts.expert),
            used=used * bool(counts.expert),
            table=rows * layers * _layer_width(config),
        )

    @property
    def weights(self) -> int:
        """The number of weights, embedding included and norms left out."""
        embeddings = self.head * (1 if self.tied else 2) + self.table
        return self.matrices + self.experts * self.expert + embeddings

    @property
    def row_weights(self) -> int:
        """The weights of the layers that a row is multiplied with."""
        return self.matrices + self.used * self.expert

    def read_weights(self, rows: int = 1) -> float:
        """The weights of the layers that a pass reads, if rows choose at random."""
        if not self.experts:
            return self.matrices
        spared = (1 - self.used / self.experts) ** rows
        return self.matrices + self.experts * (1 - spared) * self.expert


def _usual_names(config: dict[str, Any]) -> dict[str, Any]:
    """Give the fields of LFM2 and of Nemotron-H the names that others have."""
    if "block_ff_dim" in config:
        own = {"intermediate_size": config["block_ff_dim"]}
        config = {"tie_word_embeddings": True, **config, **own}
    # A layer of Nemotron-H attends, is recurrent or has an MLP; heads have 128 numbers.
    blocks = _first(config, ("layers_block_type", "hybrid_override_pattern"))
    if blocks is not None:
        kinds = [_KIND_NAMES.get(kind, kind) for kind in blocks]
        own = {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}
        config = {"head_dim": 128, **config, **own}
    return config


def _check_sizes(config: dict[str, Any], needed: tuple[str, ...]) -> None:
    optional = ("num_key_value_heads", "head_dim", "full_attention_interval", *KERNELS)
    present = [n for n in (*optional, *OPTIONAL) if config.get(n) is not None]
    for name in (*needed, *present):
        value, least = config.get(name), int(name not in OPTIONAL)
        values = value if isinstance(value, list) and value else [value]
        if not all(type(n) is int and least <= n <= MAX_SIZE for n in values):
            fact = f"the config's {name} is {repr(value)[:20]}"
            raise CheckpointError(f"{fact}; give a causal language model's config")


def experts_of(config: Config) -> tuple[int, int]:
    """The experts of a layer, and how many a token uses; (0, 0) for a dense model."""
    counts = [config.get(name) for name in EXPERTS]
    most = max((int(n) for n in counts if isinstance(n, int)), default=0)
    if most < 2 or False in (config.get("is_moe"), config.get("enable_moe_block")):
        return 0, 0
    used = _first(config, _USED)
    if type(used) is not int or not 1 <= used <= most:
        fact = "the config is of a mixture of experts, and does not say how many of "
        fact += f"them a token uses ({', '.join(_USED)})"
        raise UnsupportedModelError(f"{fact}; give a model's whole config.json")
    return most, used


def count_layers(config: Config) -> LayerCounts:
    """Count all layers of a config whose sizes were checked."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    first_shared = layers - int(config.get("num_kv_shared_layers") or 0)
    # The projections of embeddings that each layer has, and two of each further stream.
    beside = 2 * int(config.get("altup_num_inputs") or 1) - 2
    counts = [LayerCounts(hidden * (layers * _layer_width(config) + beside * hidden))]
    for index, kind in enumerate(_kinds(config)[:layers]):
        counts += _layer_parts(config, index, kind, index >= first_shared)
    return LayerCounts(*map(sum, zip(*map(astuple, counts), strict=True)))


def _layer_width(config: Config) -> int:
    """The width of the embeddings that each layer has; 0 without any."""
    if str(config.get("model_type")).startswith("gemma4_unified"):
        return 0  # its config has the field all the same
    return int(config.get("hidden_size_per_layer_input") or 0)


def _kinds(config: Config) -> list[str]:
    layers = config["num_hidden_layers"]
    # Where a config names no kinds, it says which layers attend, or how often they do.
    never = _recurrent_sizes(config) is not LINEAR_SIZES
    usual = 4 if LINEAR_SIZES[0] in config else layers + 1 if never else 1
    every = config.get("full_attention_interval") or usual
    attending = _first(config, ("attn_layer_indices", "full_attn_idxs"))
    if attending is None:
        attending = range(every - 1, layers, every)
    other = "conv" if "full_attn_idxs" in config else "linear_attention"
    other = _BOTH if config.get("model_type") == "falcon_h1" else other
    own = ["full_attention" if n in attending else other for n in range(layers)]
    kinds = _first(config, ("layer_types", "layers_block_type"))
    kinds = [_KIND_NAMES.get(kind, kind) for kind in (own if kinds is None else kinds)]
    for kind in kinds:
        if kind not in _KNOWN:
            fact = f"the config has layers of a kind that a plan does not know ({kind})"
            raise UnsupportedModelError(f"{printable(fact, 120)}; {_MEASURE}")
    if len(kinds) != layers:
        fact = f"the config has {len(kinds)} layer_types for {layers} layers"
        raise CheckpointError(f"{fact}; give a causal language model's config")
    return kinds


def _layer_parts(
    config: Config, index: int, kind: str, shares: bool
) -> Iterator[LayerCounts]:
    hidden = config["hidden_size"]
    narrow = _layer_width(config) + int(config.get("laurel_rank") or 0)
    yield LayerCounts(2 * hidden * narrow)
    if kind == "conv":  # three parts, and the output
        rows = int(config.get("conv_L_cache") or 3) - 1
        kept = {"state_values": rows * hidden, "kept_values": WIDEST * hidden}
        yield LayerCounts(4 * hidden * hidden, **kept)
    if kind in ("linear_attention", _BOTH):
        yield _linear_attention(config)
    if kind not in ("linear_attention", "conv", "mlp", "moe"):
        own = (config.get("per_layer_config") or {}).get(str(index), {})
        yield _attention({**config, **own}, kind, shares)
    if kind in ("mlp", "moe") or not config.get("layers_block_type"):
        yield _feed_forward(config, index, shares)


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
    columns = (2 + bool(gated)) * heads + (0 if shares else values * kv_heads)
    kept = 0 if shares else 2 * kv_heads * size
    slides = kind == "sliding_attention" and bool(config.get("sliding_window"))
    rows = {"kv_values": kept * (not slides), "window_values": kept * slides}
    return LayerCounts(hidden * columns * size, **rows)


def _recurrent_sizes(config: Config) -> tuple[str, ...]:
    known = (MAMBA_SIZES, NEMOTRON_SIZES)
    return next((names for names in known if names[1] in config), LINEAR_SIZES)


def _linear_attention(config: Config) -> LayerCounts:
    """Count projections, a convolution and states of the delta rule, or of Mamba2."""
    names = _recurrent_sizes(config)
    key_heads, heads, size, width = (int(config[name]) for name in names)
    keys, values = key_heads * size, heads * width
    channels = 2 * keys + values
    window = int(_first(config, KERNELS) or 4) - 1
    # Each head has a decay, and the delta rule a beta as well.
    gates = heads * (2 if names == LINEAR_SIZES else 1)
    # Of a row: what enters the convolution, and keys, values and gates of heads.
    row = channels + keys + values + gates
    # Queries, keys, values, a gate, the output and the gates of heads.
    matrices = config["hidden_size"] * (2 * keys + 3 * values + gates)
    state = values * size + window * channels
    return LayerCounts(matrices, state_values=state, kept_values=WIDEST * row)


def _feed_forward(config: Config, index: int, shares: bool) -> LayerCounts:
    hidden, (experts, _) = config["hidden_size"], experts_of(config)
    # An MLP of squared ReLUs has no gate, but for BitNet.
    squares = "relu2" in (config.get("hidden_act"), config.get("mlp_hidden_act"))
    gated = not squares or config.get("model_type") == "bitnet"
    columns = hidden * (2 + gated)
    if not experts or _is_dense(config, index):
        return LayerCounts(columns * _inner_size(config, index, shares))
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    beside = _first(config, _SHARED_SIZE)
    if config.get("enable_moe_block"):
        beside = _inner_size(config, index, shares)
    if beside is None:
        beside = width * int(_first(config, _SHARED) or 0)
    latent = int(config.get("moe_latent_size") or 0)  # experts work on fewer values
    matrices = columns * int(beside) + hidden * (experts + 2 * latent)
    return LayerCounts(matrices, (2 + gated) * (latent or hidden) * width)


def _is_dense(config: Config, index: int) -> bool:
    if kinds := _first(config, ("mlp_layer_types", "layers_block_type")):
        return kinds[index] in ("dense", "mlp")
    step = _first(config, ("decoder_sparse_step", "moe_layer_interval")) or 1
    is_dense = index < int(_first(config, _DENSE) or 0) or (index + 1) % step > 0
    return is_dense or index in (config.get("mlp_only_layers") or ())


def _inner_size(config: Config, index: int, shares: bool) -> int:
    """The width inside the MLP of a layer, which LFM2 computes from its config."""
    sizes = config.get("shared_intermediate_size") or config["intermediate_size"]
    size = int(sizes[index] if isinstance(sizes, list) else sizes)
    if config.get("block_auto_adjust_ff_dim"):
        part = int(float(config.get("block_ffn_dim_multiplier") or 1) * (2 * size // 3))
        multiple = int(config.get("block_multiple_of") or 256)
        size = -(-part // multiple) * multiple
    return size * (2 if shares and config.get("use_double_wide_mlp") else 1)


def _first(config: Config, names: tuple[str, ...]) -> Any:
    return next((config[n] for n in names if config.get(n) is not None), None)


def _is_gguf(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(4) == b"GGUF"
    return False


@lru_cache
def _read_gguf(file: Path) -> tuple[dict[str, Any], str | None]:
    """A GGUF file's sizes as a config, and its types' recipe, or None.

    The recipe has the types of most matrices and of the LM head.
    """
    with errors.importing("reading a GGUF file", "export"):
        from gguf import GGUFReader
    reader = GGUFReader(file)
    named = {tensor.name: tensor for tensor in reader.tensors}
    embedding, head = named["token_embd.weight"], named.get("output.weight")
    family = reader.fields["general.architecture"].contents()
    sizes = {
        name: reader.get_field(f"{family}.{own}") for name, own in _GGUF_SIZES.items()
    }
    config = {name: size and size.contents() for name, size in sizes.items()}
    config |= {"model_type": family, "tie_word_embeddings": head is None}
    config["vocab_size"] = int(embedding.shape[1])
    heads = config["num_key_value_heads"]
    if isinstance(heads, list):  # a layer without heads is a convolution
        config["layer_types"] = ["full_attention" if n else "conv" for n in heads]
        config["num_key_value_heads"] = max(heads)
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    types = [each.tensor_type.name.lower() for each in (head or embedding, *matrices)]
    recipe = statistics.mode(types[1:]), types[0]
    return config, "-head".join(recipe) if {*recipe} <= GRIDS.keys() else None


def gguf_recipe(path: Path) -> str | None:
    """The recipe that has the types of a GGUF file; None for other files and types."""
    with suppress(LookupError, ArithmeticError, *_MALFORMED):  # `read` says why
        return _read_gguf(path)[1] if _is_gguf(path) else None
    return None


@dataclass(frozen=True)
class Efficiency:
    """The shares of a device's peak rates that passes reach; the same for every model.

    `compute` is of the dense fp16 rate. `pass_ms` is the time of launches and the host.
    """

    bandwidth: float
    pass_ms: float
    compute: float


# By compute capability, from TensorRT Edge-LLM's published int4 rows, by
# `benchmarks/roofline.py`. onnxruntime has not been measured on these devices.
FITTED = {
    "8.7": Efficiency(0.840, 1.789, 0.469),
    "11.0": Efficiency(0.891, 0.857, 0.119),
    "12.1": Efficiency(0.827, 0.656, 0.900),
}
# The limits of the device: no pass of one row is faster, on any of its processors. What
# a further row costs on a CPU is not known.
BOUND = Efficiency(1.0, 0.0, math.nan)


@dataclass(frozen=True)
class LoadedDecoder:
    """A decoder in the formats of a recipe; predicts its memory and pass times."""

    sizes: Dimensions
    recipe: Recipe
    float_bytes: float = HALF_BYTES

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight of the layers, on average."""
        plain = self.bytes_per_weight(replace(self.recipe, head=None, raised=()))
        raised = self.recipe.raised
        if not raised:
            return plain
        more = self.bytes_per_weight(self.recipe.of_unit(str(raised[0])))
        return plain + len(raised) / self.sizes.layers * (more - plain)

    @property
    def head_bytes(self) -> float:
        """Bytes per weight of the LM head, and of the embedding beside it."""
        return self.bytes_per_weight(self.recipe.of_unit(HEAD))

    @property
    def kv_bytes(self) -> float:
        """Bytes of a number in the KV buffers."""
        return self.recipe.kv_bits / 8 or self.float_bytes

    @property
    def state_mb(self) -> float:
        """MB of 10^6 bytes of the recurrent states, and of the rows they keep."""
        values = self.sizes.state_values + self.sizes.kept_values
        return STATE_PLACES * STATE_BYTES * values / 1e6

    def pass_bytes(self, context: int, rows: int = 1) -> float:
        """Return the bytes that a pass reads after `context` tokens."""
        sizes = self.sizes
        read = sizes.read_weights(rows) * self.weight_bytes
        weights = read + sizes.head * self.head_bytes
        state = 2 * sizes.state_values * STATE_BYTES
        seen = context * sizes.kv_values
        seen += min(context, sizes.window) * sizes.window_values
        return weights + seen * self.kv_bytes + state

    def memory_mb(self, capacity: int) -> float:
        """Return MB of 10^6 bytes of weights, KV buffers of `capacity` rows, state."""
        sizes = self.sizes
        # A tied head and embedding of the same format are one tensor.
        embedding = 0.0 if sizes.tied else sizes.head * self.head_bytes
        cache = capacity * (sizes.kv_values + sizes.window_values) * self.kv_bytes
        layers = sizes.matrices + sizes.experts * sizes.expert + sizes.table
        weights = layers * self.weight_bytes + sizes.head * self.head_bytes
        return (weights + embedding + cache) / 1e6 + self.state_mb

    def pass_ms(
        self, width: int, context: int, mode: PowerMode, efficiency: Efficiency
    ) -> float:
        """Predict the milliseconds of a pass of `width` rows after `context` tokens."""
        read = self.pass_bytes(context, width)
        reading = read / (mode.bandwidth_gbs * efficiency.bandwidth)
        rows_ms = (width - 1) * self.row_ms(mode, efficiency) if width > 1 else 0.0
        return efficiency.pass_ms + reading / 1e6 + rows_ms

    def row_ms(self, mode: PowerMode, efficiency: Efficiency) -> float:
        """Predict the milliseconds of arithmetic for each row after the first."""
        rate = mode.fp16_tflops * efficiency.compute
        return 2 * (self.sizes.row_weights + self.sizes.head) / (rate * 1e9)

    def bytes_per_weight(self, recipe: Recipe) -> float:
        """Bytes per weight, with a scale and a zero per `block_size` weights."""
        if recipe.scheme in GRIDS:
            return GRIDS[recipe.scheme] / 8
        if recipe.bits is None:
            return self.float_bytes
        zero = 0.0 if recipe.algorithm in SYMMETRIC else recipe.bits / 8
        return recipe.bits / 8 + (self.float_bytes + zero) / recipe.block_size


@dataclass(frozen=True)
class EncoderWork:
    """What an encoder does for a picture of `width` x `height` pixels.

    Its `passes` make the `rows`, with `gflop` in all. A layer reads and writes at most
    `mb` of 10^6 bytes beside its weights.
    """

    width: int
    height: int
    rows: int
    passes: int
    gflop: float
    mb: float


@dataclass(frozen=True)
class Encoder:
    """An encoder of pictures: its weights, the numbers of a row, what pictures take."""

    weights: int
    row_size: int
    work: tuple[EncoderWork, ...]

    def weight_mb(self, target: LoadedDecoder) -> float:
        """MB of 10^6 bytes of its weights beside a target."""
        return self.weights * target.bytes_per_weight(target.recipe.of_encoder) / 1e6
