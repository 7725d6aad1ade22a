"""Graphs whose passes may read selected rows of their buffers only, by an `If`.

TokenSelect (2411.02886): the query heads of a KV head vote on the rows between the
first and the recent rows, by the softmax of their mean query over the pass. A selection
stays while the mean query is like the query that made it.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value
from onnx_ir.passes import common

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import SELECTING, Reading, Selection, StepContract
from jetdraft.contracts.tensors import HIDDEN
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.attentions import OPSET, attentions, has_sinks, is_shared, windowed
from jetdraft.export.seams import trained_length
from jetdraft.quant.edits import CONTRIB_DOMAIN, Maker, new_value, replace_values


class Branch(Maker):
    """Nodes of a subgraph with its own `name`; constants belong to the outer graph."""

    def __init__(self, graph: ir.Graph, name: str) -> None:
        super().__init__(graph)
        self.name = name
        self.nodes: list[ir.Node] = []

    def add(self, node: ir.Node) -> list[Value]:
        """Add a node, name its outputs uniquely, and return them."""
        self.nodes.append(node)
        for place, value in enumerate(node.outputs):
            value.name = f"{self.name}.{len(self.nodes)}.{place}"
        return list(node.outputs)

    def reshape(self, value: Value, *sizes: int | Value) -> Value:
        """Add a Reshape; a size may be a value int64 [1]."""
        parts = [s if isinstance(s, Value) else self.vector(s) for s in sizes]
        if not any(isinstance(size, Value) for size in sizes):
            return self("Reshape", value, self.vector(*sizes))  # type: ignore[arg-type]
        return self("Reshape", value, self("Concat", *parts, axis=0))

    def vector(self, *numbers: int) -> Value:
        """Return a constant int64 [n]."""
        return self.constant(f"constant.{'_'.join(map(str, numbers))}", numbers)

    def scalar(self, number: float, kind: type = np.float32) -> Value:
        """Return a constant without axes."""
        return self.constant(f"constant.{kind.__name__}.{number}", number, kind)

    def build(self, outputs: Sequence[Value]) -> ir.Graph:
        return ir.Graph([], outputs, nodes=self.nodes, name=self.name)


# The cosine of two queries from which on a selection stays, as in the paper.
MIN_SIMILARITY = 0.9


class SelectedAttention:
    """Makes the branches of an `If` in place of one GroupQueryAttention.

    `state` has rows int64 [1, kv_heads, voted] and their query; `shifts` is a
    bool [1] of the graph, whether keys get new positions; None for never.
    """

    def __init__(
        self,
        graph: ir.Graph,
        node: ir.Node,
        state: tuple[Value, ...],
        selection: Selection,
        shifts: Value | None,
    ) -> None:
        self.graph, self.node, self.shifts = graph, node, shifts
        self.rows, self.query = self.state = state
        self.selection = selection
        self.name = str(self.rows.name).replace("past_rows", "selection")
        numbers = node.attributes.get_int
        self.heads, self.kv_heads = numbers("num_heads", 0), numbers("kv_num_heads", 0)
        past: Any = node.inputs[3]
        self.size = int(past.shape[3])  # never symbolic
        self.groups = self.heads // self.kv_heads
        self.scale = node.attributes.get_float("scale", self.size**-0.5)

    def whole_branch(self) -> ir.Graph:
        """Make the branch with the unchanged attention; it returns the same state."""
        branch, node = Branch(self.graph, f"{self.name}.whole"), self.node
        own = node.domain, node.op_type, node.inputs, node.attributes.values()
        copy = branch.add(ir.Node(*own, num_outputs=len(node.outputs)))
        state = [branch("Identity", value) for value in self.state]
        return branch.build(_typed([*copy, *state], [*node.outputs, *self.state]))

    def selected_branch(self) -> ir.Graph:
        """Make the branch that attends to selected rows and to the rows of the pass."""
        branch = Branch(self.graph, f"{self.name}.selected")
        query, key, value = self._projections(branch)
        count = branch("Shape", query, start=1, end=2)
        last = branch("Cast", self.node.inputs[5], to=ir.DataType.INT64)
        end = branch("Add", last, branch.vector(1))
        start = branch("Sub", end, count)
        own = (branch.reshape(x, 1, -1, self.kv_heads, self.size) for x in (key, value))
        rows = (branch("Transpose", split, perm=[0, 2, 1, 3]) for split in own)
        pairs = zip(self.node.inputs[3:5], rows, strict=True)
        keys, values = (branch("TensorScatter", *p, start, axis=2) for p in pairs)
        queries = branch.reshape(query, 1, -1, self.kv_heads, self.groups, self.size)
        state = self._update_selection(branch, queries, keys, start)
        near = branch("Sub", start, branch.vector(self.selection.recent))
        slots = branch("Range", *self._range_inputs(branch, near, end))
        chosen = self._read_slots(branch, state[0], slots)
        few_keys = branch("GatherND", keys, chosen, batch_dims=2)
        few_values = branch("GatherND", values, chosen, batch_dims=2)
        if self.shifts is not None:
            few_keys = self._shift_keys(branch, few_keys, chosen, end, self.shifts)
        by_head = branch("Transpose", queries, perm=[0, 2, 3, 1, 4])
        flat = branch.reshape(by_head, 1, self.kv_heads, -1, self.size)
        scores = self._scores(branch, flat, few_keys)
        by_row = branch.reshape(scores, 1, self.kv_heads, self.groups, count, -1)
        hidden = self._hiding_bias(branch, slots, (start, near, end), count)
        weights = branch("Softmax", branch("Add", by_row, hidden), axis=-1)
        read = branch("Shape", chosen, start=2, end=3)
        weights = branch.reshape(weights, 1, self.kv_heads, -1, read)
        answer = branch("MatMul", weights, few_values)
        answer = branch.reshape(answer, 1, self.kv_heads, self.groups, -1, self.size)
        answer = branch("Transpose", answer, perm=[0, 3, 1, 2, 4])
        answer = branch.reshape(answer, 1, -1, self.heads * self.size)
        results = [answer, keys, values, *state]
        return branch.build(_typed(results, [*self.node.outputs, *self.state]))

    def _projections(self, branch: Branch) -> list[Value]:
        """Return query, key, value [1, n, heads * size], rotated as attention would."""
        node, size = self.node, self.size
        widths = [heads * size for heads in (self.heads, *[self.kv_heads] * 2)]
        if node.inputs[1] is None:  # packed
            parts = branch.vector(*widths)
            rows = branch.several("Split", 3, node.inputs[0], parts, axis=2)
        else:
            rows = [value for value in node.inputs[:3] if value is not None]
        if node.attributes.get_int("do_rotary", 0):
            *tables, positions = node.inputs[7:10]
            for place in (0, 1):
                rows[place] = self._rotate(branch, rows[place], positions, *tables)
        return rows

    def _rotate(self, branch: Branch, *inputs: Value | None) -> Value:
        """Rotate rows at positions, by tables of cosines and of sines."""
        interleaved = self.node.attributes.get_int("rotary_interleaved", 0)
        how: Any = {"domain": CONTRIB_DOMAIN, "interleaved": interleaved}
        return branch("RotaryEmbedding", *inputs, **how)

    def _scores(self, branch: Branch, queries: Value, keys: Value) -> Value:
        how: Any = {"domain": CONTRIB_DOMAIN, "transB": 1, "alpha": float(self.scale)}
        return branch("FusedMatMul", queries, keys, **how)

    def _update_selection(
        self, branch: Branch, queries: Value, keys: Value, start: Value
    ) -> list[Value]:
        """Return the old rows and query, or the rows of a new vote and their query."""
        mean = branch("ReduceMean", queries, branch.vector(1), keepdims=0)
        near = branch("Sub", start, branch.vector(self.selection.recent))
        product = branch("ReduceSum", branch("Mul", mean, self.query), keepdims=0)
        norms = [branch("ReduceSumSquare", v, keepdims=0) for v in (mean, self.query)]
        length = branch("Sqrt", branch("Mul", *norms))
        bound = branch("Mul", length, branch.scalar(MIN_SIMILARITY))
        is_like = branch("GreaterOrEqual", product, bound)
        # Without a query before, all of these are 0.
        is_set = branch("Greater", norms[1], branch.scalar(0.0))
        newest = branch("ReduceMax", self.rows, keepdims=0)
        lies_before = branch("Less", newest, branch("Squeeze", near, branch.vector(0)))
        stays = branch("And", branch("And", is_like, is_set), lies_before)
        old = Branch(self.graph, f"{self.name}.old")
        new = Branch(self.graph, f"{self.name}.new")
        copies = [old("Identity", value) for value in self.state]
        voted = self._vote(new, mean, keys, near)
        before = old.build(_typed(copies, self.state))
        after = new.build(_typed([voted, new("Identity", mean)], self.state))
        return branch.several("If", 2, stays, then_branch=before, else_branch=after)

    def _vote(self, branch: Branch, mean: Value, keys: Value, near: Value) -> Value:
        """Return the rows before `near` with most votes, int64 [1, kv_heads, voted]."""
        first = branch.vector(self.selection.first)
        between = branch("Slice", keys, first, near, branch.vector(2))
        votes = branch("Softmax", self._scores(branch, mean, between), axis=-1)
        total = branch("ReduceSum", votes, branch.vector(2), keepdims=0)
        most = branch.vector(self.selection.voted)
        _, places = branch.several("TopK", 2, total, most, axis=-1, sorted=0)
        if self.shifts is not None:  # shifted keys keep their order
            order: Any = {"largest": 0, "sorted": 1}
            places, _ = branch.several("TopK", 2, places, most, axis=-1, **order)
        return branch("Add", places, first)

    def _read_slots(self, branch: Branch, voted: Value, slots: Value) -> Value:
        """Join the first slots, `voted` and `slots`, to int64 [1, kv_heads, t, 1]."""
        first = self.selection.first
        bounds = (branch.scalar(bound, np.int64) for bound in (0, first, 1))
        begin = branch("Range", *bounds)
        length = branch("Shape", slots, start=0, end=1)
        head = branch.vector(1, self.kv_heads)
        parts = [
            branch("Expand", part, branch("Concat", head, size, axis=0))
            for part, size in ((begin, branch.vector(first)), (slots, length))
        ]
        together = branch("Concat", parts[0], voted, parts[1], axis=2)
        return branch("Unsqueeze", together, branch.vector(3))

    def _shift_keys(
        self, branch: Branch, keys: Value, chosen: Value, end: Value, shifts: Value
    ) -> Value:
        """Rotate keys to consecutive positions before `end`, where `shifts` is true."""
        far = Branch(self.graph, f"{self.name}.far")
        near = Branch(self.graph, f"{self.name}.near")
        begin = far("Sub", end, far("Shape", chosen, start=2, end=3))
        positions = far("Range", *self._range_inputs(far, begin, end))
        distance = far("Sub", positions, far.reshape(chosen, self.kv_heads, -1))
        rows = far.reshape(keys, self.kv_heads, 1, -1, self.size)
        shifted = self._rotate(far, rows, distance, *self.node.inputs[7:9])
        beyond = far.build([far.reshape(shifted, 1, self.kv_heads, -1, self.size)])
        within = near.build([near("Identity", keys)])
        return branch("If", shifts, then_branch=beyond, else_branch=within)

    def _hiding_bias(
        self, branch: Branch, slots: Value, bounds: tuple[Value, ...], count: Value
    ) -> Value:
        """Return the bias [n, t], the attention's own from the recent rows on."""
        start, near, end = bounds
        numbers = branch("Range", *self._range_inputs(branch, start, end))
        later = branch("Greater", slots, branch.reshape(numbers, count, 1))
        floats = branch("Cast", later, to=ir.DataType.FLOAT)
        hidden = branch("Mul", floats, branch.scalar(HIDDEN))
        bias = self.node.inputs[10] if len(self.node.inputs) > 10 else None
        if bias is not None:
            own = branch("Slice", bias, near, end, branch.vector(3))
            hidden = branch("Add", hidden, branch("Squeeze", own, branch.vector(0, 1)))
        seen = self.selection.first + self.selection.voted
        return branch("Pad", hidden, branch.vector(0, seen, 0, 0))

    def _range_inputs(self, branch: Branch, begin: Value, end: Value) -> list[Value]:
        axis = branch.vector(0)
        ends = [branch("Squeeze", value, axis) for value in (begin, end)]
        return [*ends, branch.scalar(1, np.int64)]


