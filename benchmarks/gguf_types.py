"""What llama.cpp's GGUF types and jetdraft's recipes do to the same weights.

    pip install xllamacpp==2026.10.11549
    python benchmarks/gguf_types.py checkpoints/qwen2.5-coder-1.5b.gguf -o types \
        --recipes int8-rtn-b32,int4-rtn-b32-head8 --json types.json

A published GGUF file lies on the grid of its own types, so these types would lose
nothing. Hence noise of half a step takes it off its grid first, and the result, in
bf16, is the reference. FILE must have one matrix for embedding and head. llama.cpp's
own functions quantize the reference, without an importance matrix and with the mix of
`llama-quantize`; the files and the reference's folder are written for other benchmarks.
Weights count only: everything is computed in floats.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import gguf
import numpy as np
import torch
import xllamacpp
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer

from jetdraft.checkpoints import gguf_types
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.gguf import read_gguf
from jetdraft.export.own_text import own_text
from jetdraft.quant.algorithms import quantize
from jetdraft.quant.calibration import Windows, own_attention, second_moments
from jetdraft.recipe import HEAD, Recipe, unit_of

sys.path.append(str(Path(__file__).parents[1] / "examples" / "real"))
from unpack import unpack

TYPES = ("Q4_0", "Q4_1", "Q4_K_M", "Q8_0")
WINDOW, WINDOWS = 256, 3
THREADS = 2
logging.getLogger("gguf.gguf_writer").setLevel(logging.WARNING)
Values = np.ndarray[Any, np.dtype[np.float32]]

CHUNK = ctypes.CDLL(xllamacpp.xllamacpp.__file__).ggml_quantize_chunk
CHUNK.restype = ctypes.c_size_t


@dataclass(frozen=True)
class Row:
    """What a type or a recipe costs; KL in nats per token."""

    name: str
    mb: float
    own_text_kl: float
    docs_kl: float
    docs_top1: float
    docs_perplexity: float


def reference_of(file: Path, output: Path) -> None:
    """Write `file` as bf16, with noise within each step of its grid."""
    if not read_gguf(str(file)).config.tie_word_embeddings:
        raise click.UsageError(f"{file} has a head of its own; give a tied model")
    reader, draw = gguf.GGUFReader(file), np.random.default_rng(0)
    two_copies = "output.weight" in {tensor.name for tensor in reader.tensors}

    def converted(tensor: Any) -> tuple[str, Values, Type] | None:
        if two_copies and tensor.name == "token_embd.weight":
            return None  # the head is the finer copy of the two
        name = tensor.name
        if name == "output.weight":
            name = "token_embd.weight"
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type in (Type.F32, Type.F16, Type.BF16):
            return name, values, Type.F32
        if tensor.tensor_type.name not in gguf_types.TYPES:
            raise click.UsageError(f"no grid is known for {tensor.tensor_type.name}")
        size = 16 if tensor.tensor_type == Type.Q6_K else 32
        blocks = values.reshape(-1, size)
        gaps = np.diff(np.sort(blocks, axis=1), axis=1)
        least = 1e-3 * np.ptp(blocks, axis=1, keepdims=True)
        steps = np.where(gaps > least, gaps, np.inf).min(axis=1, keepdims=True)
        steps[~np.isfinite(steps)] = 0.0  # a block of equal weights
        noise = draw.uniform(-0.5, 0.5, blocks.shape).astype(np.float32)
        return name, (blocks + steps * noise).reshape(values.shape), Type.BF16

    _write(reader, output, converted, gguf.LlamaFileType.MOSTLY_BF16)


def type_of(name: str, mix: str, layers: int, columns: int) -> Type:
    """The type of a matrix in a mix, as `llama-quantize` chooses for a tied model."""
    if name == "token_embd.weight":
        wanted = Type.Q8_0 if mix == "Q8_0" else Type.Q6_K
    elif mix == "Q4_K_M":
        finer = False
        if name.endswith(("attn_v.weight", "ffn_down.weight")):
            layer = int(name.split(".")[1])
            eighth = layers // 8
            outer = layer < eighth or layer >= 7 * layers // 8
            finer = outer or (layer - eighth) % 3 == 2
        wanted = Type.Q6_K if finer else Type.Q4_K
    else:
        wanted = Type[mix]
    if columns % 256:
        wanted = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}.get(wanted, wanted)
    return wanted


def quantized(reference: Path, mix: str, output: Path) -> None:
    """Write the reference in the types of a mix."""
    reader = gguf.GGUFReader(reference)
    layers = 1 + max(
        int(tensor.name.split(".")[1])
        for tensor in reader.tensors
        if tensor.name.startswith("blk.")
    )

    def converted(tensor: Any) -> tuple[str, Values, Type]:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type == Type.F32:
            return tensor.name, values, Type.F32
        return tensor.name, values, type_of(tensor.name, mix, layers, values.shape[1])

    _write(reader, output, converted, gguf.LlamaFileType[f"MOSTLY_{mix}"])


def _write(
    reader: gguf.GGUFReader,
    output: Path,
    converted: Callable[[Any], tuple[str, Values, Type] | None],
    file_type: int,
) -> None:
    """Copy a file's fields, and its tensors as `converted` gives them."""
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(output, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = file_type if field.name == "general.file_type" else field.contents()
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, inner)
    for tensor in reader.tensors:
        result = converted(tensor)
        if result is not None:
            name, values, kind = result
            writer.add_tensor(name, _stored(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(values: Values, kind: Type) -> np.ndarray[Any, Any]:
    """The bytes of a type, which llama.cpp's own function computes."""
    if kind in (Type.F32, Type.BF16):
        return gguf.quantize(values, kind)
    values = np.ascontiguousarray(values)
    rows, columns = values.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.zeros((rows, columns // block * size), np.uint8)
    pieces = np.array_split(np.arange(rows), THREADS)

    def convert(piece: np.ndarray[Any, Any]) -> None:
        first, count = int(piece[0]), len(piece)
        CHUNK(
            ctypes.c_int(kind),
            values.ctypes.data_as(ctypes.c_void_p),
            stored.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(first * columns),
            ctypes.c_int64(count),
            ctypes.c_int64(columns),
            None,
        )

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(convert, pieces))
    return stored


class Reference:
    """The reference model, two texts, and its log probabilities on them."""

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint.load(str(folder), torch.float32)
        self.model: Any = checkpoint.model
        self.own = own_text(checkpoint)
        assert checkpoint.tokenizer is not None
        encoder = Tokenizer.from_str(checkpoint.tokenizer)
        ids = encoder.encode("\n\n".join(topics.values())).ids[: WINDOW * WINDOWS]
        docs = torch.tensor(ids).reshape(WINDOWS, WINDOW)
        self.docs = Windows(docs)
        head = self.model.get_output_embeddings()
        self.layers = {
            f"{name}.weight": (layer, HEAD if layer is head else unit_of(name))
            for name, layer in self.model.named_modules()
            if isinstance(layer, torch.nn.Linear)
        }
        self._full = [self._logs(text) for text in (self.own, self.docs)]

    def _logs(self, text: Windows) -> torch.Tensor:
        """Float32 [tokens, vocabulary], of the scored tokens."""
        with own_attention(self.model), torch.no_grad():
            logits = self.model(text.ids, use_cache=False).logits
        scored: torch.Tensor = logits[:, -text.scored :].flatten(0, 1)
        return scored.float().log_softmax(-1)

    @contextmanager
    def _with(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Replace weights, in halves, as the export's own measure does."""
        originals = {name: self.layers[name][0].weight.data for name in weights}
        for name, weight in weights.items():
            self.layers[name][0].weight.data = weight.half()
        try:
            yield
        finally:
            for name, weight in originals.items():
                self.layers[name][0].weight.data = weight

    def row(self, name: str, mb: float, weights: Mapping[str, torch.Tensor]) -> Row:
        """What these weights do."""
        with self._with(weights):
            own, docs = self._logs(self.own), self._logs(self.docs)
        full_own, full_docs = self._full
        before = docs.reshape(WINDOWS, WINDOW, -1)[:, :-1]
        following = self.docs.ids[:, 1:, None]
        loss = -before.gather(2, following).mean()
        return Row(
            name,
            mb,
            _kl(full_own, own),
            _kl(full_docs, docs),
            float((docs.argmax(-1) == full_docs.argmax(-1)).float().mean()),
            float(loss.exp()),
        )

    def of_recipe(self, recipe: Recipe) -> Row:
        """What a recipe does; the bytes are those of its matrices and scales."""
        moments = second_moments(self.model, self.own) if recipe.needs_moments else {}
        weights, total = {}, 0
        for name, (layer, unit) in self.layers.items():
            own = recipe.of_unit(unit)
            matrix = layer.weight.detach().float().numpy().T
            blocks = quantize(matrix, own, moments.get(name))
            weights[name] = torch.from_numpy(blocks.floats.T).half()
            stored = [blocks.packed, blocks.scales.astype(np.float32)]
            if blocks.packed_zeros is not None:
                stored.append(blocks.packed_zeros)
            total += sum(array.nbytes for array in stored)
        return self.row(recipe.name, total / 1e6, weights)

    def of_file(self, file: Path) -> Row:
        """What a GGUF file does, as jetdraft reads it (docs/quantization.md)."""
        floats = read_gguf(str(file)).packed.floats
        head = floats["model.embed_tokens.weight"]
        weights = {
            name: head if unit == HEAD else floats[name]
            for name, (_, unit) in self.layers.items()
        }
        return self.row(f"{file.stem} (GGUF)", matrices_mb(file), weights)


def matrices_mb(file: Path) -> float:
    """The megabytes of a file's matrices."""
    tensors = gguf.GGUFReader(file).tensors
    return sum(int(t.n_bytes) for t in tensors if len(t.shape) > 1) / 1e6


def _kl(full: torch.Tensor, other: torch.Tensor) -> float:
    return float((full.exp() * (full - other)).sum() / len(full))


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--recipes", default="int8-rtn-b32,int4-rtn-b32-head8", show_default=True)
@click.option("--json", "report", type=click.Path(path_type=Path))
def main(file: Path, output: Path, recipes: str, report: Path | None) -> None:
    """Measure types and recipes on the weights of FILE."""
    output.mkdir(parents=True, exist_ok=True)
    whole = output / "reference.gguf"
    if not whole.exists():
        reference_of(file, whole)
        unpack(whole, output / "reference")
    files = [output / f"{mix}.gguf" for mix in TYPES]
    for mix, made in zip(TYPES, files, strict=True):
        if not made.exists():
            quantized(whole, mix, made)
    reference = Reference(output / "reference")
    rows = [reference.row("reference", matrices_mb(whole), {})]
    print("| weights | MB | KL, own text | KL, docs | top-1, docs | perplexity, docs |")
    print("|" + " --- |" * 6)
    _show(rows[0])
    for measure in (
        *((lambda f=f: reference.of_file(f)) for f in files),
        *(
            (lambda n=n: reference.of_recipe(Recipe.parse(n)))
            for n in recipes.split(",")
        ),
    ):
        rows.append(measure())
        _show(rows[-1])
    if report is not None:
        report.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _show(row: Row) -> None:
    print(
        f"| {row.name} | {row.mb:.1f} | {row.own_text_kl:.4f} | {row.docs_kl:.4f} "
        f"| {row.docs_top1:.3f} | {row.docs_perplexity:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
