from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jetdraft.contract import CANDIDATES, StepContract, TensorSpec, check_tensors
from jetdraft.errors import ContractError

CONTRACT = StepContract(
    vocab_size=100,
    capacity=32,
    max_width=8,
    dtype="float16",
    kv_shapes=((2, 16), (1, 32)),
)
ONNX_TYPES = {
    "int64": "tensor(int64)",
    "int32": "tensor(int32)",
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
}


def found(specs):
    """What a session that keeps to `specs` reports."""
    return [
        SimpleNamespace(
            name=spec.name, type=ONNX_TYPES[spec.dtype], shape=list(spec.shape)
        )
        for spec in specs
    ]


def test_declares_the_inputs_in_graph_order():
    assert [(s.name, s.dtype, s.shape) for s in CONTRACT.inputs] == [
        ("input_ids", "int64", (1, "n")),
        ("position_ids", "int64", (1, "n")),
        ("cursor", "int32", (1,)),
        ("total_length", "int32", (1,)),
        ("answer_rows", "int64", ("m",)),
        ("past_key.0", "float16", (1, 2, 32, 16)),
        ("past_value.0", "float16", (1, 2, 32, 16)),
        ("past_key.1", "float16", (1, 1, 32, 32)),
        ("past_value.1", "float16", (1, 1, 32, 32)),
    ]


def test_declares_the_outputs_in_graph_order():
    assert [(s.name, s.dtype, s.shape) for s in CONTRACT.outputs[:4]] == [
        ("candidates", "int64", (1, "m", 64)),
        ("candidate_logits", "float32", (1, "m", 64)),
        ("logsumexp", "float32", (1, "m")),
        ("logits", "float32", (1, "m", 100)),
    ]
    assert [s.name for s in CONTRACT.outputs[4:]] == [
        "present_key.0",
        "present_value.0",
        "present_key.1",
        "present_value.1",
    ]


def test_past_and_present_have_the_same_shapes():
    past, present = CONTRACT.buffers("past"), CONTRACT.buffers("present")
    assert [s.shape for s in past] == [s.shape for s in present]


@pytest.mark.parametrize(("vocabulary", "candidates"), [(10, 10), (1000, CANDIDATES)])
def test_candidates_never_outnumber_the_vocabulary(vocabulary, candidates):
    contract = StepContract(vocabulary, 32, 8, "float32", ((1, 16),))
    assert contract.candidates == candidates


def test_width_fills_the_row_axis():
    assert TensorSpec("x", "int64", (1, "n", 3)).sized(rows=5) == (1, 5, 3)
    assert TensorSpec("x", "int64", (1, "m", 3)).sized(rows=5, answers=2) == (1, 2, 3)


def test_survives_json():
    text = json.dumps(CONTRACT.to_json())
    assert StepContract.from_json(json.loads(text)) == CONTRACT


@pytest.mark.parametrize(
    "damage",
    [
        {"kv_shapes": [[2]]},
        {"kv_shapes": None},
        {"kv_shapes": [["two", 16]]},
        {"colour": "red"},
        {"kv_bits": 4},
    ],
)
def test_malformed_json_is_refused(damage):
    with pytest.raises(ContractError, match="export the bundle again"):
        StepContract.from_json({**CONTRACT.to_json(), **damage})


LATER = {"hidden_size", "kv_bits"}
"""What contracts of older bundles do not say."""


@pytest.mark.parametrize("field", sorted(LATER))
def test_what_older_contracts_do_not_have_is_off(field):
    fields = CONTRACT.to_json()
    del fields[field]
    assert StepContract.from_json(fields) == CONTRACT


@pytest.mark.parametrize("field", sorted(CONTRACT.to_json().keys() - LATER))
def test_json_without_a_field_is_refused(field):
    fields = CONTRACT.to_json()
    del fields[field]
    with pytest.raises(ContractError, match="malformed"):
        StepContract.from_json(fields)


def test_accepts_what_is_declared_in_any_order():
    check_tensors(CONTRACT.inputs, found(CONTRACT.inputs)[::-1], "inputs")
    check_tensors(CONTRACT.outputs, found(CONTRACT.outputs), "outputs")


def test_accepts_any_name_of_the_row_axis():
    tensors = found(CONTRACT.inputs)
    tensors[0].shape = [1, "batch_rows"]
    check_tensors(CONTRACT.inputs, tensors, "inputs")


def test_refuses_a_missing_tensor():
    with pytest.raises(ContractError, match=r"the inputs lack 'past_value.1'"):
        check_tensors(CONTRACT.inputs, found(CONTRACT.inputs[:-1]), "the inputs")


def test_refuses_an_undeclared_tensor():
    with pytest.raises(ContractError, match=r"undeclared \['past_value.1'\]"):
        check_tensors(CONTRACT.inputs[:-1], found(CONTRACT.inputs), "the inputs")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("type", "tensor(float)"),
        ("shape", [1, 2, 33, 16]),
        ("shape", [1, 2, 32]),
        ("shape", [1, 2, "capacity", 16]),
    ],
)
def test_refuses_another_type_or_shape(field, wrong):
    tensors = found(CONTRACT.inputs)
    setattr(tensors[5], field, wrong)
    with pytest.raises(ContractError, match=r"'past_key.0' is .*, declared float16"):
        check_tensors(CONTRACT.inputs, tensors, "the inputs")


def test_refuses_a_fixed_row_axis():
    tensors = found(CONTRACT.inputs)
    tensors[0].shape = [1, 7]
    with pytest.raises(ContractError, match="'input_ids'"):
        check_tensors(CONTRACT.inputs, tensors, "the inputs")
