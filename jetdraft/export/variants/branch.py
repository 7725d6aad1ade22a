"""A subgraph in the making."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from jetdraft.quant.edits import initializer

_CONTRIB = "com.microsoft"


class Branch:
    """Nodes of a subgraph; its constants are those of the graph around it.

    Its `name` must be its own: values have names by it.

    branch = Branch(graph, "selected")
    rows = branch.make("Shape", query, start=1, end=2)
    branch.done([rows])
    """

    def __init__(self, graph: ir.Graph, name: str) -> None:
        self.graph, self.name = graph, name
        self.nodes: list[ir.Node] = []

    def make(
        self, kind: str, *inputs: ir.Value | None, **attributes: object
    ) -> ir.Value:
        """A new node's output."""
        return self.several(kind, 1, *inputs, **attributes)[0]

    def several(
        self, kind: str, count: int, *inputs: ir.Value | None, **attributes: object
    ) -> list[ir.Value]:
        """All outputs of a new node of ai.onnx."""
        node = ir.node(
            kind,
            list(inputs),
            attributes,  # type: ignore[arg-type]
            num_outputs=count,
        )
        return self.add(node)

    def contrib(
        self, kind: str, *inputs: ir.Value | None, **attributes: object
    ) -> ir.Value:
        """The output of a new node of onnxruntime's own operators."""
        node = ir.node(
            kind,
            list(inputs),
            attributes,  # type: ignore[arg-type]
            domain=_CONTRIB,
        )
        return self.add(node)[0]

    def add(self, node: ir.Node) -> list[ir.Value]:
        """The outputs of a node, with names that no other branch has."""
        self.nodes.append(node)
        for place, value in enumerate(node.outputs):
            value.name = f"{self.name}.{len(self.nodes)}.{place}"
        return list(node.outputs)

    def shaped(self, value: ir.Value, *sizes: int | ir.Value) -> ir.Value:
        """A value in another shape; a size may be a value int64 [1]."""
        parts = [s if isinstance(s, ir.Value) else self.vector(s) for s in sizes]
        if not any(isinstance(size, ir.Value) for size in sizes):
            return self.make("Reshape", value, self.vector(*sizes))  # type: ignore[arg-type]
        return self.make("Reshape", value, self.make("Concat", *parts, axis=0))

    def vector(self, *numbers: int) -> ir.Value:
        """A constant int64 [n]."""
        name = f"constant.{'_'.join(map(str, numbers))}"
        return initializer(self.graph, name, np.array(numbers, np.int64))

    def number(self, number: float, kind: type = np.float32) -> ir.Value:
        """A constant without axes."""
        name = f"constant.{kind.__name__}.{number}"
        return initializer(self.graph, name, np.array(number, kind))

    def done(self, outputs: list[ir.Value]) -> ir.Graph:
        """The subgraph."""
        return ir.Graph([], outputs, nodes=self.nodes, name=self.name)
