"""Reads checkpoints that are quantized already; their integers stay as they are.

A linear layer has a matrix [out, in]; an int32 has w integers:

gptq                qweight int32 [in / w, out]; qzeros are the zeros minus 1, except in
                    "gptq_v2"; g_idx [in] is the group of each input, in any order
awq                 qweight int32 [in, out / w], in the order of its GPU kernels
mxfp4               *_blocks uint8 [experts, out, blocks, 16] have two floats of E2M1 in
                    a byte, *_scales [experts, out, blocks] their exponents
compressed-tensors  weight_packed int32 [out, in / w], or weight int8 [out, in]
bitsandbytes        weight int8 [out, in], a scale per output (2208.07339)
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from jetdraft.checkpoints.streams import WEIGHTS as STREAM_WEIGHTS
from jetdraft.errors import CheckpointError, UnsupportedModelError, as_error
from jetdraft.quant.blocks import Blocks, Bytes, Floats, Order, into_blocks, unpack
from jetdraft.quant.grids import Matrix
from jetdraft.quant.stored import GridStack, StoredTensor
from jetdraft.recipe import BLOCK_SIZES

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # The place of each of eight columns in an int32.


@dataclass(frozen=True)
class PackedWeights:
    """A quantized checkpoint's integers (`blocks`) by name, and their `forms`.

    `floats` are the other tensors, and the values of the integers in half.
    """

    method: str
    blocks: dict[str, Matrix | GridStack]
    floats: dict[str, Tensor]
    forms: dict[str, str]

    @classmethod
    def read(
        cls, folder: Path, settings: Mapping[str, Any], keeps_grids: bool = False
    ) -> "PackedWeights":
        """Read all files; raises `CheckpointError` for weights that cannot be kept."""
        method = str(settings.get("quant_method"))
        if method == MXFP4:
            return cls._read_mxfp4(folder, keeps_grids)
        if method not in LAYER_READERS:
            raise UnsupportedModelError(
                f"{folder} is quantized by {method}, which cannot be exported; choose "
                f"a checkpoint by {', '.join((*LAYER_READERS, MXFP4))}, or one without"
            )
        blocks: dict[str, Matrix | GridStack] = {}
        floats: dict[str, Tensor] = {}
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in load_tensors(folder).items():
            prefix, _, part = name.rpartition(".")
            layers.setdefault(prefix, {})[part] = tensor
        for prefix, parts in layers.items():
            name = f"{prefix.removesuffix('.weight')}.weight"
            weight, fix = f"the weight {name} of {folder}", "fetch the checkpoint again"
            malformed = f"{weight} is not as {method} writes it"
            try:
                with as_error(CheckpointError, _MALFORMED_ERRORS, malformed, fix):
                    matrix = LAYER_READERS[method](parts, settings)
            except _UnsupportedFormError as error:
                fact = f"{weight} {error}, which MatMulNBits cannot hold; choose "
                fact += "another quantized checkpoint, or one without"
                raise UnsupportedModelError(fact) from None
            if matrix is None:
                floats |= {f"{prefix}.{part}": x for part, x in parts.items()}
                continue
            if not np.isfinite(matrix.scales).all():
                raise CheckpointError(f"{weight} has scales that are not finite; {fix}")
            blocks[name] = matrix
            floats[name] = torch.from_numpy(matrix.floats.T).half()
            if "bias" in parts:
                floats[f"{prefix}.bias"] = parts["bias"]
        return cls(method, blocks, floats, dict.fromkeys(blocks, f"{method} exact"))

    @classmethod
    def _read_mxfp4(cls, folder: Path, keeps_grids: bool) -> "PackedWeights":
        tensors = load_tensors(folder, stores_experts=True)
        packed = cls(MXFP4, {}, {}, {})
        for name, tensor in tensors.items():
            whole = name.removesuffix("_blocks")
            if name == whole and not name.endswith("_scales"):
                packed.floats[name] = tensor
            if name == whole:
                continue
            scales = tensors.get(f"{whole}_scales", torch.empty(0))
            types = {scales.dtype, tensor.dtype}
            if (*scales.shape, 16) != tensor.shape or types != {torch.uint8}:
                fact = f"the weight {whole} of {folder} is not as {MXFP4} writes it"
                raise CheckpointError(f"{fact}; fetch the checkpoint again")
            experts, columns, blocks, _ = tensor.shape
            read = partial(_read_mxfp4, f"{whole} of {folder}", tensor, scales)
            stack = GridStack("Q5_0", (experts, columns, 32 * blocks), read)
            packed.floats[whole] = stack.floats().transpose(1, 2)
            if keeps_grids:
                packed.blocks[whole] = stack
                packed.forms[whole] = f"{MXFP4} exact"
        return packed


MXFP4 = "mxfp4"  # As transformers names it, for the experts of gpt-oss.
# Twice the floats of E2M1 by their bits, which are integers of Q5_0.
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
_TWICE_E2M1 = np.concatenate([_TWICE_E2M1, -_TWICE_E2M1])


def _read_mxfp4(name: str, blocks: Tensor, scales: Tensor, expert: int) -> Bytes:
    """The matrix of an expert in MXFP4 as Q5_0, which holds the same numbers."""
    pairs, exponents = blocks[expert].numpy(), scales[expert].numpy().astype(np.int32)
    codes = np.stack([pairs & 15, pairs >> 4], -1).reshape(*exponents.shape, 32)
    integers = _TWICE_E2M1[codes]
    scaled = np.where((integers == 0).all(-1), 0, np.ldexp(1.0, exponents - 128))
    with np.errstate(over="ignore"):
        halves = scaled.astype("<f2")
    wrong = halves != scaled
    if wrong.any():
        fact = f"the weight {name} has blocks with an exponent of "
        fact += f"{exponents[wrong][0] - 127}, which no half holds"
        raise UnsupportedModelError(f"{fact}; export the model of floats")
    shifted = (integers + 16).astype(np.uint8)
    low = shifted[..., :16] & 15 | (shifted[..., 16:] & 15) << 4
    high = np.packbits(shifted >> 4, axis=-1, bitorder="little")
    data = np.concatenate([halves[..., None].view(np.uint8), high, low], -1)
    return data.reshape(len(data), -1)


class _UnsupportedFormError(Exception):
    """Says which property of a matrix MatMulNBits cannot hold."""


_MALFORMED_ERRORS = LookupError, ValueError, TypeError, AttributeError, RuntimeError

_EXPERT = re.compile(r"\.experts\.(\d+\..*weight|\w+_(blocks|scales))$")
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"U8": torch.uint8}


def load_tensors(folder: Path, stores_experts: bool = False) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name, mapped; experts may be `StoredTensor`."""
    files = [f for f in folder.glob("*.safetensors") if f.name != STREAM_WEIGHTS]
    if not files:
        fact = f"{folder} has no safetensors weights"
        raise CheckpointError(f"{fact}; save it again with save_pretrained")
    tensors: dict[str, Tensor] = {}
    for file in sorted(files):
        tensors |= _load_file(file) if stores_experts else load_file(file)
    return tensors


