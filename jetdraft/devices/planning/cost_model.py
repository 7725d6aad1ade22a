"""The time and the memory of a pass, from a model's config.json and a device's rates.

    ms(width) = fixed + bytes read / bandwidth + (width - 1) * operations per row / rate

In published figures the two times add up (docs/devices.md has the fit).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetdraft.devices.device import PowerMode
from jetdraft.devices.planning.layer_counts import (
    OPTIONAL,
    count_layers,
    experts_of,
    layer_table,
)
from jetdraft.errors import CheckpointError, UnsupportedModelError
from jetdraft.manifest import MANIFEST
from jetdraft.parsing import read_json_file
from jetdraft.recipe import GRIDS, HEAD, SYMMETRIC, Recipe

CONFIG = "config.json"
# Bytes of a number in a recurrent state, and how often the runtime has each state: in
# use, and as it was at the end of the prompt.
STATE_BYTES, STATE_PLACES = 4, 2
MAX_SIZE = 10_000_000  # The largest size that a config may have.
# Sizes that a config must have, and further ones for layers of linear attention.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
LINEAR_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
# Other errors that a config raises whose fields have wrong types.
_MALFORMED = TypeError, ValueError, AttributeError
# Bytes of a float on a GPU, and on a CPU: of a weight, a scale, or a number in the KV
# buffers.
HALF_BYTES, SINGLE_BYTES = 2.0, 4.0
RUNTIME_MB = 813.0  # A session beside weights and KV; fitted, see docs/devices.md.
# The most bytes that a draft step should read, as a share of the bytes that a pass of
# the target reads; reading bounds the time of both (docs/devices.md).
MAX_READ_SHARE = 0.05
# Tokens to train on for each weight: they leave half of what the usual 20 leave above
# the loss of endless training. Training costs once, a weight in every draft.
TOKENS_PER_WEIGHT = 200


@dataclass(frozen=True)
class Dimensions:
    """How many weights a decoder has, and how many numbers its caches hold.

    `matrices` counts the weights of the layers' matrices that every row is multiplied
    with, `head` the weights of the LM head; the embedding has as many, and where `tied`
    the two are one matrix. `kv_values` are stored per token, and so are
    `window_values`, which a pass reads for the last `window` tokens only.
    `state_values` belong to layers with a recurrent state, which read and write them in
    every pass, and `kept_values` to the rows that such a layer keeps. A row uses `used`
    of the `experts` of each layer that has some; `expert` counts the weights of an
    expert in all layers. A `table` of embeddings for each layer is read by rows.
    """

    hidden_size: int
    layers: int
    matrices: int
    head: int
    tied: bool
    kv_values: int
    state_values: int
    kept_values: int = 0
    window_values: int = 0
    window: int = 0
    experts: int = 0
    used: int = 0
    expert: int = 0
    table: int = 0

    @classmethod
    def read(cls, path: Path) -> "Dimensions":
        """Read a config.json, or the folder with it; raises `CheckpointError`."""
        file = path / CONFIG if path.is_dir() else path
        if (path / MANIFEST).is_file():
            raise CheckpointError(
                f"{path} is a bundle, and a plan reads checkpoints; give the folder or "
                "the config.json that it was exported from"
            )
        try:
            with file.open("rb") as opened:
                is_gguf = opened.read(4) == b"GGUF"
            config = {} if is_gguf else read_json_file(file)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {file} ({error.strerror}); give a config.json"
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"{file} is not JSON ({error}); give a config.json"
            ) from error
        if is_gguf:
            raise CheckpointError(
                f"{file} is a GGUF file, which a plan does not read; give the "
                "config.json of the model"
            )
        try:
            return cls.of(config)
        except (LookupError, ArithmeticError, *_MALFORMED) as error:
            raise CheckpointError(
                f"{file} does not describe a decoder; give the config.json of a causal "
                "language model"
            ) from error

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Dimensions":
        """Count the weights of a parsed config.json, or of its text_config.

        Raises `CheckpointError`, or `UnsupportedModelError` for what no plan predicts.
        """
        if config.get("is_encoder_decoder"):
            raise UnsupportedModelError(
                "the config is of an encoder-decoder, and a plan predicts decoders "
                "only; export the model and measure it on the device"
            )
        tied = config.get("tie_word_embeddings", config.get("tie_embedding"))
        config = config.get("text_config", config)
        kinds = config.get("layer_types") or ()
        mamba = any(config.get(name) for name in ("mamba_d_state", "ssm_state_size"))
        if mamba and {*kinds} != {"attention"}:
            raise UnsupportedModelError(
                "the config has Mamba layers, whose passes a plan cannot predict; "
                "export the model and measure it on the device"
            )
        if config.get("kv_lora_rank"):
            raise UnsupportedModelError(
                "the config has latent attention, whose sizes a plan does not know; "
                "export the model and measure it on the device"
            )
        tied = config.get("tie_word_embeddings", False) if tied is None else tied
        linear = _count_linear_layers(config)
        experts, used = experts_of(config)
        inner = "moe_intermediate_size" if experts else "intermediate_size"
        inner = inner if config.get(inner) is not None else "intermediate_size"
        _check_sizes(config, (*SIZES, inner, *(LINEAR_SIZES if linear else ())))
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"the config's {heads} attention heads cannot share {kv_heads} heads "
                "of keys and values; give a causal language model's config"
            )
        counts = count_layers(config)
        return cls(
            hidden_size=hidden,
            layers=layers,
            matrices=counts.matrices,
            head=hidden * config["vocab_size"],
            tied=bool(tied),
            kv_values=counts.kv_values,
            state_values=counts.state_values,
            kept_values=counts.kept_values,
            window_values=counts.window_values,
            window=int(config.get("sliding_window") or 0),
            experts=experts,
            used=used,
            expert=counts.expert,
            table=layer_table(config),
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


def _check_sizes(config: dict[str, Any], needed: tuple[str, ...]) -> None:
    optional = ("num_key_value_heads", "head_dim", "full_attention_interval")
    present = [n for n in (*optional, *OPTIONAL) if config.get(n) is not None]
    for name in (*needed, *present):
        value, least = config.get(name), int(name not in OPTIONAL)
        values = value if isinstance(value, list) and value else [value]
        if not all(type(n) is int and least <= n <= MAX_SIZE for n in values):
            shown = repr(value)[:20]
            raise CheckpointError(
                f"the config's {name} is {shown}; give a causal language model's config"
            )


def _count_linear_layers(config: dict[str, Any]) -> int:
    """The number of layers with linear attention; 0 where the config names none."""
    kinds = config.get("layer_types")
    if kinds:
        return sum(kind == "linear_attention" for kind in kinds)
    every, layers = config.get("full_attention_interval"), config["num_hidden_layers"]
    if type(every) is not int or type(layers) is not int or every < 1:
        return 0
    return layers - layers // every


@dataclass(frozen=True)
class Efficiency:
    """The shares of a device's peak rates that passes reach; the same for every model.

    `compute` is by compute capability. `pass_ms` is the time of launches and the host.
    """

    bandwidth: float
    pass_ms: float
    compute: dict[str, float]


# From TensorRT Edge-LLM's published rows, by `benchmarks/roofline.py`. onnxruntime has
# not been measured on these devices.
FITTED = Efficiency(0.818, 1.062, {"8.7": 0.339, "11.0": 0.095})
# The limits of the device: no pass of one row is faster, on any of its processors. What
# a further row costs on a CPU is not known.
BOUND = Efficiency(1.0, 0.0, {})


@dataclass(frozen=True)
class LoadedDecoder:
    """A decoder in the formats of a recipe; predicts its memory and pass times."""

    sizes: Dimensions
    recipe: Recipe
    float_bytes: float = HALF_BYTES

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight of the layers, on average."""
        plain = self._bytes_per_weight(replace(self.recipe, head=None, raised=()))
        raised = self.recipe.raised
        if not raised:
            return plain
        more = self._bytes_per_weight(self.recipe.of_unit(str(raised[0])))
        return plain + len(raised) / self.sizes.layers * (more - plain)

    @property
    def head_bytes(self) -> float:
        """Bytes per weight of the LM head, and of the embedding beside it."""
        return self._bytes_per_weight(self.recipe.of_unit(HEAD))

    @property
    def kv_bytes(self) -> float:
        """Bytes of a number in the KV buffers."""
        return self.recipe.kv_bits / 8 or self.float_bytes

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
        cache += STATE_PLACES * (sizes.state_values + sizes.kept_values) * STATE_BYTES
        layers = sizes.matrices + sizes.experts * sizes.expert + sizes.table
        weights = layers * self.weight_bytes + sizes.head * self.head_bytes
        return (weights + embedding + cache) / 1e6

    def pass_ms(
        self,
        width: int,
        context: int,
        mode: PowerMode,
        capability: str,
        efficiency: Efficiency = FITTED,
    ) -> float:
        """Predict the milliseconds of a pass of `width` rows after `context` tokens."""
        read = self.pass_bytes(context, width)
        reading = read / (mode.bandwidth_gbs * efficiency.bandwidth)
        rows_ms = 0.0
        if width > 1:
            rows_ms = (width - 1) * self.row_ms(mode, capability, efficiency)
        return efficiency.pass_ms + reading / 1e6 + rows_ms

    def row_ms(
        self, mode: PowerMode, capability: str, efficiency: Efficiency = FITTED
    ) -> float:
        """Predict the milliseconds of arithmetic for each row after the first."""
        rate = mode.fp16_tflops * efficiency.compute[capability]
        return 2 * (self.sizes.row_weights + self.sizes.head) / (rate * 1e9)

    def _bytes_per_weight(self, recipe: Recipe) -> float:
        """Bytes per weight, with a scale and a zero per `block_size` weights."""
        if recipe.scheme in GRIDS:
            return GRIDS[recipe.scheme] / 8
        if recipe.bits is None:
            return self.float_bytes
        zero = 0.0 if recipe.algorithm in SYMMETRIC else recipe.bits / 8
        return recipe.bits / 8 + (self.float_bytes + zero) / recipe.block_size
