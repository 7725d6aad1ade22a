"""A recipe says what is quantized and how; the bundle stores it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jetdraft.errors import BundleError, OptionError, as_error, check_choice

GRIDS = {"q4_0": 4.5, "q4_1": 5, "q5_0": 5.5, "q5_1": 6, "q8_0": 8.5}
GRIDS |= {"q3_k": 3.5625, "q4_k": 4.625, "q5_k": 5.625, "q6_k": 6.5625}
"""llama.cpp's types, which `jetdraft.native` multiplies: bits per weight in all."""

# Bits per weight of each scheme.
BITS = {"int2": 2, "int4": 4, "int8": 8} | {g: int(g[1]) for g in GRIDS}
# Whose operators multiply quantized matrices; jetdraft has them for the CPU.
KERNELS = ("jetdraft", "onnxruntime")
SCHEMES = (*BITS, "none")
BLOCK_SIZES = (16, 32, 64, 128)
KV_SCHEMES = ("int8",)
# What a recipe may have; the first algorithm is the default.
ALGORITHMS = ("rtn", "k_quant", "hqq", "gptq")
# Algorithms that need the second moments of what enters each matrix over a text.
CALIBRATED = ("gptq",)
# What types of llama.cpp can be rounded by.
GRID_ALGORITHMS = ("rtn", *CALIBRATED)
# Algorithms that store no zeros; TensorRT reads only these.
SYMMETRIC = ("rtn", "gptq")
# The fastest block size on a CPU; docs/log/quantization.md has the figures.
DEFAULT_BLOCK_SIZE = 128
# The default recipe with a limit of bytes or KL; see docs/quantization.md.
CALIBRATED_DEFAULT = "int4-gptq-b128-head8"
# What an export tries for each kernel, the cheapest first, the last unmeasured.
RUNGS = {
    "jetdraft": ("q4_k-headq6_k", "q5_k-headq6_k", "q6_k", "q8_0"),
    "onnxruntime": (
        *("int4-rtn-b128-head8", "int4-rtn-b64-head8", "int4-rtn-b32-head8"),
        *("int8-rtn-b64", "int8-rtn-b32"),
    ),
}
# The recipe of an unmeasured export; it ruins small models (docs/quantization.md).
FAST_DEFAULTS = {"jetdraft": "q4_k-headq6_k", "onnxruntime": "int4-rtn-b32-head8"}
# 4 is int8 activations; at other levels the CPU kernel unpacks matrices each pass.
ACCURACY_LEVEL = 4
RAISED = {"int2": "int4", "int4": "int8", "q4_0": "q5_0", "q4_1": "q5_1"}
RAISED |= {"q3_k": "q4_k", "q4_k": "q5_k", "q5_k": "q6_k"}
RAISED |= dict.fromkeys(("q5_0", "q5_1", "q6_k"), "q8_0")
"""The scheme with more bits that the layers in `Recipe.raised` have."""

# The types in place of types with super-blocks of 256, which the rows do not fill.
NARROW_GRIDS = {"q3_k": "q4_0", "q4_k": "q4_1", "q5_k": "q5_1", "q6_k": "q8_0"}
# A part of a model with one scheme: the number of a decoder layer, or `HEAD`.
Unit = str
# The unit of the LM head, and of an embedding tied to it.
HEAD = "head"


def grid_for(scheme: str, rows: int) -> str:
    """Return the type of llama.cpp that a matrix with this many rows gets."""
    return NARROW_GRIDS.get(scheme, scheme) if rows % 256 else scheme


def unit_of(weight: str) -> Unit:
    """Return the layer's number in the name of a weight; "" outside of layers."""
    numbers = [part for part in weight.split(".") if part.isdigit()]
    return numbers[0] if numbers else ""


