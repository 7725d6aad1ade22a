"""A head graph made by hand: it reads features and chooses among a few token ids.

candidates = ids[top k of features @ weights],  carried = features + 1
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensor_spec import TensorSpec

TARGET = StepContract(
    vocab_size=100,
    capacity=32,
    max_width=8,
    dtype="float32",
    kv_shapes=((1, 16),),
    feature_size=6,
)
HEAD = StepContract(
    vocab_size=100,
    capacity=32,
    max_width=8,
    dtype="float32",
    kv_shapes=((1, 16),),
    feature_input=6,
    carried_size=6,
    draft_vocab=10,
)
IDS = np.arange(3, 100, 10)
"""The token ids of the head's ten logits."""

WEIGHTS = np.random.default_rng(0).normal(size=(6, 10)).astype(np.float32)


def write_head(file: Path, contract: StepContract = HEAD) -> None:
    """Write the graph with the inputs and outputs of `contract`."""
    node = helper.make_node
    nodes = [
        node("Gather", ["features", "answer_rows"], ["answered"], axis=1),
        node("MatMul", ["answered", "weights"], ["logits"]),
        node("TopK", ["logits", "k"], ["candidate_logits", "places"]),
        node("Gather", ["ids", "places"], ["candidates"]),
        node("ReduceLogSumExp", ["logits", "last"], ["logsumexp"], keepdims=0),
        node("Add", ["features", "one"], ["carried"]),
        node("Identity", ["past_key.0"], ["present_key.0"]),
        node("Identity", ["past_value.0"], ["present_value.0"]),
    ]
    constants = {
        "weights": WEIGHTS,
        "ids": IDS,
        "k": np.array([contract.candidates]),
        "last": np.array([-1]),
        "one": np.ones(1, np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "head",
        [_value(spec) for spec in contract.inputs],
        [_value(spec) for spec in contract.outputs],
        [
            onnx.numpy_helper.from_array(array, name)
            for name, array in constants.items()
        ],
    )
    opset = helper.make_opsetid("", 18)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=10), file)


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    kind = getattr(
        TensorProto, {"float32": "FLOAT"}.get(spec.dtype, spec.dtype.upper())
    )
    return helper.make_tensor_value_info(spec.name, kind, spec.shape)
