"""The graph whose passes may read selected rows of the buffers only (TokenSelect).

Each attention becomes an `If`, so one session verifies with all rows, bit for bit as
before, and drafts with some of them.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import SELECTING, Reading, Selection, StepContract
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.attentions import OPSET, attentions, windowed
from jetdraft.export.seams import trained_length
from jetdraft.export.selected_attention import SelectedAttention
from jetdraft.quant.edits import Maker, new_value, replace_values


def add_selection(
    model: ir.Model, contract: StepContract, checkpoint: Checkpoint, rows: int
) -> tuple[ir.Model, Selection]:
    """Let a chain or tree graph read `rows` KV rows only; return it and the selection.

    Raises `UnsupportedModelError` for sliding windows, softcaps and unequal layers.
    """
    graph = model.graph
    nodes = attentions(graph)
    softcaps = (node.attributes.get_float("softcap", 0.0) for node in nodes)
    if windowed(graph) or any(softcaps):
        raise UnsupportedModelError(
            f"{checkpoint.source} attends in sliding windows or with a softcap, and "
            "--select-kv needs plain attention; leave it out"
        )
    heads = {node.attributes.get_int("num_heads", 0) for node in nodes}
    if len(heads) != 1:
        raise UnsupportedModelError(
            f"{checkpoint.source} has layers of different heads, and --select-kv "
            "needs equal layers; leave it out"
        )
    selection = Selection(rows, heads.pop())
    trained = _turning_length(checkpoint, contract, nodes, rows)
    _add_branches(graph, replace(contract, selection=selection), trained)
    graph.opset_imports[""] = OPSET
    common.RemoveUnusedNodesPass()(model)
    return model, selection


def _turning_length(
    checkpoint: Checkpoint, contract: StepContract, nodes: list[ir.Node], rows: int
) -> int | None:
    """The length beyond which keys must turn; None for never, or if they cannot."""
    trained, width = trained_length(checkpoint.model), contract.max_width
    if trained is None or trained >= contract.capacity:
        return None
    if rows + width > trained:
        reason = f"--select-kv and --max-width must be {trained} together at most"
    elif not all(map(_rotates_unscaled, nodes)):
        reason = "its attention does not rotate keys by plain cosines and sines"
    else:
        return trained
    warnings.warn(
        f"selected KV rows are of no use beyond the {trained} tokens that "
        f"{checkpoint.source} was trained on: {reason}",
        stacklevel=2,
    )
    return None


def _rotates_unscaled(node: ir.Node) -> bool:
    """Whether attention rotates keys itself, by cosines and sines without a scale."""
    if not node.attributes.get_int("do_rotary", 0):
        return False
    tables = [value.const_value if value else None for value in node.inputs[7:9]]
    norms = sum(np.square(table.numpy()) for table in tables if table)
    return np.allclose(norms, 1, atol=1e-4)


def _add_branches(graph: ir.Graph, contract: StepContract, trained: int | None) -> None:
    """Replace each attention of a graph by an `If` with both branches, in place."""
    selection = contract.selection
    assert selection is not None
    inputs = {spec.name: new_value(spec) for spec in contract.selections("past")}
    selecting = new_value(SELECTING)
    graph.inputs.extend([selecting, *inputs.values()])
    nodes = attentions(graph)
    make = Maker(graph, nodes[0])
    is_selecting = _add_is_selecting(make, nodes[0], selecting, selection)
    turns = None
    if trained is not None:  # keys may turn where the pass ends beyond it
        wanted = selecting, int(Reading.SELECTED)
        turns = _add_both_above(make, wanted, (nodes[0].inputs[5], trained - 1))
    for node in nodes:
        past = node.inputs[3]
        assert past is not None
        layer = int(str(past.name).partition(".")[2])
        state = tuple(inputs[f"past_{kind}.{layer}"] for kind in ("rows", "query"))
        attention = SelectedAttention(graph, node, state, selection, turns)
        branches = {
            "then_branch": attention.selected_branch(),
            "else_branch": attention.whole_branch(),
        }
        choice = ir.node("If", [is_selecting], branches, num_outputs=5)
        kept = len(node.outputs)
        for old, new in zip(node.outputs, choice.outputs, strict=False):
            new.type, new.shape = old.type, old.shape
        graph.insert_before(node, choice)
        replace_values(node.outputs, choice.outputs[:kept])
        graph.remove(node)
        for spec, value in zip(
            (s for s in contract.selections("present") if s.name.endswith(f".{layer}")),
            choice.outputs[kept:],
            strict=True,
        ):
            declared = new_value(spec)
            value.name, value.type = declared.name, declared.type
            value.shape = declared.shape
            graph.outputs.append(value)


def _add_is_selecting(
    make: Maker, first: ir.Node, selecting: ir.Value, selection: Selection
) -> ir.Value:
    """Add a bool [1]: whether the pass selects, and the cache holds enough rows."""
    rows = make("Shape", first.inputs[0], start=1, end=2)
    count = make("Cast", rows, to=ir.DataType.INT32)
    newest = make("Sub", first.inputs[5], count)  # the last committed
    wanted = selecting, int(Reading.ALL)
    return _add_both_above(make, wanted, (newest, selection.rows - 2))


def _add_both_above(make: Maker, *pairs: tuple[ir.Value | None, int]) -> ir.Value:
    """Add a bool [1]: whether both values, int32 [1], are above their bounds."""
    above = [
        make("Greater", value, make.constant(f"above.{bound}", [bound], np.int32))
        for value, bound in pairs
    ]
    return make("And", *above)
