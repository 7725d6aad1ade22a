"""The chain graph: a pass over rows, each of which follows the row before it.

It is traced, rewritten for its flavour and quantized. The other graphs of a model are
made from it and read the same weights file.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from jetdraft.bundle import SCATTERED
from jetdraft.checkpoints.parameters import keep_weights
from jetdraft.export.fusing.fusion import fuse
from jetdraft.export.fusing.gathers import plain_gathers
from jetdraft.export.job import Job
from jetdraft.export.kv import quantize_cache
from jetdraft.export.standard import standardize
from jetdraft.export.tracing.tracer import trace
from jetdraft.export.variants.variant import Variant


def write(job: Job) -> None:
    """Write `{name}.onnx` and its weights file."""
    model = _traced(job)
    stage = f"quantize {job.name}"
    job.quantization.apply(model, lambda done, of: job.report(stage, done, of))
    if job.scales:
        bits = job.quantization.recipe.kv_bits
        contract = quantize_cache(model, job.contract, job.scales, bits)
        job.entry = replace(job.entry, contract=contract)
    keep_weights(model, job.task, {})
    for node in model.graph:
        node.metadata_props.clear()  # drops stack traces with this machine's paths
    ir.save(model, job.file, external_data=f"{job.file.name}.data")


def _traced(job: Job) -> ir.Model:
    """The float graph, in the operators of its flavour."""
    stage = f"trace {job.name}"
    job.report(stage, 0, 1)
    model = trace(job.step, job.names)
    plain_gathers(model.graph)
    if job.quantization.standard:
        standardize(model, job.options.flavour_made == SCATTERED)
    else:
        packed = job.quantization.packed
        forms = {name: packed[name].form for name in packed}
        beside = job.options.provider_of(job.name).name == "webgpu"
        fuse(model, job.contract, forms, beside)
    job.report(stage, 1, 1)
    return model


VARIANT = Variant(write)
