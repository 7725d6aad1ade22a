"""What TensorRT's parser refuses of operators that it knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tools.forecast.graph_view import GraphView, Operator

TOP = 3840
"""TopK takes fewer entries than this."""


def parser_limit(operator: Operator, graph: GraphView) -> str:
    """Why the parser refuses an operator that is in its list; empty if it does not."""
    rule = _LIMITS.get(operator.kind)
    return rule(operator, graph) if rule else ""


def _constant(*places: int) -> Callable[[Operator, GraphView], str]:
    """A rule: these inputs must be initializers."""

    def rule(operator: Operator, graph: GraphView) -> str:
        for place in places:
            if not operator.has_input(place):
                continue
            value = operator.inputs[place]
            if value.name not in graph.constants:
                return f"input {place} ({value.formal.name}) must be an initializer"
        return ""

    return rule


def _attention(operator: Operator, graph: GraphView) -> str:
    if any(value.name for value in operator.outputs[1:]):
        return "Attention may have one output only"
    return ""


def _dequantize(operator: Operator, graph: GraphView) -> str:
    if not operator.has_input(2):
        return ""
    zeros = graph.numbers.get(operator.inputs[2].name)
    return "" if zeros and not any(zeros) else "zero points must be 0"


def _scatter(operator: Operator, graph: GraphView) -> str:
    reduction = operator.attributes.get("reduction", b"none")
    return "" if reduction == b"none" else "a reduction is not read"


def _top(operator: Operator, graph: GraphView) -> str:
    if operator.integer("sorted", 1) != 1:
        return "entries must be sorted"
    count = graph.numbers.get(operator.inputs[1].name, ())
    if count and count[0] >= TOP:
        return f"{count[0]:.0f} entries; it takes fewer than {TOP}"
    return ""


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum")

_LIMITS: Mapping[str, Callable[[Operator, GraphView], str]] = {
    **{f"Reduce{name}": _constant(1) for name in (*_REDUCTIONS, "SumSquare")},
    "Attention": _attention,
    "CumSum": _constant(1),
    "DequantizeLinear": _dequantize,
    "ScatterND": _scatter,
    "Slice": _constant(3),
    "Squeeze": _constant(1),
    "TopK": _top,
    "Unsqueeze": _constant(1),
}