def _typed(values: Sequence[Value], others: Sequence[Value]) -> Sequence[Value]:
    """Give values the types and shapes of others: so buffers stay in place."""
    for value, other in zip(values, others, strict=True):
        value.type, value.shape = other.type, other.shape
    return values


def add_selection(
    model: ir.Model, contract: StepContract, checkpoint: Checkpoint, rows: int
) -> tuple[ir.Model, Selection]:
    """Let a graph read `rows` KV rows only; raises `UnsupportedModelError`."""
    graph = model.graph
    nodes = attentions(graph)
    softcaps = (node.attributes.get_float("softcap", 0.0) for node in nodes)
    heads = {node.attributes.get_int("num_heads", 0) for node in nodes}
    fact = ""
    if windowed(graph) or any(softcaps) or any(map(has_sinks, nodes)):
        fact = "attends in sliding windows, with a softcap or with sinks"
        fact += ", and --select-kv needs plain attention"
    elif len(heads) != 1 or any(map(is_shared, nodes)):
        fact = "has layers of different heads, or that share keys"
        fact += ", and --select-kv needs equal layers"
    if fact:
        raise UnsupportedModelError(f"{checkpoint.source} {fact}; leave it out")
    selection = Selection(rows, heads.pop())
    length = _shifting_length(checkpoint, contract, nodes, rows)
    _add_branches(graph, replace(contract, selection=selection), length)
    graph.opset_imports[""] = OPSET
    common.RemoveUnusedNodesPass()(model)
    return model, selection


