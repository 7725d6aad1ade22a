"""Writes the graphs of a head into the bundle of its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from jetdraft.bundle import CONTRIB, DRAFTER, TARGET
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.draft_module import DraftModule
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.layers import Taps
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import OptionError
from jetdraft.export.draft_step import draft_step, read_less
from jetdraft.export.draft_vocab import write_vocabulary
from jetdraft.export.export_options import DTYPES, ExportOptions
from jetdraft.export.graphs import (
    Job,
    share_weights,
    write_chain,
    write_encoder,
    write_tree,
)
from jetdraft.export.step import Step
from jetdraft.manifest import GraphEntry
from jetdraft.quant.weights import Quantization


def head_of(
    files: HeadFiles, target: Checkpoint, options: ExportOptions
) -> DraftModule:
    """The head in a folder or hub repository; raises a `JetdraftError`."""
    dtype = getattr(torch, DTYPES[options.dtype_of(DRAFTER)])
    head = load_head(files, target, dtype)
    recipe = options.recipe
    one_type = options.dtype_of(TARGET) == options.dtype_of(DRAFTER)
    if head.reads.target_kv and ((recipe is not None and recipe.kv) or not one_type):
        raise OptionError(
            f"{head.published} reads the target's buffers in floats of its own type; "
            "leave kv out of the recipe, and give both one --dtype"
        )
    # A head reads matrices of its target, in the target's recipe.
    options.check_kernel(options.recipe_of(TARGET), DRAFTER)
    return head


def taps_of(head: DraftModule) -> Taps | None:
    """What a head reads of its target's states; None for a drafter without them."""
    config, reads = head.config, head.reads
    if not reads.features:
        return None
    if reads.cut:
        return Taps(config.taps, config.feature_size, cut=config.taps[0])
    if not config.taps:
        return Taps((), config.feature_size)
    return Taps(config.taps, config.feature_size, head.fuse, head.fusion())


def write_head(
    target: Job,
    entry: GraphEntry,
    source: str,
    head: DraftModule,
    overlaps: Mapping[str, float],
) -> GraphEntry:
    """Write a head's graphs; matrices of the target stay in the target's file.

    `target` and `entry` are of the head's target, whose graphs are written already.
    `overlaps` are what the manifest says of the recipe's acceptance.
    """
    lender = target.folder / entry.file
    job, own, step = head_job(target, entry.contract, source, head)
    own = replace(own, quantization={**own.quantization, **overlaps})
    if own.contract.source_slots:
        own = write_encoder(job, own, job.quantization)
        share_weights(job.beside("encoder"), target.beside("encoder"))
    own = write_chain(job, own, step)
    file = job.folder / own.file
    if own.contract.reads and target.options.provider_of(DRAFTER).name == "cpu":
        read_less(file, own.contract)
    share_weights(file, lender)
    # All rows of a draft's depth share a guess of a block.
    return own if own.contract.block else write_tree(job, own)


def head_job(
    target: Job, contract: StepContract, source: str, head: DraftModule
) -> tuple[Job, GraphEntry, Step]:
    """The job of a head, its entry, and its pass beside a target of that contract."""
    options = target.options
    step = draft_step(head, contract, DTYPES[options.dtype_of(DRAFTER)])
    checkpoint = Checkpoint(source, head, None, None, ())
    names, recipe = checkpoint.names(), options.recipe_of(DRAFTER)
    borrowed = {
        names[id(weight)]: target.names[id(weight)]
        for weight in head.parameters()
        if id(weight) in target.names
    }
    entry = GraphEntry(
        file=f"{DRAFTER}.onnx",
        contract=step.contract,
        quantization=recipe.to_json(),
        source=source,
        parameters=sum(
            p.numel() for p in head.parameters() if names[id(p)] not in borrowed
        ),
        vocabulary_file=write_vocabulary(target.folder, head.ids),
    )
    lm_head = getattr(head, "lm_head", None)
    quantization = Quantization(
        recipe,
        "" if lm_head is None else names[id(lm_head.weight)],
        options.flavour_made != CONTRIB,
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
