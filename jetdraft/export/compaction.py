"""The graph that moves an accepted tree path together, in place."""

from __future__ import annotations

import onnx_ir as ir

from jetdraft.contract import StepContract

OPSET = 24
"""The first that has TensorScatter."""


def compaction(contract: StepContract) -> ir.Model:
    """A weightless graph over all buffers, as `StepContract.compaction` declares it.

    Per buffer: gather the rows `source` and write them from row `target` on. Nothing is
    written before all of a buffer's rows are gathered, so both may be the same memory.
    """
    source = _value("source", ir.DataType.INT64, ["m"])
    target = _value("target", ir.DataType.INT64, [1])
    inputs, outputs, nodes = [source, target], [], []
    for past, present in zip(
        contract.buffers("past"), contract.buffers("present"), strict=True
    ):
        dtype = ir.DataType.from_numpy(_numpy(past.dtype))
        buffer = _value(past.name, dtype, list(past.shape))
        rows = ir.node("Gather", [buffer, source], {"axis": 2})
        moved = ir.node(
            "TensorScatter",
            [buffer, rows.outputs[0], target],
            {"axis": 2},
            outputs=[_value(present.name, dtype, list(present.shape))],
        )
        inputs.append(buffer)
        outputs.append(moved.outputs[0])
        nodes += [rows, moved]
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, opset_imports={"": OPSET}, name="compaction"
    )
    return ir.Model(graph, ir_version=11)


def _value(name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def _numpy(dtype: str) -> object:
    import numpy as np

    return np.dtype(dtype)
