"""The graphs of a drafter beside its target, and their arrays after more training."""

import logging
from collections.abc import Callable, Mapping
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
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.layers import Taps
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import CheckpointError, OptionError, PairError
from jetdraft.export import graphs
from jetdraft.export.draft_step import make_draft_step, slice_target_buffers
from jetdraft.export.draft_vocab import CutHead, write_vocabulary
from jetdraft.export.export_options import DTYPES, ExportOptions
from jetdraft.export.graphs import Job, share_weights, write_chain
from jetdraft.export.step import Step, buffer_sizes
from jetdraft.manifest import GraphEntry
from jetdraft.ort import silenced
from jetdraft.quant.divergence import MAX_WINDOWS, WINDOW, Windows, second_moments
from jetdraft.quant.weights import Quantization
from jetdraft.recipe import Recipe

Arrays = dict[str, npt.NDArray[Any]]


def load_draft_head(
    files: HeadFiles, target: Checkpoint, options: ExportOptions
) -> DraftModule:
    """Load a head for a target; raise a `JetdraftError` if the options do not fit."""
    head = load_head(files, target, getattr(torch, DTYPES[options.dtype_of(DRAFTER)]))
    recipe = options.recipe
    one_type = options.dtype_of(TARGET) == options.dtype_of(DRAFTER)
    if head.reads.target_kv and ((recipe is not None and recipe.kv) or not one_type):
        fact = f"{head.published} reads the target's buffers in floats of its own type"
        fix = "leave kv out of the recipe, and give both one --dtype"
        raise OptionError(f"{fact}; {fix}")
    # A head reads matrices of its target, in the target's recipe.
    options.check_kernel(options.recipe_of(TARGET), DRAFTER)
    return head


def head_taps(head: DraftModule) -> Taps | None:
    """Return the taps of the target's states that a head reads; None without any."""
    config, reads = head.config, head.reads
    if not reads.features:
        return None
    if reads.cut:
        return Taps(config.taps, config.feature_size, cut=config.taps[0])
    if not config.taps:
        return Taps((), config.feature_size)
    return Taps(config.taps, config.feature_size, head.fuse, head.fusion_modules())


def write_head_graphs(
    target: Job,
    entry: GraphEntry,
    source: str,
    head: DraftModule,
    overlaps: Mapping[str, float],
) -> GraphEntry:
    """Write a head's graphs beside its target's, and return their manifest entry."""
    lender = target.folder / entry.file
    job, own, step = make_head_job(target, entry.contract, source, head)
    own = replace(own, quantization={**own.quantization, **overlaps})
    if own.contract.source_slots:
        own = graphs.write_encoder(job, own, job.quantization)
        share_weights(job.graph_file("encoder"), target.graph_file("encoder"))
    own = write_chain(job, own, step)
    file = job.folder / own.file
    if own.contract.reads and target.options.provider_of(DRAFTER).name == "cpu":
        slice_target_buffers(file, own.contract)
    share_weights(file, lender)
    return own if own.contract.block else graphs.write_tree(job, own)


def make_head_job(
    target: Job, contract: StepContract, source: str, head: DraftModule
) -> tuple[Job, GraphEntry, Step]:
    """Make a head's job, manifest entry and step beside a target of `contract`."""
    options = target.options
    step = make_draft_step(head, contract, DTYPES[options.dtype_of(DRAFTER)])
    checkpoint = Checkpoint(source, head, None, None, ())
    names, recipe = checkpoint.weight_names(), options.recipe_of(DRAFTER)
    own = list(head.parameters())
    shared = [id(weight) for weight in own if id(weight) in target.names]
    borrowed = {names[weight]: target.names[weight] for weight in shared}
    entry = GraphEntry(
        file=f"{DRAFTER}.onnx",
        contract=step.contract,
        quantization=recipe.to_json(),
        source=source,
        parameters=sum(w.numel() for w in own if names[id(w)] not in borrowed),
        vocabulary_file=write_vocabulary(target.folder, head.ids),
    )
    lm_head = getattr(head, "lm_head", None)
    quantization = Quantization(
        recipe,
        "" if lm_head is None else names[id(lm_head.weight)],
        options.effective_flavour != CONTRIB,
        borrowed=borrowed,
        lender=target.quantization,
    )
    job = replace(
        target,
        name=DRAFTER,
        checkpoint=checkpoint,
        quantization=quantization,
        scales=[],
        names=names,
    )
    return job, entry, step


