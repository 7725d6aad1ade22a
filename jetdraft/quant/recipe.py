"""What is quantized, and how: a small typed object that the bundle stores."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from jetdraft.errors import OptionError

BITS = {"int2": 2, "int4": 4, "int8": 8}
SCHEMES = (*BITS, "none")
BLOCK_SIZES = (16, 32, 64, 128)
KV_SCHEMES = ("int4", "int8")
ALGORITHMS = ("rtn", "k_quant", "hqq", "gptq")
CALIBRATED = ("gptq",)
"""Algorithms that look at what a model computes over a text."""

SYMMETRIC = ("rtn", "gptq")
"""Algorithms without zeros, which TensorRT does not know."""

DEFAULT_BLOCK_SIZE = 128
"""The fastest on a CPU by some way; docs/log.md has the figures."""

ACCURACY_LEVEL = 4
"""int8 activations: without it the CPU kernel unpacks every matrix on every pass."""


@dataclass(frozen=True)
class Recipe:
    """Weight-only quantization of a graph's matrices.

    `scheme` is "int2", "int4", "int8" or "none"; `block_size` weights share one scale,
    found by the `algorithm`. `head` is the scheme of the LM head and the embedding tied
    to it, None for the same. `kv` "int8" or "int4" quantizes the KV buffers too.

        Recipe.parse("int4-gptq-b32").bits  # 4
    """

    scheme: str = "int4"
    block_size: int = DEFAULT_BLOCK_SIZE
    algorithm: str = "rtn"
    head: str | None = None
    kv: str | None = None

    def __post_init__(self) -> None:
        for what, given, known in (
            ("quantization", self.scheme, SCHEMES),
            ("algorithm", self.algorithm, ALGORITHMS),
            ("quantization of the head", self.head or self.scheme, SCHEMES),
            ("quantization of the KV cache", self.kv or "int8", KV_SCHEMES),
        ):
            if given not in known:
                raise OptionError(
                    f"unknown {what} {given!r}; choose {', '.join(known)}"
                )
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise OptionError(f"block size {self.block_size} is not one of {sizes}")

    @classmethod
    def parse(cls, text: str, block_size: int = DEFAULT_BLOCK_SIZE) -> Recipe:
        """Read a name: a scheme, and what differs from `rtn` and `block_size`.

        Recipe.parse("int4-gptq-b64-head8")
        """
        scheme, *parts = text.split("-")
        found = cls(scheme, block_size)
        for part in parts:
            if block := re.fullmatch(r"b(\d+)", part):
                found = replace(found, block_size=int(block[1]))
            elif head := re.fullmatch(r"head(\d|none)", part):
                name = head[1] if head[1] == "none" else f"int{head[1]}"
                found = replace(found, head=name)
            elif cache := re.fullmatch(r"kv(\d)", part):
                found = replace(found, kv=f"int{cache[1]}")
            else:
                found = replace(found, algorithm=part)
        return found

    @property
    def name(self) -> str:
        """What `parse` reads, nothing left out."""
        head = f"-head{self.head.removeprefix('int')}" if self.head else ""
        cache = f"-kv{self.kv.removeprefix('int')}" if self.kv else ""
        if self.bits is None:
            return f"none{cache}"
        return f"{self.scheme}-{self.algorithm}-b{self.block_size}{head}{cache}"

    @property
    def kv_bits(self) -> int:
        """Bits of a number in the KV buffers, 0 where they are floats."""
        return BITS[self.kv] if self.kv else 0

    @property
    def bits(self) -> int | None:
        """Bits per weight, or None where weights stay floats."""
        return BITS.get(self.scheme)

    @property
    def calibrated(self) -> bool:
        """Whether it needs a text."""
        return self.by_moments or self.kv is not None

    @property
    def by_moments(self) -> bool:
        """Whether its algorithm looks at what the matrices are fed."""
        return self.bits is not None and self.algorithm in CALIBRATED

    def check_standard(self) -> None:
        """Raise `OptionError` unless ai.onnx has operators for it."""
        if self.kv is not None:
            raise OptionError(
                f"{self.name} has integer KV buffers, which only GroupQueryAttention "
                "reads; choose the contrib flavour"
            )
        if "int2" in (self.scheme, self.head):
            raise OptionError(
                f"{self.name} has integers of two bits, which no DequantizeLinear "
                "reads; choose int4 or int8 for the standard flavour"
            )
        if self.bits is not None and self.algorithm not in SYMMETRIC:
            raise OptionError(
                f"{self.name} has zeros, which the standard flavour does not; choose "
                f"{' or '.join(SYMMETRIC)}"
            )

    @property
    def of_head(self) -> Recipe:
        """The recipe of the LM head."""
        return replace(self, scheme=self.head or self.scheme, head=None)

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
