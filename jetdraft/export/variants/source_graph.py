"""The graph of an encoder, and a decoder step that reads what the encoder wrote."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from jetdraft.bundle import CONTRIB
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.sources.decoder_seams import relative_table
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import OptionError
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.job import Job
from jetdraft.export.source.source_step import EncoderStep, SourceStep, source_sizes
from jetdraft.export.tracing.tracer import trace
from jetdraft.export.variants.variant import Variant
from jetdraft.quant.weights import Quantization


def check(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    """Refuse what was built for decoders alone."""
    if not checkpoint.reads_source:
        return
    if options.flavour_made != CONTRIB:
        raise OptionError(
            f"{checkpoint.source} is an encoder-decoder, which only contrib graphs "
            "hold; choose provider cpu or cuda"
        )
    recipe = options.recipe
    if options.draft_vocab is not None:
        raise OptionError(
            f"{checkpoint.source} is an encoder-decoder, which writes no text to count "
            "tokens in; leave --draft-vocab out"
        )
    if options.limit is not None or (
        recipe is not None and (recipe.needs_calibration or recipe.kv_bits)
    ):
        raise OptionError(
            f"{checkpoint.source} is an encoder-decoder, whose recipe reads no text "
            "yet; choose a recipe of rtn without kv8, for example int8-rtn-b32"
        )


def declare(checkpoint: Checkpoint, contract: StepContract) -> StepContract:
    """Add the source's slots: those of a sound, or as many as the buffers have rows."""
    if not checkpoint.reads_source:
        return contract
    bins, slots = source_sizes(checkpoint.model)
    return replace(
        contract,
        source_slots=slots or contract.capacity,
        source_bins=bins,
        relative_positions=relative_table(checkpoint.model) is not None,
        spare_slots=0,
    )


def write(job: Job) -> None:
    """Write `{name}-encoder.onnx`, and let the decoder be traced with the source."""
    if not job.checkpoint.reads_source:
        return
    head = job.quantization.head
    # An embedding that is tied to the LM head has the head's integers.
    lent = replace(
        job.quantization, borrowed={head: head}, lender=job.quantization, head=""
    )
    write_encoder(job, lent)
    job.step = SourceStep(job.checkpoint.model, job.contract)


def write_encoder(job: Job, quantization: Quantization) -> None:
    """Write `{name}-encoder.onnx` in that quantization, and add it to the entry."""
    file = job.beside("encoder")
    stage = f"trace {job.name}'s encoder"
    job.report(stage, 0, 1)
    model = trace(EncoderStep(job.checkpoint.model, job.contract), job.names)
    quantization.apply(model)
    for node in model.graph:
        node.metadata_props.clear()  # drops stack traces with this machine's paths
    ir.save(model, file, external_data=f"{file.name}.data")
    job.report(stage, 1, 1)
    job.entry = replace(job.entry, encoder_file=file.name)


VARIANT = Variant(write, check, declare)