def drafter_arrays(bundle: Bundle, checkpoint: Checkpoint, text: Tensor) -> Arrays:
    """Return the arrays of the drafter's graph that differ from the bundle's, by name.

    Recipes that need moments read `text` int64 [n]. Raises `PairError` for a graph of
    another form, `CheckpointError` for integers that cannot be trained.
    """
    check_trainable(bundle, checkpoint)
    return changed_arrays(bundle, lambda to: _export(to, bundle, checkpoint, text))


def head_arrays(bundle: Bundle, target: Checkpoint, head: DraftModule) -> Arrays:
    """Return a head's arrays that differ from the bundle's; raises `PairError`."""
    entry = bundle.graphs[DRAFTER]

    def write(folder: Path) -> None:
        contract, job = bundle.target.contract, _make_target_job(folder, bundle, target)
        write_chain(*make_head_job(job, contract, entry.source, head))

    return changed_arrays(bundle, write)


def _make_target_job(folder: Path, bundle: Bundle, target: Checkpoint) -> Job:
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
            recipe, target.lm_head_name, packed=packed.blocks if packed else {}
        ),
        names=target.weight_names(),
    )


def changed_arrays(bundle: Bundle, write: Callable[[Path], None]) -> Arrays:
    """Let `write` write the drafter's graph to a folder; return arrays that differ."""
    entry = bundle.graphs[DRAFTER]
    with TemporaryDirectory() as folder, silenced(logging.INFO):
        write(Path(folder))
        new = ir.load(Path(folder, entry.file))
        return _differing_arrays(ir.load(bundle.path / entry.file), new)


def check_swappable(bundle: Bundle) -> GraphEntry:
    """Return the drafter's entry; raise `OptionError` if its weights cannot change."""
    entry = bundle.drafter
    if entry is None or not entry.contract.learns or bundle.flavour != CONTRIB:
        fact = "only a drafter model, or a head of EAGLE or MTP, in a contrib bundle, "
        raise OptionError(f"{fact}learns from use; export with one of them")
    return entry


def check_trainable(bundle: Bundle, checkpoint: Checkpoint) -> None:
    """Raise a `JetdraftError` unless a checkpoint can be the bundle's drafter."""
    entry = check_swappable(bundle)
    if checkpoint.packed is not None:
        fact = f"{checkpoint.source} is quantized already, so it cannot be trained"
        raise CheckpointError(f"{fact}; give the checkpoint in floats")
    wanted = entry.contract.vocab_size, entry.contract.kv_shapes
    if (checkpoint.vocab_size, buffer_sizes(checkpoint.model).kv_shapes) != wanted:
        raise _pair_error(checkpoint.source)


def _export(folder: Path, bundle: Bundle, checkpoint: Checkpoint, text: Tensor) -> None:
    entry = bundle.graphs[DRAFTER]
    recipe = replace(Recipe.from_json(entry.quantization), kv=None)
    contract, ids = replace(entry.contract, kv_bits=0), bundle.draft_vocabulary()
    cut = None
    if ids is not None:
        dtype = getattr(torch, contract.dtype)
        cut = CutHead.of(checkpoint, torch.from_numpy(ids), dtype)
        checkpoint = cut.checkpoint
    moments = {}
    if recipe.needs_moments:
        length = min(WINDOW, len(text))
        windows = text[: len(text) // length * length].reshape(-1, length)
        moments = second_moments(checkpoint.model, Windows(windows[:MAX_WINDOWS]))
    quantization = Quantization(recipe, checkpoint.lm_head_name, moments=moments)
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
        names=checkpoint.weight_names(),
    )
    step = Step(checkpoint.model, contract, ids=cut.ids if cut else None)
    write_chain(job, replace(entry, contract=contract), step)


def _differing_arrays(exported: ir.Model, trained: ir.Model) -> Arrays:
    """Return the arrays that differ; `PairError` if some are not in a weights file."""
    before, after = _constants(exported), _constants(trained)
    arrays: Arrays = {}
    for name, tensor in after.items():
        kept = before.get(name)
        if isinstance(kept, ir.ExternalTensor) and DRAFTER not in str(kept.location):
            continue
        array = tensor.numpy()
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            raise _pair_error(f"the array {name}")
        if np.array_equal(array, kept.numpy()):
            continue
        if not isinstance(kept, ir.ExternalTensor):
            raise PairError(
                f"the array {name} is too small for the weights file, so it cannot be "
                "swapped; learn from use with a larger drafter"
            )
        arrays[name] = np.array(array)
    return arrays


def _constants(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    values = model.graph.initializers.items()
    return {n: v.const_value for n, v in values if v.const_value is not None}


def _pair_error(part: str) -> PairError:
    return PairError(
        f"{part} does not have the form of the bundle's drafter; give the checkpoint "
        "that was exported, or export the bundle again with this version"
    )
