"""Lets a target leave its upper layers out: a cut, and a graph in their place."""

from __future__ import annotations

from dataclasses import replace

from jetdraft.bundle import TARGET
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streamed import decoder_layers
from jetdraft.contracts.split_contract import SplitContract
from jetdraft.devices.providers import HALVES, cpu_only
from jetdraft.errors import OptionError
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.heads.shared_weights import share_weights
from jetdraft.export.job import Job
from jetdraft.export.step import Step
from jetdraft.export.variants.chain_graph import write as write_chain
from jetdraft.export.variants.exit_step import ExitStep
from jetdraft.export.variants.variant import Variant
from jetdraft.manifest import Halves


def check(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    """Refuse a layer that cuts nothing, and heads that read the layers left out.

    Raises `OptionError`, and `CheckpointError` for a checkpoint without a hash, which
    the heads of `train exit` name.
    """
    layer = options.exit_layer
    if name != TARGET or layer is None:
        return
    layers = len(decoder_layers(checkpoint.model))
    if not 1 <= layer < layers:
        raise OptionError(
            f"exit layer {layer} does not cut {layers} layers in two; give 1 to "
            f"{layers - 1}"
        )
    fix = "export for --provider cpu, or leave --exit-after out"
    if refusal := cpu_only(HALVES, options.provider_of(name).name, fix):
        raise OptionError(refusal)
    if checkpoint.reads_source or checkpoint.streams is not None:
        raise OptionError(
            f"{checkpoint.source} is an encoder-decoder or has probes, and these run "
            "through all layers; leave --exit-after out"
        )
    if checkpoint.taps is not None and checkpoint.taps.cut != layer:
        raise OptionError(
            f"the head reads states that a text without the layers from {layer} on "
            "does not have; leave --head or --exit-after out, or give the layer of a "
            "Kangaroo adapter"
        )
    _ = checkpoint.sha256  # refuses before anything is measured


def write(job: Job) -> None:
    """Let the chain graph be traced with a cut, unless a head asks for it already."""
    layer = job.options.exit_layer
    if job.name == TARGET and layer is not None and not job.step.cut:
        above = len(job.contract.kv_shapes) - layer
        job.step = Step(job.checkpoint.model, job.contract, cut=above)


def write_exit(job: Job, halves: Halves) -> Halves:
    """Write the graph that takes the place of the upper half; add it to `halves`.

    It reads the target's weights from the chain graph's file, which exists already.
    """
    if job.name != TARGET or job.options.exit_layer is None:
        return halves
    file = job.beside("exit")
    whole = replace(job.contract, kv_bits=0, tree=True)
    split = SplitContract.of(whole, halves.layers, halves.hidden_size)
    below, contract = len(split.lower.kv_shapes), replace(split.upper, tree=False)
    write_chain(
        replace(
            job,
            entry=replace(job.entry, file=file.name, contract=contract),
            step=ExitStep(job.checkpoint.model, split),
            scales=job.scales[2 * below :],
        )
    )
    share_weights(file, job.file)
    own_weights = file.with_name(f"{file.name}.data")
    if not own_weights.stat().st_size:
        own_weights.unlink()
    return replace(halves, exit=file.name, base=job.checkpoint.sha256)


VARIANT = Variant(write, check)
