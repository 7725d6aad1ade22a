"""From a traced graph with streams, the whole graph and its two halves."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common

from jetdraft.contract import SplitContract, TensorSpec
from jetdraft.edits import substitute
from jetdraft.export.step import EARLY, PARENTS
from jetdraft.export.tree import BIAS_INPUT, attentions, value_of

_ROWS_BIAS = "rows_bias"


def write_halves(
    traced: Path, lower: Path, upper: Path, contract: SplitContract
) -> None:
    """Write the halves of a graph on disk, over the same weights file.

    Both verify branching drafts. The cut is where the probes join the rows.
    """
    model = ir.load(traced)
    graph = model.graph
    bias = value_of(contract.lower_inputs[4])
    bias.name = _ROWS_BIAS
    graph.inputs.append(bias)
    for node in attentions(graph):
        if len(node.inputs) <= BIAS_INPUT or node.inputs[BIAS_INPUT] is None:
            node.resize_inputs(max(len(node.inputs), BIAS_INPUT + 1))
            node.replace_input_with(BIAS_INPUT, bias)
    tokens, positions = graph.inputs[:2]
    names = _names(contract.lower_inputs)
    names[4] = _ROWS_BIAS
    part = ir.convenience.extract(graph, names, _names(contract.lower_outputs))
    _save(part, lower, contract.lower_inputs, contract.lower_outputs, model)
    # The upper half counts its rows by their positions: it does not get the rest.
    for value, axis in ((tokens, 1), (_input(graph, PARENTS), 0)):
        _count_by(graph, value, axis, positions)
    below = len(contract.lower.kv_shapes)
    part = ir.convenience.extract(
        graph,
        [_shifted(name, below) for name in _names(contract.upper_inputs)],
        [_shifted(name, below) for name in _names(contract.upper_outputs)],
    )
    _save(part, upper, contract.upper_inputs, contract.upper_outputs, model)


def drop_early_exit(file: Path) -> None:
    """Make a traced graph on disk the whole graph: without what only halves need."""
    model = ir.load(file)
    graph = model.graph
    for value in [v for v in graph.outputs if v.name in EARLY]:
        graph.outputs.remove(value)
    parents = _input(graph, PARENTS)
    _count_by(graph, parents, 0, graph.inputs[1])
    common.RemoveUnusedNodesPass()(model)
    graph.inputs.remove(parents)
    ir.save(model, file)


def _input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def _count_by(graph: ir.Graph, value: ir.Value, axis: int, positions: ir.Value) -> None:
    """Let whoever takes the size of an axis of `value` take that of axis 1."""
    for node in [n for n in value.consumers() if n.op_type == "Shape"]:
        if node.attributes.get_int("start", 0) == axis:
            count = ir.node("Shape", [positions], {"start": 1, "end": 2})
            graph.insert_before(node, count)
            substitute(node.outputs, count.outputs)


def _names(specs: tuple[TensorSpec, ...]) -> list[str]:
    return [spec.name for spec in specs]


def _shifted(name: str, layers: int) -> str:
    """The name of an upper half's buffer in the whole graph."""
    kind, dot, layer = name.partition(".")
    return f"{kind}.{int(layer) + layers}" if dot else name


def _save(
    graph: ir.Graph,
    file: Path,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    whole: ir.Model,
) -> None:
    """Write a part of a graph with the contract's names and shapes."""
    for values, specs in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.name = spec.name
            value.shape = ir.Shape(spec.shape)
    part = ir.Model(graph, ir_version=whole.ir_version)
    common.RemoveUnusedNodesPass()(part)
    ir.save(part, file)