def _shifting_length(
    checkpoint: Checkpoint, contract: StepContract, nodes: list[ir.Node], rows: int
) -> int | None:
    """The length beyond which keys are shifted; None for never, or if they cannot."""
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


def _add_branches(graph: ir.Graph, contract: StepContract, length: int | None) -> None:
    selection = contract.selection
    assert selection is not None
    inputs = {spec.name: new_value(spec) for spec in contract.selections("past")}
    selecting = new_value(SELECTING)
    graph.inputs.extend([selecting, *inputs.values()])
    nodes = attentions(graph)
    make, read = Maker(graph, nodes[0]), nodes[0].inputs
    rows = make("Cast", make("Shape", read[0], start=1, end=2), to=ir.DataType.INT32)
    enough = make("Sub", read[5], rows), selection.rows - 2  # the last committed
    is_selecting = _add_both_above(make, (selecting, int(Reading.ALL)), enough)
    shifts = None
    if length is not None:
        mode = selecting, int(Reading.SELECTED)
        shifts = _add_both_above(make, mode, (read[5], length - 1))
    for node in nodes:
        past: Any = node.inputs[3]
        layer = int(str(past.name).partition(".")[2])
        state = tuple(inputs[f"past_{kind}.{layer}"] for kind in ("rows", "query"))
        attention = SelectedAttention(graph, node, state, selection, shifts)
        branches = {"then_branch": attention.selected_branch()}
        branches["else_branch"] = attention.whole_branch()
        choice = ir.node("If", [is_selecting], branches, num_outputs=5)
        specs = contract.selections("present")
        after = [new_value(s) for s in specs if s.name.endswith(f".{layer}")]
        _typed(choice.outputs, [*node.outputs, *after])
        graph.insert_before(node, choice)
        *kept, rows, query = choice.outputs
        replace_values(node.outputs, kept)
        graph.remove(node)
        rows.name, query.name = (value.name for value in after)
        graph.outputs.extend([rows, query])


def _add_both_above(make: Maker, *pairs: tuple[ir.Value | None, int]) -> ir.Value:
    """Add a bool [1]: whether both values, int32 [1], are above their bounds."""
    above = [
        make("Greater", value, make.constant(f"above.{bound}", [bound], np.int32))
        for value, bound in pairs
    ]
    return make("And", *above)
