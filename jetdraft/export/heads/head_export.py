"""Writes the graphs of a head into the bundle of its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from jetdraft.bundle import CONTRIB, DRAFTER, GraphEntry
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head import Head
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.taps import Taps
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.export_options import DTYPES, ExportOptions
from jetdraft.export.heads.head_step import HeadStep, head_contract
from jetdraft.export.heads.shared_weights import share_weights
from jetdraft.export.job import Job
from jetdraft.export.pair.cut_head import write_vocabulary
from jetdraft.export.variants import chain_graph, tree_graph
from jetdraft.quant.weights import Quantization

_FUSION = ("fc", "input_norm", "fc_norm")
"""The modules of a head whose weights the target's graph has."""

_LENT = ("embed_tokens", "lm_head")
"""The modules that a head may share with its target."""


def head_of(source: str, target: Checkpoint, options: ExportOptions) -> Head:
    """The head in a folder or hub repository; raises a `JetdraftError`."""
    head = load_head(source, target, getattr(torch, DTYPES[options.dtype_of(DRAFTER)]))
    if not isinstance(head, Head):
        raise UnsupportedModelError(
            f"{source} is a {head.config.family} head, which drafts several tokens in "
            "one row; only heads that carry can be exported: EAGLE and MTP"
        )
    return head


def taps_of(head: Head) -> Taps:
    """What a head reads of its target's states."""
    config = head.config
    if not config.taps:
        return Taps((), config.feature_size)
    parts = {name: getattr(head, name) for name in _FUSION if hasattr(head, name)}
    return Taps(config.taps, config.feature_size, head.fuse, parts)


def write_head(
    target: Job, source: str, head: Head, overlaps: Mapping[str, float]
) -> GraphEntry:
    """Write a head's graphs; matrices of the target stay in the target's file.

    `target` is the job of the head's target, whose graphs are written already.
    `overlaps` are what the manifest says of the recipe's acceptance.
    """
    options = target.options
    contract = head_contract(head, target.contract, DTYPES[options.dtype_of(DRAFTER)])
    checkpoint = Checkpoint(source, head, None, None, ())
    names, recipe = checkpoint.names(), options.recipe_of(DRAFTER)
    borrowed = _borrowed(head, names, target.names)
    entry = GraphEntry(
        file=f"{DRAFTER}.onnx",
        contract=contract,
        quantization={**recipe.to_json(), **overlaps},
        source=source,
        parameters=sum(
            p.numel() for p in head.parameters() if names[id(p)] not in borrowed
        ),
        vocabulary_file=write_vocabulary(target.folder, head.ids),
    )
    job = replace(
        target,
        name=DRAFTER,
        checkpoint=checkpoint,
        entry=entry,
        quantization=Quantization(
            recipe,
            checkpoint.head,
            options.flavour_made != CONTRIB,
            borrowed=borrowed,
            lender=target.quantization,
        ),
        scales=[],
        names=names,
        step=HeadStep(head, contract),
        task={},
    )
    chain_graph.write(job)
    share_weights(job.file, target.file)
    tree_graph.write(job)
    return job.entry


def _borrowed(
    head: Head, names: Mapping[int, str], target_names: Mapping[int, str]
) -> dict[str, str]:
    """The target's names of the matrices that a head has from it, by its own names."""
    matrices = [getattr(head, name).weight for name in _LENT]
    return {
        names[id(matrix)]: target_names[id(matrix)]
        for matrix in matrices
        if id(matrix) in target_names
    }
