"""From checkpoints to a bundle."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from jetdraft.bundle import (
    CHAT_TEMPLATE,
    CONTRIB,
    DRAFTER,
    FLAVOURS,
    SCATTERED,
    STREAMS,
    TARGET,
    TOKENIZER,
    Bundle,
    GraphEntry,
    Halves,
    check_output,
    check_pair,
    writing,
)
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.parameters import keep_weights
from jetdraft.checkpoints.streamed import LOSSLESS, SHARED, Streamed, stream_weights
from jetdraft.contract import StepContract
from jetdraft.devices.providers import Provider, provider_named
from jetdraft.errors import OptionError, PairError, UnsupportedModelError
from jetdraft.export.embeddings import write_similarity
from jetdraft.export.fusion import fuse
from jetdraft.export.kv import cache_scales, quantize_cache
from jetdraft.export.seams import check_seams
from jetdraft.export.split import drop_early_exit, write_halves
from jetdraft.export.standard import standardize
from jetdraft.export.step import kv_shapes, trace
from jetdraft.export.tree import write_compaction, write_tree
from jetdraft.quant.blocks import Floats
from jetdraft.quant.calibration import Windows, own_attention, second_moments
from jetdraft.quant.sensitivity import Limit, Sensitivity
from jetdraft.quant.weights import Quantization
from jetdraft.recipe import Recipe

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
NUMPY = {"fp32": "float32", "fp16": "float16"}
Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, the steps done and their number."""


@dataclass(frozen=True)
class ExportOptions:
    """How a bundle is made.

    `drafter_recipe` None is the default beside the target's. `capacity` is the rows of
    the KV buffers (prompt and output together), `max_width` the most rows of one pass.
    The `provider` that will run it decides, where they are None, the `dtype` "fp32" or
    "fp16" of activations and buffers, the drafter's by the `drafter_provider`, and the
    `flavour`: "contrib" has onnxruntime's own operators, "standard" those of ai.onnx
    alone. With a `limit` some of the target's layers get more bits than its recipe
    says. `adapter_scale`, for streams of the shared mode, is how far the tuned weights
    move from the base. `calibration` is a text file for recipes that need one.

        ExportOptions(recipe=Recipe("int8", block_size=32), capacity=1024)
    """

    recipe: Recipe = Recipe()
    drafter_recipe: Recipe | None = None
    dtype: str | None = None
    capacity: int = 2048
    max_width: int = 256
    provider: str = "cpu"
    flavour: str | None = None
    adapter_scale: float = 1.0
    drafter_provider: str | None = None
    calibration: Path | None = None
    limit: Limit | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES):
            raise OptionError(f"unknown dtype {self.dtype!r}; choose fp32 or fp16")
        if self.flavour not in (None, *FLAVOURS):
            raise OptionError(
                f"unknown flavour {self.flavour!r}; choose {', '.join(FLAVOURS)}"
            )
        for name in (TARGET, DRAFTER):
            provider = self.provider_of(name)
            refusal = provider.refusal(self.flavour_made, NUMPY[self.dtype_of(name)])
            if refusal:
                raise OptionError(f"{provider.name} cannot run it: {refusal}")
            if self.flavour_made != CONTRIB:
                self.recipe_of(name).check_standard()
            if self.recipe_of(name).kv and provider.name != "cpu":
                raise OptionError(
                    f"{provider.name} has no fast kernel over integer KV buffers for "
                    "several rows; leave kv out, or choose --provider cpu"
                )
        if not 16 <= self.capacity <= 1 << 20:
            raise OptionError(
                f"capacity {self.capacity} is out of range; choose 16 to 1048576"
            )
        if not 2 <= self.max_width <= self.capacity:
            raise OptionError(
                f"max width {self.max_width} is out of range; choose 2 to the capacity"
            )

        self._check_calibration()
        if not 0.0 <= self.adapter_scale <= 1.0:
            raise OptionError(
                f"adapter scale {self.adapter_scale} is out of range; give 0 to 1"
            )

    def _check_calibration(self) -> None:
        """Whatever looks at a text must have one."""
        if self.limit is not None:
            self.recipe.raise_units(["0"])  # refuses what has no more bits
        if self.calibration is not None:
            if not self.calibration.is_file():
                raise OptionError(f"no file at {self.calibration}; give a text")
            return
        if self.limit is not None:
            raise OptionError(
                "which layers need more bits shows on a text; give one with "
                "--calibration FILE"
            )
        for recipe in (self.recipe_of(TARGET), self.recipe_of(DRAFTER)):
            if recipe.needs_calibration:
                raise OptionError(
                    f"{recipe.name} looks at what the model computes over a text; give "
                    "one with --calibration FILE"
                )

    def provider_of(self, name: str) -> Provider:
        """Who will run the graph of that name."""
        beside = self.drafter_provider if name == DRAFTER else None
        return provider_named(beside or self.provider)

    @property
    def flavour_made(self) -> str:
        """The flavour of all graphs."""
        return self.flavour or provider_named(self.provider).flavour

    def dtype_of(self, name: str) -> str:
        """The dtype of the graph of that name."""
        return self.dtype or self.provider_of(name).dtype

    def recipe_of(self, name: str) -> Recipe:
        """The recipe of the graph of that name."""
        if name == TARGET:
            return self.recipe
        return self.drafter_recipe or Recipe.for_drafter(self.recipe)


