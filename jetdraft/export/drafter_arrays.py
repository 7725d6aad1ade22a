"""The arrays of a bundle's drafter for a checkpoint whose weights have moved on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import Tensor

from jetdraft.bundle import CONTRIB, DRAFTER, TARGET, Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.draft_module import DraftModule
from jetdraft.checkpoints.silence import silenced
from jetdraft.errors import CheckpointError, OptionError, PairError
from jetdraft.export.draft_vocab import CutHead
from jetdraft.export.drafters import head_job
from jetdraft.export.export_options import DTYPES, ExportOptions
from jetdraft.export.graphs import Job, write_chain
from jetdraft.export.step import Step, kv_shapes
from jetdraft.manifest import GraphEntry
from jetdraft.quant.blocks import Floats
from jetdraft.quant.calibration import MOST_WINDOWS, WINDOW, Windows, second_moments
from jetdraft.quant.weights import Quantization
from jetdraft.recipe import Recipe

Arrays = dict[str, npt.NDArray[Any]]


def drafter_arrays(bundle: Bundle, checkpoint: Checkpoint, text: Tensor) -> Arrays:
    """The arrays of the drafter's graph that differ from the bundle's, by name.

    `checkpoint` is the bundle's drafter after more training. Its matrices are quantized
    with the recipe in the manifest; a recipe that needs a text reads `text`, token ids
    int64 [n]. Raises `PairError` if the graph of the checkpoint has another form than
    the bundle's, and `CheckpointError` for integers that cannot be trained.
    """
    check_trainable(bundle, checkpoint)
    entry = bundle.graphs[DRAFTER]

    def write(folder: Path) -> None:
        _write(folder, bundle, entry, checkpoint, text)

    return changed_arrays(bundle, write)


def head_arrays(bundle: Bundle, target: Checkpoint, head: DraftModule) -> Arrays:
    """The arrays of the head's graph that differ from the bundle's, by name.

    `head` was loaded for `target`, the bundle's. Matrices that it has from the target
    stay as they are. Raises `PairError` if its graph has another form than the
    bundle's.
    """
    entry = bundle.graphs[DRAFTER]

    def write(folder: Path) -> None:
        contract, job = bundle.target.contract, _target_job(folder, bundle, target)
        write_chain(*head_job(job, contract, entry.source, head))

    return changed_arrays(bundle, write)


def _target_job(folder: Path, bundle: Bundle, target: Checkpoint) -> Job:
    """As much of the target's job as its head needs."""
    entry, packed = bundle.target, target.packed
    dtype = bundle.graphs[DRAFTER].contract.dtype
    # The form of borrowed matrices counts, and how their integers were found does not.
    recipe = replace(Recipe.from_json(entry.quantization), algorithm="rtn", kv=None)
    return Job(
        folder=folder,
        name=TARGET,
        checkpoint=target,
        options=ExportOptions(
            recipe,
            Recipe.from_json(bundle.graphs[DRAFTER].quantization),
            capacity=entry.contract.capacity,
            max_width=entry.contract.max_width,
            provider=bundle.provider,
            drafter_provider=bundle.drafter_provider,
            flavour=bundle.flavour,
            dtype=next(name for name, long in DTYPES.items() if long == dtype),
        ),
        quantization=Quantization(
            recipe, target.head, packed=packed.blocks if packed else {}
        ),
        names=target.names(),
    )


def changed_arrays(bundle: Bundle, write: Callable[[Path], None]) -> Arrays:
    """What differs from the bundle's in the drafter's graph that `write` writes."""
    entry = bundle.graphs[DRAFTER]
    with TemporaryDirectory() as folder, silenced(logging.INFO):
        write(Path(folder))
        new = ir.load(Path(folder, entry.file))
        return _changed(ir.load(bundle.path / entry.file), new)


