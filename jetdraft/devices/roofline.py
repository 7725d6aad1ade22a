"""How long a pass takes and what it needs, from sizes and rates.

    ms(width) = fixed + bytes read / bandwidth + (width - 1) * operations per row / rate

A pass of one row reads every weight once, which is what bounds it; each further row
adds its arithmetic. A strict roofline would take the larger of the two, and rows would
be free up to a knee; the published figures show them added (docs/devices.md has the
fit).
"""

from __future__ import annotations

from dataclasses import dataclass

from jetdraft.devices.device import PowerMode
from jetdraft.devices.dimensions import STATE_BYTES, Dimensions
from jetdraft.errors import OptionError

BYTES = {"none": 2.0, "int8": 1.0 + 2 / 128, "int4": 0.5 + 2 / 128}
"""Per weight, with a half-precision scale for 128 of them."""

BYTES_PER_KV = 2.0
RUNTIME_MB = 846.0
"""What a session has beside weights, KV and logits; fitted, see docs/devices.md."""


@dataclass(frozen=True)
class Efficiency:
    """What is reached of the peak rates, the same for every model.

    `bandwidth` and `compute` are shares, the latter by compute capability, of the dense
    fp16 rate; `pass_ms` are launches and the host.
    """

    bandwidth: float
    pass_ms: float
    compute: dict[str, float]


FITTED = Efficiency(0.818, 1.062, {"8.7": 0.339, "11.0": 0.095})
"""From TensorRT Edge-LLM's published rows, by `benchmarks/roofline.py`. onnxruntime
has not been measured on these devices."""


@dataclass(frozen=True)
class Load:
    """A decoder as it lies in memory: `weight_bytes` and `head_bytes` per weight.

    The head is read in every pass; of the embedding a few rows are.

        Load(Dimensions.read(path), BYTES["int4"], BYTES["int4"]).pass_bytes(2048)
    """

    sizes: Dimensions
    weight_bytes: float
    head_bytes: float

    @classmethod
    def of(cls, sizes: Dimensions, quantization: str) -> Load:
        """With everything in one format; raises `OptionError`."""
        if quantization not in BYTES:
            raise OptionError(
                f"cannot plan quantization {quantization!r}; choose {', '.join(BYTES)}"
            )
        return cls(sizes, BYTES[quantization], BYTES[quantization])

    def pass_bytes(self, context: int) -> float:
        """Read by a pass of one row, `context` tokens deep."""
        sizes = self.sizes
        weights = sizes.matrices * self.weight_bytes + sizes.head * self.head_bytes
        state = 2 * sizes.state_values * STATE_BYTES
        return weights + context * sizes.kv_values * BYTES_PER_KV + state

    def memory_mb(self, capacity: int) -> float:
        """Weights, KV buffers and state, in 10^6 bytes; no runtime."""
        sizes = self.sizes
        # A tied head and the embedding are one tensor if they have one format.
        embedding = 0.0 if sizes.tied else sizes.head * self.head_bytes
        kept = capacity * sizes.kv_values * BYTES_PER_KV
        kept += sizes.state_values * STATE_BYTES
        weights = sizes.matrices * self.weight_bytes + sizes.head * self.head_bytes
        return (weights + embedding + kept) / 1e6

    def pass_ms(
        self,
        width: int,
        context: int,
        mode: PowerMode,
        capability: str,
        efficiency: Efficiency = FITTED,
    ) -> float:
        """Predicted time of a pass of `width` rows."""
        reading = self.pass_bytes(context) / (mode.bandwidth_gbs * efficiency.bandwidth)
        rows = (width - 1) * self.row_ms(mode, capability, efficiency)
        return efficiency.pass_ms + reading / 1e6 + rows

    def row_ms(
        self, mode: PowerMode, capability: str, efficiency: Efficiency = FITTED
    ) -> float:
        """What a further row adds: its multiplications and additions."""
        rate = mode.fp16_tflops * efficiency.compute[capability]
        return 2 * (self.sizes.matrices + self.sizes.head) / (rate * 1e9)