def _load_file(file: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    with safe_open(file, "pt") as opened, file.open("rb") as raw:
        begins = 8 + int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(begins - 8))
        for name in opened.keys():  # noqa: SIM118  # it is no mapping
            entry = header[name]
            shape, dtype = entry["shape"], _DTYPES.get(entry["dtype"])
            is_stack = len(shape) == 3 and shape[1] > 1  # no convolution
            if dtype is not None and (is_stack or _EXPERT.search(name)):
                place = begins + entry["data_offsets"][0]
                tensors[name] = _stored_in(file, place, shape, dtype)
            else:
                tensors[name] = opened.get_tensor(name)
    return tensors


def _stored_in(file: Path, place: int, shape: list[int], dtype: Any) -> StoredTensor:
    """A tensor that begins at a byte of a file; what is read of it is a copy."""

    def read(index: int | None) -> Tensor:
        count, offset, kept = math.prod(shape) * dtype.itemsize, place, shape
        if index is not None:
            count //= shape[0]
            offset, kept = place + index * count, shape[1:]
        data = np.fromfile(file, np.uint8, count, offset=offset)
        return torch.from_numpy(data).view(dtype).view(kept)

    return StoredTensor(shape, dtype, read)


Parts = Mapping[str, Tensor]  # A module's tensors by the last part of the name.
Settings = Mapping[str, Any]  # The quantization config of a checkpoint.


def _read_gptq(parts: Parts, settings: Settings) -> Blocks | None:
    if "qweight" not in parts:
        return None
    bits = int(settings["bits"])
    integers = _unpack_words(parts["qweight"].T, bits)
    offset = np.uint8(settings.get("checkpoint_format") != "gptq_v2")
    zeros = (_unpack_words(parts["qzeros"], bits) + offset) & np.uint8((1 << bits) - 1)
    group = int(settings["group_size"])
    order = _group_order(parts.get("g_idx"), group)
    return _make_blocks(integers, parts["scales"].T, zeros.T, bits, group, order)


