"""What is quantized, and how: a small typed object that the bundle stores."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jetdraft.errors import OptionError

BITS = {"int2": 2, "int4": 4, "int8": 8}
SCHEMES = (*BITS, "none")
BLOCK_SIZES = (16, 32, 64, 128)
KV_SCHEMES = ("int4", "int8")
ALGORITHMS = ("rtn", "k_quant", "hqq", "gptq", "awq")
CALIBRATED = ("gptq", "awq")
"""Algorithms that look at what a model computes over a text."""

SYMMETRIC = ("rtn", "gptq", "awq")
"""Algorithms without zeros, which TensorRT does not know."""

DEFAULT_BLOCK_SIZE = 128
"""The fastest on a CPU by some way; docs/log.md has the figures."""

CALIBRATED_DEFAULT = "int4-gptq-b128-head8"
"""Where there is a text to calibrate on; docs/quantization.md has the figures."""

COMPARED = (
    "int8-rtn-b32",
    "int8-gptq-b32",
    "int4-rtn-b32",
    "int4-k_quant-b32",
    "int4-hqq-b32",
    "int4-awq-b32",
    "int4-gptq-b32",
    "int4-gptq-b64",
    "int4-rtn-b128",
    "int4-gptq-b128",
    "int4-gptq-b128-head8",
    "int2-gptq-b32-head4",
)
"""What `jetdraft quantize` compares, unless it is told."""

COMPARED_DRAFTERS = ("int8-rtn-b32", "int4-rtn-b32", "int4-gptq-b32")

ACCURACY_LEVEL = 4
"""int8 activations: without it the CPU kernel unpacks every matrix on every pass."""

RAISED = {"int2": "int4", "int4": "int8"}
"""What a layer that needs more bits gets."""

Unit = str
"""A part of a model with one scheme: a decoder layer, by its number, or the head."""

HEAD = "head"


def unit_of(weight: str) -> Unit:
    """The unit of a weight by its name, as "model.layers.3.mlp.up_proj.weight"; "" of
    what lies outside of all layers.
    """
    numbers = [part for part in weight.split(".") if part.isdigit()]
    return numbers[0] if numbers else ""


@dataclass(frozen=True)
class Recipe:
    """Weight-only quantization of a graph's matrices.

    `scheme` is "int2", "int4", "int8" or "none"; `block_size` weights share one scale,
    found by the `algorithm`. `head` is the scheme of the LM head and the embedding tied
    to it, None for the same. `kv` "int8" or "int4" quantizes the KV buffers too. The
    layers in `raised` have twice the bits.

        Recipe.parse("int4-gptq-b32").bits  # 4
    """

    scheme: str = "int4"
    block_size: int = DEFAULT_BLOCK_SIZE
    algorithm: str = "rtn"
    head: str | None = None
    kv: str | None = None
    raised: tuple[int, ...] = ()

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
        if self.scheme == "none" and self.head is not None:
            raise OptionError(
                "a recipe without bits quantizes no head either; leave head out, or "
                "give the other matrices bits"
            )
        if self.raised and self.scheme not in RAISED:
            raise OptionError(
                f"{self.scheme} has no form with more bits; choose "
                f"{' or '.join(RAISED)}"
            )

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
            elif layers := re.fullmatch(r"up(\d+(?:\.\d+)*)", part):
                numbers = sorted({int(each) for each in layers[1].split(".")})
                found = replace(found, raised=tuple(numbers))
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
        up = f"-up{'.'.join(map(str, self.raised))}" if self.raised else ""
        return f"{self.scheme}-{self.algorithm}-b{self.block_size}{up}{head}{cache}"

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

    def of_unit(self, unit: Unit) -> Recipe:
        """The recipe of one layer's matrices, or of the head's."""
        scheme = self.scheme
        if unit == HEAD:
            scheme = self.head or scheme
        elif unit in map(str, self.raised):
            scheme = RAISED[scheme]
        return replace(self, scheme=scheme, head=None, raised=())

    def raise_units(self, units: Collection[Unit]) -> Recipe:
        """With twice the bits for these units too; `OptionError` where there are none.

        Recipe.parse("int4-b64").raise_units(["3", "head"]).name
        """
        layers = {int(unit) for unit in units if unit != HEAD}
        raised = replace(self, raised=tuple(sorted({*self.raised, *layers})))
        if HEAD in units and self.head is None:
            raised = replace(raised, head=RAISED[self.scheme])
        return raised

    @classmethod
    def for_drafter(cls, target: Recipe) -> Recipe:
        """The default beside a target's recipe: int8 in small blocks, or floats.

        A drafter is so small that its bits cost little time, and int4 costs it a
        tenth of its acceptance; docs/log.md has the figures.
        """
        return target if target.bits is None else cls("int8", 32)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Recipe:
        """Read what `to_json` gave, or a bundle wrote of it and more."""
        known = {
            name: fields[name] for name in cls.__dataclass_fields__ if name in fields
        }
        return cls(**{**known, "raised": tuple(fields.get("raised", ()))})

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self) | {"raised": list(self.raised)}
