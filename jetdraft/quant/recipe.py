"""What is quantized, and how: a small typed object that the bundle stores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jetdraft.errors import OptionError

SCHEMES = ("int4", "int8", "none")
BLOCK_SIZES = (16, 32, 64, 128)

DEFAULT_BLOCK_SIZE = 128
"""The fastest on a CPU by some way; docs/log.md has the figures."""

ACCURACY_LEVEL = 4
"""int8 activations: without it the CPU kernel unpacks every matrix on every pass."""


@dataclass(frozen=True)
class Recipe:
    """Weight-only quantization of a graph's matrices.

    `scheme` is "int4", "int8" or "none"; `block_size` weights share one scale.

        Recipe("int4", block_size=32).bits  # 4
    """

    scheme: str = "int4"
    block_size: int = DEFAULT_BLOCK_SIZE

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise OptionError(
                f"unknown quantization {self.scheme!r}; choose {', '.join(SCHEMES)}"
            )
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise OptionError(f"block size {self.block_size} is not one of {sizes}")

    @property
    def bits(self) -> int | None:
        """Bits per weight, or None where weights stay floats."""
        return {"int4": 4, "int8": 8}.get(self.scheme)

    @classmethod
    def for_drafter(cls, target: Recipe) -> Recipe:
        """The default beside a target's recipe: int8 in small blocks, or floats.

        A drafter is so small that its bits cost little time, and int4 costs it a
        tenth of its acceptance; docs/log.md has the figures.
        """
        return target if target.bits is None else cls("int8", 32)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)