@dataclass(frozen=True)
class Recipe:
    """Quantization of a graph's matrices.

    `scheme` is "int2", "int4", "int8", "none", or a type of llama.cpp such as "q4_k",
    which has its own blocks and algorithm. `block_size` weights share one scale, which
    the `algorithm` finds. `head` is the scheme of the LM head and of an embedding tied
    to it, or None for `scheme`. `kv` "int8" quantizes the KV buffers too. The layers in
    `raised` have more bits, see `RAISED`. Raises `OptionError` for unknown values.

        Recipe.parse("int4-gptq-b32").bits  # 4
    """

    scheme: str = "int4"
    block_size: int = DEFAULT_BLOCK_SIZE
    algorithm: str = "rtn"
    head: str | None = None
    kv: str | None = None
    raised: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("quantization", self.scheme, SCHEMES),
            ("algorithm", self.algorithm, ALGORITHMS),
            ("quantization of the head", self.head or self.scheme, SCHEMES),
            ("quantization of the KV cache", self.kv or KV_SCHEMES[0], KV_SCHEMES),
            ("block size", self.block_size, BLOCK_SIZES),
        ):
            check_choice(OptionError, name, value, choices)
        if self.scheme == "none" and self.head is not None:
            fact = "a recipe with the scheme none cannot quantize the head"
            raise OptionError(f"{fact}; leave head out, or choose {', '.join(BITS)}")
        if self.scheme in GRIDS and self.algorithm not in GRID_ALGORITHMS:
            fact = f"{self.scheme} rounds in its own way, not by {self.algorithm}"
            raise OptionError(f"{fact}; choose gptq, leave it out, or choose int8")
        if self.raised and self.scheme not in RAISED:
            fact = f"layers of {self.scheme} cannot get more bits"
            fix = f"leave up and limits out, or choose {' or '.join(RAISED)}"
            raise OptionError(f"{fact}; {fix}")

    @classmethod
    def parse(cls, text: str, block_size: int = DEFAULT_BLOCK_SIZE) -> Recipe:
        """Parse a name such as int4-gptq-b64-head8: a scheme, then other settings."""
        scheme, *parts = text.split("-")
        recipe = cls(scheme, block_size)
        for part in parts:
            if block := re.fullmatch(r"b(\d+)", part):
                recipe = replace(recipe, block_size=int(block[1]))
            elif head := re.fullmatch(r"head(\d|none|q\d_\w)", part):
                name = f"int{head[1]}" if head[1].isdigit() else head[1]
                recipe = replace(recipe, head=name)
            elif cache := re.fullmatch(r"kv(\d)", part):
                recipe = replace(recipe, kv=f"int{cache[1]}")
            elif layers := re.fullmatch(r"up(\d+(?:\.\d+)*)", part):
                numbers = sorted({int(number) for number in layers[1].split(".")})
                recipe = replace(recipe, raised=tuple(numbers))
            else:
                recipe = replace(recipe, algorithm=part)
        if recipe.bits is None or recipe.has_blocks:
            return recipe
        sizes = [part for part in parts if re.fullmatch(r"b\d+", part)]
        if sizes:
            raise OptionError(f"{scheme} has its own blocks; leave {sizes[0]} out")
        return replace(recipe, block_size=DEFAULT_BLOCK_SIZE)

    @property
    def name(self) -> str:
        """The full name, which `parse` reads, such as int4-rtn-b128."""
        head = f"-head{self.head.removeprefix('int')}" if self.head else ""
        cache = f"-kv{self.kv.removeprefix('int')}" if self.kv else ""
        if self.bits is None:
            return f"none{cache}"
        up = f"-up{'.'.join(map(str, self.raised))}" if self.raised else ""
        if self.scheme in GRIDS:
            block = f"-b{self.block_size}" if self.has_blocks else ""
            how = "" if self.algorithm == ALGORITHMS[0] else f"-{self.algorithm}"
            return f"{self.scheme}{how}{block}{up}{head}{cache}"
        return f"{self.scheme}-{self.algorithm}-b{self.block_size}{up}{head}{cache}"

    @property
    def has_blocks(self) -> bool:
        """Whether a matrix has a scale for each block of `block_size` weights."""
        schemes = self.scheme, self.head
        return any(name in BITS and name not in GRIDS for name in schemes)

    @property
    def has_grids(self) -> bool:
        """Whether some matrix is in a type of llama.cpp."""
        return self.scheme in GRIDS or self.head in GRIDS

    @property
    def kv_bits(self) -> int:
        """Bits of a number in the KV buffers, 0 for float buffers."""
        return BITS[self.kv] if self.kv else 0

    @property
    def bits(self) -> int | None:
        """Bits per weight, or None where weights stay floats."""
        return BITS.get(self.scheme)

    @property
    def needs_calibration(self) -> bool:
        """Whether an export with this recipe needs a calibration text."""
        return self.needs_moments or self.kv is not None

    @property
    def needs_moments(self) -> bool:
        """Whether its algorithm needs the second moments of the matrices' inputs."""
        return self.bits is not None and self.algorithm in CALIBRATED

    def check_standard(self) -> None:
        """Raise `OptionError` unless ai.onnx has the operators for this recipe."""
        if self.kv is not None:
            fact = f"{self.name} has integer KV buffers, which only "
            fact += "GroupQueryAttention reads; choose the contrib flavour"
            raise OptionError(fact)
        if "int2" in (self.scheme, self.head):
            fact = f"{self.name} has integers of two bits, which DequantizeLinear "
            fact += "cannot read; choose int4 or int8 for the standard flavour"
            raise OptionError(fact)
        if self.has_grids:
            fact = f"{self.name} needs MatMulPacked, which ai.onnx does not have"
            raise OptionError(f"{fact}; choose int8, or the contrib flavour")
        if self.bits is not None and self.algorithm not in SYMMETRIC:
            fact = f"{self.name} has zeros, which the standard flavour cannot read"
            raise OptionError(f"{fact}; choose {' or '.join(SYMMETRIC)}")

    def of_unit(self, unit: Unit) -> Recipe:
        """Return the recipe for the matrices of a unit: a layer, the head or ""."""
        scheme = self.scheme
        if unit == HEAD:
            scheme = self.head or scheme
        elif unit in map(str, self.raised):
            scheme = RAISED[scheme]
        algorithm = self.algorithm
        if scheme in GRIDS and algorithm not in GRID_ALGORITHMS:
            algorithm = GRID_ALGORITHMS[0]
        return replace(self, scheme=scheme, algorithm=algorithm, head=None, raised=())

    def raise_units(self, units: Collection[Unit]) -> Recipe:
        """Return a recipe with more bits for these units; raises `OptionError`."""
        layers = {int(unit) for unit in units if unit != HEAD}
        recipe = replace(self, raised=tuple(sorted({*self.raised, *layers})))
        if HEAD in units and self.head is None:
            recipe = replace(recipe, head=RAISED[self.scheme])
        return recipe

    @classmethod
    def for_drafter(cls, target: Recipe, kernel: str = KERNELS[0]) -> Recipe:
        """The drafter's default; four bits are too few (docs/log/quantization.md)."""
        if target.has_grids and kernel == KERNELS[0]:
            return cls("q8_0")
        return target if target.bits is None else cls("int8", 32)

    @property
    def of_encoder(self) -> Recipe:
        """The recipe of a target's encoder of pictures: eight bits, or its floats."""
        if self.bits is None:
            return self
        own, other = KERNELS
        return Recipe.parse(RUNGS[own if self.has_grids else other][-1])

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Recipe:
        """Read the object that `to_json` writes; raises `BundleError`."""
        known = cls.__dataclass_fields__.keys() & fields.keys()
        own = {name: fields[name] for name in known}
        fact = "the recipe in bundle.json cannot be read"
        with as_error(BundleError, OptionError, fact, "export the bundle again"):
            return cls(**{**own, "raised": tuple(fields.get("raised", ()))})

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"raised": list(self.raised)}
