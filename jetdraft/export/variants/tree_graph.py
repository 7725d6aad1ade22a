"""The graph for branching drafts: a chain graph with a mask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.attentions import add_bias, bias_of, has_windows, sum_bias, widened
from jetdraft.export.job import Job
from jetdraft.export.variants.compaction import write_compaction
from jetdraft.export.variants.variant import Variant
from jetdraft.quant.edits import initializer


def write(job: Job) -> None:
    """Write the tree graph, which shares the chain graph's weights, and its compaction.

    For a model without layers, or with sliding windows, it writes nothing, or raises
    `UnsupportedModelError` if the chain graph itself needs a mask.
    """
    model = ir.load(job.file)
    if not job.contract.kv_shapes or has_windows(model.graph):
        if job.contract.masked:
            raise UnsupportedModelError(
                f"{job.checkpoint.source} attends in sliding windows; streams need "
                "plain attention"
            )
        return
    if job.contract.relative_positions:
        sum_bias(model.graph, widened(model.graph, replace(job.contract, tree=True)))
    else:
        add_bias(model.graph, _bias(model.graph, job.contract))
        model.graph.sort()  # layers below the probes read the rows' part of the bias
    tree, compaction = job.beside("tree"), job.beside("compaction")
    ir.save(model, tree)
    scattered = job.options.provider_of(job.name).name == "webgpu"
    write_compaction(compaction, job.contract, scattered)
    job.entry = replace(job.entry, tree_file=tree.name, compaction_file=compaction.name)


def _bias(graph: ir.Graph, contract: StepContract) -> ir.Value:
    """The attention bias of the rows.

    A mask is a new input of the graph. If the graph has a bias already, for rows and
    probes, the part of the rows is taken.
    """
    full_bias = bias_of(graph)
    if full_bias is None:
        return widened(graph, replace(contract, tree=True))
    rows = ir.node("Shape", [graph.inputs[0]], {"start": 1, "end": 2})
    start, axis = (
        initializer(graph, f"rows_of_bias.{name}", np.array([number], np.int64))
        for name, number in (("start", 0), ("axis", 2))
    )
    cut = ir.node("Slice", [full_bias, start, rows.outputs[0], axis])
    cut.outputs[0].name = "rows_of_bias"
    producer = full_bias.producer()
    assert producer is not None
    graph.insert_after(producer, [rows, cut])
    return cut.outputs[0]


VARIANT = Variant(write)