def _group_order(groups: Tensor | None, size: int) -> Order | None:
    """The inputs sorted by group; None if they are sorted already."""
    if groups is None or size == -1 or not (groups.diff() < 0).any():
        return None
    order = np.argsort(groups.numpy(), kind="stable").astype(np.int64)
    if (groups.numpy()[order] != np.arange(len(order)) // size).any():
        raise ValueError(f"g_idx does not have {size} inputs to a group")
    return order


def _read_awq(parts: Parts, settings: Settings) -> Blocks | None:
    if "qweight" not in parts:
        return None
    if settings.get("version", "gemm").lower() != "gemm":
        raise _UnsupportedFormError(f"is packed for {settings['version']} kernels")
    bits = int(settings["bits"])
    if bits != 4:
        raise _UnsupportedFormError(f"has {bits} bits")
    both = (parts["qweight"], parts["qzeros"])
    packed = (_unpack_words(x, bits).reshape(len(x), -1, 8) for x in both)
    integers, zeros = (x[..., _AWQ_ORDER].reshape(len(x), -1).T for x in packed)
    group = int(settings["group_size"])
    return _make_blocks(integers, parts["scales"].T, zeros, bits, group)


def _read_compressed(parts: Parts, settings: Settings) -> Blocks | None:
    if "weight_scale" not in parts:
        return None
    scales, zeros = parts["weight_scale"], None
    if "weight_packed" in parts and "weight_shape" in parts:
        columns = int(parts["weight_shape"][1])
        bits = 32 * parts["weight_packed"].shape[1] // columns
        groups = settings["config_groups"].values()
        declared = {int(group["weights"]["num_bits"]) for group in groups}
        if bits not in declared:
            raise _UnsupportedFormError(f"has {min(declared)} bits")
        integers = _unpack_words(parts["weight_packed"], bits)[:, :columns]
        if "weight_zero_point" in parts:
            packed = parts["weight_zero_point"].T
            zeros = _unpack_words(packed, bits)[:, : len(integers)].T
    elif "weight" in parts and parts["weight"].dtype == torch.int8:
        bits, integers = 8, _to_unsigned(parts["weight"])
        if "weight_zero_point" in parts:
            zeros = _to_unsigned(parts["weight_zero_point"])
    else:
        raise _UnsupportedFormError("does not hold integers")
    rows, count = integers.shape[1], scales.shape[1]
    if rows % count:
        raise _UnsupportedFormError(f"has {count} scales for {rows} inputs")
    order = _group_order(parts.get("weight_g_idx"), rows // count)
    return _make_blocks(integers, scales, zeros, bits, rows // count, order)


def _read_bitsandbytes(parts: Parts, settings: Settings) -> Blocks | None:
    if "SCB" in parts:
        scales = parts["SCB"].float()[:, None] / 127
        return _make_blocks(_to_unsigned(parts["weight"]), scales, None, 8, -1)
    if "absmax" in parts:
        raise _UnsupportedFormError("has 4-bit floats (nf4 or fp4)")
    return None


LAYER_READERS: dict[str, Callable[[Parts, Settings], Blocks | None]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "bitsandbytes": _read_bitsandbytes,
}
"""Readers of a layer, by the name of the quantization method in transformers.

Each returns None for a layer that is not quantized."""


def _unpack_words(packed: Tensor, bits: int) -> Bytes:
    """The integers in int32 [n, m], lowest bits first: uint8 [n, m * 32 / bits]."""
    if bits not in (2, 4, 8):
        raise _UnsupportedFormError(f"has {bits} bits")
    return unpack(np.ascontiguousarray(packed.numpy(), "<i4").view(np.uint8), bits)


def _to_unsigned(signed: Tensor) -> Bytes:
    """Shift signed bytes by 128, so that 128 stands for 0, as uint8."""
    return (signed.to(torch.int16) + 128).to(torch.uint8).numpy()


def _make_blocks(
    integers: Bytes,
    scales: Tensor,
    zeros: Bytes | None,
    bits: int,
    group: int,
    order: Order | None = None,
) -> Blocks:
    """The blocks of integers [out, in]; `scales` and `zeros` are [out, groups]."""
    columns, rows = integers.shape
    group = rows if group == -1 else group
    expected = (columns, -(-rows // group))
    shapes = {tuple(scales.shape)} | ({zeros.shape} if zeros is not None else set())
    if shapes != {expected}:
        raise ValueError(f"scales or zeros are {shapes}, not {expected}")
    sizes = [b for b in reversed(BLOCK_SIZES) if group >= rows or group % b == 0]
    if not sizes:
        raise _UnsupportedFormError(f"has {group} weights to a scale")
    block = sizes[0]
    ordered = integers if order is None else integers[:, order]
    blocked = into_blocks(ordered, block, np.uint8)
    group_of_block = np.arange(blocked.shape[1]) * block // group
    if zeros is not None and (zeros == 1 << (bits - 1)).all():
        zeros = None
    floats: Floats = scales.float().numpy()
    if zeros is not None:
        zeros = np.ascontiguousarray(zeros[:, group_of_block])
    spread = np.ascontiguousarray(floats[:, group_of_block])
    return replace(Blocks.of(blocked, spread, zeros, bits, rows), order=order)
