"""Writes the graphs of a head into the bundle of its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from jetdraft.bundle import CONTRIB, DRAFTER, TARGET
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.attached.chimera import Chimera
from jetdraft.checkpoints.heads.attached.exit_adapter import ExitAdapter
from jetdraft.checkpoints.heads.attached.falcon import Falcon
from jetdraft.checkpoints.heads.attached.glide import Glide
from jetdraft.checkpoints.heads.attached.source_drafter import SourceDrafter
from jetdraft.checkpoints.heads.block_drafter import BlockDrafter
from jetdraft.checkpoints.heads.head import Head
from jetdraft.checkpoints.heads.head_reader import AnyHead, load_head
from jetdraft.checkpoints.taps import Taps
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.export_options import DTYPES, ExportOptions
from jetdraft.export.heads.adapter_step import AdapterStep, adapter_contract
from jetdraft.export.heads.block_step import BlockStep, block_contract
from jetdraft.export.heads.chimera_step import ChimeraStep, chimera_contract
from jetdraft.export.heads.falcon_step import FalconStep, falcon_contract
from jetdraft.export.heads.glide_step import (
    GlideStep,
    check_lent,
    glide_contract,
    read_less,
)
from jetdraft.export.heads.guess_step import Guessing, GuessStep, guess_contract
from jetdraft.export.heads.head_step import HeadStep, head_contract
from jetdraft.export.heads.shared_weights import share_weights
from jetdraft.export.job import Job
from jetdraft.export.pair.cut_head import write_vocabulary
from jetdraft.export.source.source_block_step import (
    SourceBlockStep,
    source_block_contract,
)
from jetdraft.export.step import Step
from jetdraft.export.variants import chain_graph, source_graph, tree_graph
from jetdraft.manifest import GraphEntry
from jetdraft.quant.weights import Quantization

_FUSION = ("fc", "hidden_norm", "input_norm", "fc_norm")
"""The modules of a head whose weights the target's graph has."""


def head_of(source: str, target: Checkpoint, options: ExportOptions) -> AnyHead:
    """The head in a folder or hub repository; raises a `JetdraftError`."""
    dtype = getattr(torch, DTYPES[options.dtype_of(DRAFTER)])
    head = load_head(source, target, dtype)
    if isinstance(head, Glide):
        check_lent(options)
    # A head reads matrices of its target, in the target's recipe.
    options.check_kernel(options.recipe_of(TARGET), DRAFTER)
    return head


def taps_of(head: AnyHead) -> Taps | None:
    """What a head reads of its target's states; None for a drafter without them."""
    config = head.config
    if isinstance(head, Glide | SourceDrafter) or (
        isinstance(head, BlockDrafter) and head.reads_text
    ):
        return None
    if isinstance(head, ExitAdapter):
        return Taps(config.taps, config.feature_size, cut=head.exit_layer)
    if isinstance(head, Guessing | Chimera | Falcon) or not config.taps:
        return Taps((), config.feature_size)
    parts = {name: getattr(head, name) for name in _FUSION if hasattr(head, name)}
    return Taps(config.taps, config.feature_size, head.fuse, parts)


def write_head(
    target: Job, source: str, head: AnyHead, overlaps: Mapping[str, float]
) -> GraphEntry:
    """Write a head's graphs; matrices of the target stay in the target's file.

    `target` is the job of the head's target, whose graphs are written already.
    `overlaps` are what the manifest says of the recipe's acceptance.
    """
    job = head_job(target, source, head, overlaps)
    if job.contract.source_slots:
        source_graph.write_encoder(job, job.quantization)
        share_weights(job.beside("encoder"), target.beside("encoder"))
    chain_graph.write(job)
    if job.contract.reads and target.options.provider_of(DRAFTER).name == "cpu":
        read_less(job.file, job.contract)
    share_weights(job.file, target.file)
    if not job.contract.block:  # all rows of a draft's depth share a guess
        tree_graph.write(job)
    return job.entry


def head_job(
    target: Job, source: str, head: AnyHead, overlaps: Mapping[str, float]
) -> Job:
    """The job of a head's graphs, from that of its target."""
    options = target.options
    step = _step_of(head, target.contract, DTYPES[options.dtype_of(DRAFTER)])
    checkpoint = Checkpoint(source, head, None, None, ())
    names, recipe = checkpoint.names(), options.recipe_of(DRAFTER)
    borrowed = _borrowed(head, names, target.names)
    entry = GraphEntry(
        file=f"{DRAFTER}.onnx",
        contract=step.contract,
        quantization={**recipe.to_json(), **overlaps},
        source=source,
        parameters=sum(
            p.numel() for p in head.parameters() if names[id(p)] not in borrowed
        ),
        vocabulary_file=write_vocabulary(target.folder, head.ids),
    )
    return replace(
        target,
        name=DRAFTER,
        checkpoint=checkpoint,
        entry=entry,
        quantization=Quantization(
            recipe,
            "" if isinstance(head, Guessing) else names[id(head.lm_head.weight)],
            options.flavour_made != CONTRIB,
            borrowed=borrowed,
            lender=target.quantization,
        ),
        scales=[],
        names=names,
        step=step,
        task={},
    )


_STEPS: tuple[tuple[Any, Callable[..., Step], Callable[..., StepContract]], ...] = (
    (Guessing, GuessStep, guess_contract),
    (BlockDrafter, BlockStep, block_contract),
    (SourceDrafter, SourceBlockStep, source_block_contract),
    (Glide, GlideStep, glide_contract),
    (Chimera, ChimeraStep, chimera_contract),
    (Falcon, FalconStep, falcon_contract),
    (ExitAdapter, AdapterStep, adapter_contract),
    (Head, HeadStep, head_contract),
)
"""The pass of each kind of head, and the contract of its graph."""


def _step_of(head: AnyHead, target: StepContract, dtype: str) -> Step:
    """The pass to trace, with the contract of its graph."""
    step, contract = next(
        (step, contract) for kind, step, contract in _STEPS if isinstance(head, kind)
    )
    return step(head, contract(head, target, dtype))


def _borrowed(
    head: AnyHead, names: Mapping[int, str], target_names: Mapping[int, str]
) -> dict[str, str]:
    """The target's names of the matrices that a head has from it, by its own names."""
    return {
        names[id(weight)]: target_names[id(weight)]
        for weight in head.parameters()
        if id(weight) in target_names
    }
