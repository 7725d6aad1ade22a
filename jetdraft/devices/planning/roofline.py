"""Predicts the time and the memory of a pass from a model's sizes and a device's rates.

    ms(width) = fixed + bytes read / bandwidth + (width - 1) * operations per row / rate

Reading every weight once bounds a pass of one row; each further row adds its
arithmetic. A strict roofline would take the larger of the two times, so that rows would
be free up to a knee; in the published figures the times add up (docs/devices.md has
the fit).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jetdraft.devices.device import PowerMode
from jetdraft.devices.planning.dimensions import STATE_BYTES, Dimensions
from jetdraft.recipe import HEAD, SYMMETRIC, Recipe

HALF, SINGLE = 2.0, 4.0
"""Bytes of a float on a GPU and on a CPU: of a weight, a scale, or a number in the KV
buffers."""

RUNTIME_MB = 846.0
"""Memory of a session beside weights, KV and logits; fitted, see docs/devices.md."""


@dataclass(frozen=True)
class Efficiency:
    """The shares of the peak rates that passes reach, the same for every model.

    `bandwidth` is a share of the memory bandwidth; `compute` holds shares of the dense
    fp16 rate by compute capability. `pass_ms` is the time of launches and the host.
    """

    bandwidth: float
    pass_ms: float
    compute: dict[str, float]


FITTED = Efficiency(0.818, 1.062, {"8.7": 0.339, "11.0": 0.095})
"""From TensorRT Edge-LLM's published rows, by `benchmarks/roofline.py`. onnxruntime
has not been measured on these devices."""

BOUND = Efficiency(1.0, 0.0, {})
"""No pass of one row is faster than this, on any processor of the device: the memory
gives its bytes no sooner. What a further row costs on a CPU is not known."""


@dataclass(frozen=True)
class Load:
    """A decoder in memory, with the weights of a recipe.

    A pass reads the whole head, but only a few rows of the embedding. A float has
    `float_bytes`.

        Load(Dimensions.read(path), Recipe.parse("int4-headnone")).pass_bytes(2048)
    """

    sizes: Dimensions
    recipe: Recipe
    float_bytes: float = HALF

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight of the layers, on average."""
        raised = len(self.recipe.raised) / self.sizes.layers
        plain = self._bytes(replace(self.recipe, head=None, raised=()))
        if not raised:
            return plain
        more = self._bytes(self.recipe.of_unit(str(self.recipe.raised[0])))
        return plain + raised * (more - plain)

    @property
    def head_bytes(self) -> float:
        """Bytes per weight of the head, and of an embedding beside it."""
        return self._bytes(self.recipe.of_unit(HEAD))

    @property
    def kv_bytes(self) -> float:
        """Bytes of a number in the KV buffers."""
        return self.recipe.kv_bits / 8 or self.float_bytes

    def pass_bytes(self, context: int) -> float:
        """The bytes that a pass of one row reads after `context` tokens."""
        sizes = self.sizes
        weights = sizes.matrices * self.weight_bytes + sizes.head * self.head_bytes
        state = 2 * sizes.state_values * STATE_BYTES
        return weights + context * sizes.kv_values * self.kv_bytes + state

    def memory_mb(self, capacity: int) -> float:
        """The size of weights, KV buffers and state, in 10^6 bytes."""
        sizes = self.sizes
        # A tied head and embedding of the same format are one tensor.
        embedding = 0.0 if sizes.tied else sizes.head * self.head_bytes
        cache = capacity * sizes.kv_values * self.kv_bytes
        cache += sizes.state_values * STATE_BYTES
        weights = sizes.matrices * self.weight_bytes + sizes.head * self.head_bytes
        return (weights + embedding + cache) / 1e6

    def pass_ms(
        self,
        width: int,
        context: int,
        mode: PowerMode,
        capability: str,
        efficiency: Efficiency = FITTED,
    ) -> float:
        """The predicted time of a pass of `width` rows after `context` tokens."""
        reading = self.pass_bytes(context) / (mode.bandwidth_gbs * efficiency.bandwidth)
        rows_ms = 0.0
        if width > 1:
            rows_ms = (width - 1) * self.row_ms(mode, capability, efficiency)
        return efficiency.pass_ms + reading / 1e6 + rows_ms

    def row_ms(
        self, mode: PowerMode, capability: str, efficiency: Efficiency = FITTED
    ) -> float:
        """The time of a further row: its multiplications and additions."""
        rate = mode.fp16_tflops * efficiency.compute[capability]
        return 2 * (self.sizes.matrices + self.sizes.head) / (rate * 1e9)

    def _bytes(self, recipe: Recipe) -> float:
        """Bytes per weight of a scheme: its bits, and a scale and a zero per block."""
        if recipe.bits is None:
            return self.float_bytes
        zero = 0.0 if recipe.algorithm in SYMMETRIC else recipe.bits / 8
        return recipe.bits / 8 + (self.float_bytes + zero) / recipe.block_size
