"""The arrays of a bundle's head for a head whose weights have moved on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jetdraft.bundle import DRAFTER, TARGET, Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head import Head
from jetdraft.export.export_options import DTYPES, ExportOptions
from jetdraft.export.heads.head_export import head_job
from jetdraft.export.job import Job
from jetdraft.export.pair.drafter_arrays import Arrays, changed_arrays
from jetdraft.export.step import Step
from jetdraft.export.variants import chain_graph
from jetdraft.quant.weights import Quantization
from jetdraft.recipe import Recipe


def head_arrays(bundle: Bundle, target: Checkpoint, head: Head) -> Arrays:
    """The arrays of the head's graph that differ from the bundle's, by name.

    `head` was loaded for `target`, the bundle's. Matrices that it has from the target
    stay as they are. Raises `PairError` if its graph has another form than the
    bundle's.

        head_arrays(bundle, target, load_head("head", target, torch.float32))
    """
    entry = bundle.graphs[DRAFTER]

    def write(folder: Path) -> None:
        job = head_job(_target_job(folder, bundle, target), entry.source, head, {})
        chain_graph.write(job)

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
        entry=entry,
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
        report=lambda stage, done, total: None,
        quantization=Quantization(
            recipe, target.head, packed=packed.blocks if packed else {}
        ),
        scales=[],
        names=target.names(),
        step=Step(target.model, entry.contract),
    )