def check_swappable(bundle: Bundle) -> GraphEntry:
    """The drafter, whose weights can be swapped; raises `OptionError` for others."""
    entry = bundle.drafter
    if entry is None or not entry.contract.learns or bundle.flavour != CONTRIB:
        raise OptionError(
            "only a drafter model, or a head of EAGLE or MTP, in a contrib bundle, "
            "learns from use; export with one of them"
        )
    return entry


def check_trainable(bundle: Bundle, checkpoint: Checkpoint) -> None:
    """Raise `PairError` unless a checkpoint can be the bundle's drafter.

    Raises `CheckpointError` for integers that cannot be trained, and `OptionError` for
    a bundle whose drafter's weights cannot be swapped.
    """
    entry = check_swappable(bundle)
    if checkpoint.packed is not None:
        raise CheckpointError(
            f"{checkpoint.source} is quantized already, so it cannot be trained; give "
            "the checkpoint in floats"
        )
    contract = entry.contract
    if (checkpoint.vocab_size, kv_shapes(checkpoint.model)) != (
        contract.vocab_size,
        contract.kv_shapes,
    ):
        raise _another(checkpoint.source)


def _write(
    folder: Path,
    bundle: Bundle,
    entry: GraphEntry,
    checkpoint: Checkpoint,
    text: Tensor,
) -> None:
    """Write the drafter's graph as its export did; scales of integer buffers stay."""
    recipe = replace(Recipe.from_json(entry.quantization), kv=None)
    contract, ids = replace(entry.contract, kv_bits=0), bundle.draft_vocabulary()
    cut = None
    if ids is not None:
        dtype = getattr(torch, contract.dtype)
        cut = CutHead.of(checkpoint, torch.from_numpy(ids), dtype)
        checkpoint = cut.checkpoint
    moments = _moments(checkpoint, text) if recipe.needs_moments else {}
    quantization = Quantization(recipe, checkpoint.head, moments=moments)
    job = Job(
        folder=folder,
        name=DRAFTER,
        checkpoint=checkpoint,
        options=ExportOptions(
            drafter_recipe=recipe,
            capacity=contract.capacity,
            max_width=contract.max_width,
            provider=bundle.drafter_provider or bundle.provider,
            flavour=bundle.flavour,
        ),
        quantization=cut.quantization(quantization) if cut else quantization,
        names=checkpoint.names(),
    )
    step = Step(checkpoint.model, contract, ids=cut.ids if cut else None)
    write_chain(job, replace(entry, contract=contract), step)


def _moments(checkpoint: Checkpoint, text: Tensor) -> dict[str, Floats]:
    length = min(WINDOW, len(text))
    windows = text[: len(text) // length * length].reshape(-1, length)
    return second_moments(checkpoint.model, Windows(windows[:MOST_WINDOWS]))


def _changed(old: ir.Model, new: ir.Model) -> Arrays:
    """The arrays of the graph `new` that differ from those of `old`.

    Those that lie in the target's file are the target's. onnxruntime replaces arrays in
    a weights file only, so no other array may differ.
    """
    before, after = _tensors(old), _tensors(new)
    arrays: Arrays = {}
    for name, tensor in after.items():
        own = before.get(name)
        if isinstance(own, ir.ExternalTensor) and DRAFTER not in str(own.location):
            continue
        array = tensor.numpy()
        if own is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
            raise _another(f"the array {name}")
        if np.array_equal(array, own.numpy()):
            continue
        if not isinstance(own, ir.ExternalTensor):
            raise PairError(
                f"the array {name} is too small for the weights file, so it cannot be "
                "swapped; learn from use with a larger drafter"
            )
        arrays[name] = np.array(array)
    return arrays


def _tensors(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    values = model.graph.initializers.items()
    return {n: v.const_value for n, v in values if v.const_value is not None}


def _another(what: str) -> PairError:
    return PairError(
        f"{what} does not have the form of the bundle's drafter; give the checkpoint "
        "that was exported, or export the bundle again with this version"
    )
