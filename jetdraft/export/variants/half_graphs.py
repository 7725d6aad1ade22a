"""Splits a graph that was traced with a cut into halves, and removes the cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common

from jetdraft.contracts.split_contract import PARENTS, SCORES, SplitContract
from jetdraft.contracts.tensor_spec import TensorSpec
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.attentions import add_bias, has_windows, widened
from jetdraft.export.job import Job
from jetdraft.export.step import CUT, Step
from jetdraft.export.variants.compaction import write_compaction
from jetdraft.export.variants.exit_graph import write_exit
from jetdraft.export.variants.variant import Variant
from jetdraft.manifest import Halves
from jetdraft.quant.edits import substitute

_ROWS_MASK = "rows_mask"


def write(job: Job) -> None:
    """Write both halves, which share the chain graph's weights, and their compactions.

    If no layer lies below the cut, it writes no halves. In any case the chain graph
    loses the inputs and outputs that only halves need.
    """
    if 0 < job.step.cut < len(job.contract.kv_shapes):
        halves = write_exit(job, _write_halves(job))
        job.entry = replace(job.entry, halves=halves)
    if job.step.extra_outputs:
        _drop_extras(job.file, job.step)


def _write_halves(job: Job) -> Halves:
    """Write both halves and their compactions; gives their entry in the manifest."""
    model = ir.load(job.file)
    if has_windows(model.graph):
        raise UnsupportedModelError(
            f"{job.checkpoint.source} attends in sliding windows, and the halves of a "
            "target need plain attention; choose another head"
        )
    hidden = next(value for value in model.graph.outputs if value.name == CUT)
    assert hidden.shape is not None
    halves = Halves(
        lower=job.beside("lower").name,
        upper=job.beside("upper").name,
        lower_compaction=job.beside("lower-compaction").name,
        upper_compaction=job.beside("upper-compaction").name,
        layers=job.step.cut,
        hidden_size=int(hidden.shape[2]),  # type: ignore[arg-type]  # never symbolic
        scores=SCORES.name in job.step.extra_outputs,
    )
    contract = SplitContract.of(
        replace(job.contract, tree=True),
        halves.layers,
        halves.hidden_size,
        halves.scores,
    )
    _split(model, job.folder / halves.lower, job.folder / halves.upper, contract)
    write_compaction(job.folder / halves.lower_compaction, contract.lower)
    write_compaction(job.folder / halves.upper_compaction, contract.upper)
    return halves


def _split(model: ir.Model, lower: Path, upper: Path, contract: SplitContract) -> None:
    """Save the halves of a traced graph; both verify branching drafts."""
    graph = model.graph
    # With probes, the layers above the cut have a bias for rows and probes already.
    add_bias(graph, widened(graph, replace(contract.lower, streams=0), _ROWS_MASK))
    traced = {"hidden": CUT, "draft_mask": _ROWS_MASK}
    _save_part(model, lower, contract.lower_inputs, contract.lower_outputs, traced)
    # The upper half does not get these inputs, so it counts its rows by positions.
    tokens, positions = graph.inputs[:2]
    _count_by(graph, tokens, 1, positions)
    for parents in (value for value in graph.inputs if value.name == PARENTS.name):
        _count_by(graph, parents, 0, positions)
    if contract.whole.streams:
        del traced["draft_mask"]
    below = len(contract.lower.kv_shapes)
    traced |= {
        spec.name: f"{kind}.{int(layer) + below}"
        for side in ("past", "present")
        for spec in contract.upper.buffers(side)
        for kind, _, layer in [spec.name.partition(".")]
    }
    _save_part(model, upper, contract.upper_inputs, contract.upper_outputs, traced)


def _drop_extras(file: Path, step: Step) -> None:
    """Remove the extra inputs and outputs from a traced graph on disk."""
    model = ir.load(file)
    graph = model.graph
    for value in [v for v in graph.outputs if v.name in step.extra_outputs]:
        graph.outputs.remove(value)
    names = {spec.name for spec in step.extra_inputs}
    extras = [value for value in graph.inputs if value.name in names]
    for value in extras:
        _count_by(graph, value, 0, graph.inputs[1])
    common.RemoveUnusedNodesPass()(model)
    for value in extras:
        graph.inputs.remove(value)
    ir.save(model, file)


def _count_by(graph: ir.Graph, value: ir.Value, axis: int, positions: ir.Value) -> None:
    """Let nodes that read the size of `axis` of `value` read axis 1 of `positions`."""
    for node in [n for n in value.consumers() if n.op_type == "Shape"]:
        if node.attributes.get_int("start", 0) == axis:
            size = ir.node("Shape", [positions], {"start": 1, "end": 2})
            graph.insert_before(node, size)
            substitute(node.outputs, size.outputs)


def _save_part(
    whole: ir.Model,
    file: Path,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    traced: dict[str, str],
) -> None:
    """Write a part of a graph with the contract's names and shapes.

    `traced` maps the contract's names to the names in the whole graph, where the two
    differ.
    """
    names = [[traced.get(s.name, s.name) for s in specs] for specs in (inputs, outputs)]
    graph = ir.convenience.extract(whole.graph, *names)
    for values, specs in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.name = spec.name
            value.shape = ir.Shape(spec.shape)
    part = ir.Model(graph, ir_version=whole.ir_version)
    common.RemoveUnusedNodesPass()(part)
    ir.save(part, file)


VARIANT = Variant(write)