def export(
    target: str,
    output: str | Path,
    drafter: str | None = None,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Export a target, and a drafter beside it, to the bundle folder `output`.

    `target` and `drafter` are local checkpoint folders or hub ids. Raises
    `CheckpointError`, `PairError` or `OutputError` before anything is written.

        export("target/", "bundle", drafter="drafter/")
    """
    options = options or ExportOptions()
    report = progress or (lambda stage, done, total: None)
    check_output(Path(output).absolute())
    sources = {TARGET: target} | ({DRAFTER: drafter} if drafter else {})
    loaded: dict[str, Checkpoint] = {}
    for number, (name, source) in enumerate(sources.items()):
        report("load", number, len(sources))
        loaded[name] = Checkpoint.load(source, DTYPES[options.dtype_of(name)])
    report("load", len(sources), len(sources))
    if options.drafter_provider and not drafter:
        raise OptionError("a drafter's provider needs a drafter; give --drafter too")
    if drafter and loaded[DRAFTER].streams:
        raise PairError(f"{drafter} has streams; only a target can have them")
    _check_scale(loaded[TARGET], options)
    contracts = {name: _contract(name, ckpt, options) for name, ckpt in loaded.items()}
    for name, checkpoint in loaded.items():
        check_seams(checkpoint.model, contracts[name])
    if drafter:
        _check_tokenizers(loaded[TARGET], loaded[DRAFTER])
        check_pair(contracts[TARGET], contracts[DRAFTER])
    with writing(output) as folder, _quiet():
        graphs = {
            name: _write_graph(folder, name, ckpt, contracts[name], options, report)
            for name, ckpt in loaded.items()
        }
        _write_texts(folder, loaded[TARGET])
        write_similarity(folder, loaded[TARGET].model)
        Bundle(
            path=folder,
            graphs=graphs,
            methods=(
                "none",
                "lookup",
                *(["draft"] if drafter else []),
                *(["stream"] if loaded[TARGET].streams else []),
            ),
            eos_token_ids=loaded[TARGET].eos_token_ids,
            provider=options.provider,
            flavour=options.flavour_made,
            drafter_provider=options.drafter_provider,
            tools=_versions(),
        ).save()
    return Bundle.open(output)


@contextmanager
def _quiet() -> Iterator[None]:
    """Graph passes log every node that they drop."""
    silenced = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(silenced)


def _check_scale(target: Checkpoint, options: ExportOptions) -> None:
    """Only weights that were tuned can be taken back."""
    tuned = target.streams is not None and target.streams.mode == SHARED
    if options.adapter_scale != 1.0 and not tuned:
        raise OptionError(
            f"adapter scale {options.adapter_scale} needs streams of the shared mode: "
            f"in {target.source} no LoRA may be merged into the weights; leave it out"
        )


def _contract(
    name: str, checkpoint: Checkpoint, options: ExportOptions
) -> StepContract:
    head = checkpoint.model.get_output_embeddings().weight
    return StepContract(
        vocab_size=checkpoint.vocab_size,
        capacity=options.capacity,
        max_width=options.max_width,
        dtype=NUMPY[options.dtype_of(name)],
        kv_shapes=kv_shapes(checkpoint.model),
        streams=checkpoint.streams.gamma if checkpoint.streams else 0,
        # Under a drafter's head lies how sure it is (SpecDec++).
        hidden_size=head.shape[1] if name == DRAFTER else 0,
    )


def _check_tokenizers(target: Checkpoint, drafter: Checkpoint) -> None:
    """The drafter must read and write the target's token ids."""
    if target.tokenizer is None or drafter.tokenizer is None:
        return  # ids only; the vocabularies are compared by their sizes
    if _vocabulary(target.tokenizer) != _vocabulary(drafter.tokenizer):
        raise PairError(
            f"{drafter.source} has another tokenizer than {target.source}; choose a "
            "drafter trained with the same one"
        )


def _vocabulary(tokenizer: str) -> object:
    """What decides which ids a text becomes."""
    fields = json.loads(tokenizer)
    return [fields.get(key) for key in ("model", "normalizer", "pre_tokenizer")]


def _write_graph(
    folder: Path,
    name: str,
    checkpoint: Checkpoint,
    contract: StepContract,
    options: ExportOptions,
    report: Progress,
) -> GraphEntry:
    recipe = options.recipe_of(name)
    report(f"trace {name}", 0, 1)
    parameters, names = checkpoint.parameters, checkpoint.names()
    # Before streams hook into its layers.
    scales = _cache_scales(checkpoint, recipe, contract, options)
    quantization, kl = _quantization(name, checkpoint, contract, options, report)
    streamed = described = None
    if checkpoint.streams is not None:
        streamed = checkpoint.with_streams(options.adapter_scale)
    model = trace(streamed or checkpoint.model, contract, names)
    if quantization.standard:
        standardize(model, options.flavour_made == SCATTERED)
    else:
        blocks = checkpoint.packed.blocks if checkpoint.packed else {}
        fuse(model, contract, {name: each.form for name, each in blocks.items()})
    report(f"trace {name}", 1, 1)
    stage = f"quantize {name}"
    quantization.apply(model, lambda done, of: report(stage, done, of))
    if scales:
        contract = quantize_cache(model, contract, scales, recipe.kv_bits)
    if streamed is not None:
        keep_weights(model, stream_weights(streamed), {})
        described = {**streamed.streams.settings.to_json(), "base": _base(streamed)}
        write_streams(folder / STREAMS, streamed, contract.dtype)
    for node in model.graph:
        node.metadata_props.clear()  # stack traces with this machine's paths
    file = f"{name}.onnx"
    ir.save(model, folder / file, external_data=f"{file}.data")
    halves = _write_halves(folder, name, contract, streamed) if streamed else None
    tree, compaction = f"{name}-tree.onnx", f"{name}-compaction.onnx"
    branching = write_tree(folder / file, folder / tree, contract)
    if streamed is not None and not branching:
        raise UnsupportedModelError(
            f"{checkpoint.source} attends in sliding windows; streams need plain "
            "attention"
        )
    if branching:
        write_compaction(folder / compaction, contract)
    return GraphEntry(
        file=file,
        tree_file=tree if branching else None,
        compaction_file=compaction if branching else None,
        halves=halves,
        contract=contract,
        quantization=quantization.recipe.to_json()
        | ({"packed": checkpoint.packed.method} if checkpoint.packed else {})
        | ({"kl": kl} if kl is not None else {}),
        source=checkpoint.source,
        parameters=parameters,
        streams=described,
    )


def _cache_scales(
    checkpoint: Checkpoint,
    recipe: Recipe,
    contract: StepContract,
    options: ExportOptions,
) -> list[Floats]:
    """Those of integer KV buffers; none of floats."""
    if not recipe.kv_bits or options.calibration is None:
        return []
    windows = Windows.of(options.calibration, checkpoint.tokenizer, contract.capacity)
    return cache_scales(checkpoint.model, contract, windows, recipe.kv_bits)


def _quantization(
    name: str,
    checkpoint: Checkpoint,
    contract: StepContract,
    options: ExportOptions,
    report: Progress,
) -> tuple[Quantization, float | None]:
    """The recipe with all that it needs of a checkpoint; mixed, if there is a limit,
    with the KL that was measured.
    """
    recipe, moments, kl = options.recipe_of(name), {}, None
    limit = options.limit if name == TARGET else None
    if limit is not None and checkpoint.packed is not None:
        raise OptionError(
            f"{checkpoint.source} is quantized already, so its layers have the bits "
            "they have; leave the limit out"
        )
    _check_raised(recipe, contract)
    if options.calibration is not None and (recipe.needs_moments or limit):
        windows = Windows.of(
            options.calibration, checkpoint.tokenizer, contract.capacity
        )
        if recipe.needs_moments:
            moments = second_moments(checkpoint.model, windows)
        if limit is not None:
            with own_attention(checkpoint.model):
                recipe, kl = Sensitivity(
                    checkpoint.model, recipe, windows, moments
                ).mixed(limit, lambda done, of: report("measure layers", done, of))
    made = Quantization(
        recipe,
        checkpoint.head,
        options.flavour_made != CONTRIB,
        moments,
        checkpoint.packed.blocks if checkpoint.packed else {},
    )
    return made, kl


def _check_raised(recipe: Recipe, contract: StepContract) -> None:
    layers = len(contract.kv_shapes)
    if recipe.raised and recipe.raised[-1] >= layers:
        raise OptionError(
            f"{recipe.name} raises layer {recipe.raised[-1]}; the model has layers 0 "
            f"to {layers - 1}"
        )


def _write_halves(
    folder: Path, name: str, contract: StepContract, streamed: Streamed
) -> Halves | None:
    """The halves of a graph with streams, and what moves rows together in each.

    None where all layers have streams: then nothing lies below them to exit from.
    """
    files = Halves(
        lower=f"{name}-lower.onnx",
        upper=f"{name}-upper.onnx",
        lower_compaction=f"{name}-lower-compaction.onnx",
        upper_compaction=f"{name}-upper-compaction.onnx",
        hidden_size=streamed.streams.embeddings.shape[1],
    )
    traced = folder / f"{name}.onnx"
    if streamed.streams.settings.layers == len(contract.kv_shapes):
        drop_early_exit(traced)
        return None
    halves = contract.split(streamed.streams.settings.layers, files.hidden_size)
    write_halves(traced, folder / files.lower, folder / files.upper, halves)
    write_compaction(folder / files.lower_compaction, halves.lower)
    write_compaction(folder / files.upper_compaction, halves.upper)
    drop_early_exit(traced)
    return files


def write_streams(file: Path, streamed: Streamed, dtype: str) -> None:
    """Write the weights that make a task of a base, for `jetdraft.load(streams=)`.

    An npz of the streams' float arrays, by the names that they have in the graph, and
    `base`, the hash of the weights that they belong to.
    """
    weights = stream_weights(streamed)
    arrays: dict[str, Any] = {
        name: weight.numpy().astype(dtype) for name, weight in weights.items()
    }
    arrays["base"] = np.array(_base(streamed))
    np.savez(file, **arrays)


def _base(streamed: Streamed) -> str:
    """What streams belong to: the base, or in the shared mode the tuned weights."""
    settings = streamed.streams.settings
    if settings.mode == LOSSLESS:
        return settings.base
    return hashlib.sha256(f"{settings.base} {streamed.tuned}".encode()).hexdigest()


def _write_texts(folder: Path, target: Checkpoint) -> None:
    texts = {TOKENIZER: target.tokenizer, CHAT_TEMPLATE: target.chat_template}
    for name, text in texts.items():
        if isinstance(text, str):
            (folder / name).write_text(text, encoding="utf-8")


def _versions() -> dict[str, str]:
    tools = ("jetdraft", "torch", "transformers", "optimum", "onnx", "onnxruntime")
    found = {}
    for tool in tools:
        try:
            found[tool] = importlib.metadata.version(tool)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
