import dataclasses
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from jetdraft.contracts.step_contract import SplitContract, StepContract
from jetdraft.contracts.tensors import CANDIDATES, TensorSpec, check_tensors
from jetdraft.errors import ContractError
from jetdraft.parsing import RecordError, read_record
from tests import cases
from tests.toy_graphs import GUESSES, IDS, STEP, VOCABULARY, write_graph
from tests.toy_graphs import HEAD_CONTRACT as HEAD

CONTRACT = StepContract(100, 32, 8, "float16", kv_shapes=((2, 16), (1, 32)))
ONNX_TYPES = {name: f"tensor({name})" for name in ("int64", "int32", "float16")}
ONNX_TYPES["float32"] = "tensor(float)"
TEXT = json.dumps(asdict(CONTRACT))


def reported(specs):
    return [
        SimpleNamespace(name=it.name, type=ONNX_TYPES[it.dtype], shape=list(it.shape))
        for it in specs
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
        *("present_key.0", "present_value.0", "present_key.1", "present_value.1")
    ]
    past, present = CONTRACT.buffers("past"), CONTRACT.buffers("present")
    assert [s.shape for s in past] == [s.shape for s in present]


def test_width_fills_the_row_axis():
    assert TensorSpec("x", "int64", (1, "n", 3)).shape_for(rows=5) == (1, 5, 3)
    answers = TensorSpec("x", "int64", (1, "m", 3))
    assert answers.shape_for(rows=5, answers=2) == (1, 2, 3)


@cases(
    "error, fields, said",
    (RecordError, {"kv_shapes": [[2]]}, "kv_shapes"),
    (RecordError, {"kv_shapes": None}, "kv_shapes"),
    (RecordError, {"kv_shapes": [["two", 16]]}, "kv_shapes"),
    (RecordError, {"colour": "red"}, "colour"),
    (RecordError, {"kv_bits": 4}, "kv_bits"),
    (
        ContractError,
        {"feature_size": 4, "feature_input": 4},
        "both an input and an output",
    ),
    (ContractError, {"carried_size": 4}, "need features as an input"),
    (
        ContractError,
        {"guesses": 3, "kv_shapes": []},
        "guesses need features as an input, or buffers",
    ),
    (ContractError, {"guesses": 3}, "0 spare slots do not hold a block of 3"),
    (ContractError, {"draft_vocab": 101}, "101 tokens is not a part of 100"),
)
def test_malformed_and_contradicting_fields_are_refused(error, fields, said):
    with pytest.raises(error, match=said) as refused:
        read_record(StepContract, {**json.loads(TEXT), **fields})
    way_on = "; export the bundle again"
    assert str(refused.value).endswith(way_on) == (error is ContractError)


@cases("field", *dataclasses.fields(StepContract), ids=lambda f: f.name)
def test_json_without_a_field_has_its_default_or_is_refused(field):
    values = json.loads(TEXT)
    assert read_record(StepContract, values) == CONTRACT
    del values[field.name]
    if field.default is dataclasses.MISSING:
        with pytest.raises(RecordError, match=f"{field.name} is missing"):
            read_record(StepContract, values)
    else:
        assert getattr(read_record(StepContract, values), field.name) == field.default


def test_a_target_gives_features_of_every_row():
    contract = replace(CONTRACT, feature_size=6)
    added = [spec for spec in contract.outputs if spec not in CONTRACT.outputs]
    assert added == [TensorSpec("features", "float32", (1, "n", 6))]
    assert contract.inputs == CONTRACT.inputs


def test_a_head_that_guesses_answers_for_tokens_not_for_rows():
    heads = replace(CONTRACT, kv_shapes=(), feature_input=6, guesses=3)
    shapes = {spec.name: spec.shape for spec in heads.outputs}
    assert shapes["candidates"] == (1, 3, min(CANDIDATES, heads.choices))
    assert shapes["logsumexp"] == (1, 3)
    assert not heads.buffers("past")


def test_a_graph_with_buffers_that_guesses_fills_a_block():
    block = replace(CONTRACT, tree=False, guesses=3, spare_slots=6)
    assert next(s.shape for s in block.inputs if s.name == "block") == (1, 3)
    assert (block.block, block.has_bias) == (3, True)
    assert CONTRACT.block == replace(block, kv_shapes=(), feature_input=6).block == 0


def test_a_head_reads_features_and_carries_its_own():
    assert [(s.name, s.shape) for s in HEAD.inputs[5:6]] == [("features", (1, "n", 6))]
    shapes = {spec.name: spec.shape for spec in HEAD.outputs}
    assert shapes["carried"] == (1, "n", 6)
    assert shapes["logits"] == (1, "m", len(IDS))
    assert shapes["candidates"] == (1, "m", CANDIDATES)
    few = {spec.name: spec.shape for spec in replace(HEAD, draft_vocab=10).outputs}
    assert few["candidates"] == (1, "m", 10)


@pytest.fixture
def head(tmp_path):
    write_graph(tmp_path / "head.onnx", HEAD, GUESSES)
    return onnxruntime.InferenceSession(
        tmp_path / "head.onnx", providers=["CPUExecutionProvider"]
    )


def test_a_head_graph_runs_as_its_contract_says(head):
    check_tensors(HEAD.inputs, head.get_inputs(), "the head's inputs")
    check_tensors(HEAD.outputs, head.get_outputs(), "the head's outputs")
    features = np.random.default_rng(1).normal(size=(1, 3, 6)).astype(np.float32)
    feeds = {s.name: np.zeros(s.shape_for(3, 1), s.dtype) for s in HEAD.inputs}
    feeds |= {"features": features, "answer_rows": np.array([2])}
    feeds |= {"input_ids": np.array([[3, 5, 9]]), "position_ids": np.array([[4, 5, 6]])}
    names = [spec.name for spec in HEAD.outputs]
    answer = dict(zip(names, head.run(names, feeds), strict=True))
    for spec in HEAD.outputs:
        assert answer[spec.name].shape == spec.shape_for(3, 1), spec.name
        assert answer[spec.name].dtype == spec.dtype
    best = IDS[np.argsort(-GUESSES[(9 + 7 * 7) % VOCABULARY, IDS])[:CANDIDATES]]
    np.testing.assert_array_equal(answer["candidates"][0, 0], best)
    carried = features + np.float32(STEP)
    carried[0, :, 0] += (3, 5, 9)
    np.testing.assert_allclose(answer["carried"], carried, rtol=1e-6)


def test_a_head_graph_without_its_features_is_refused(head):
    wider = replace(HEAD, feature_input=7)
    with pytest.raises(ContractError, match=r"'features' is .*6\], declared .*7\]"):
        check_tensors(wider.inputs, head.get_inputs(), "the head's inputs")


def test_halves_share_the_layers_and_the_states_between_them():
    halves = SplitContract.of(CONTRACT, layers=1, hidden_size=48)
    assert halves.lower.kv_shapes == ((2, 16),)
    assert halves.upper.kv_shapes == ((1, 32),)
    lower, upper = (
        [spec.name for spec in specs]
        for specs in (halves.lower_outputs, halves.upper_inputs)
    )
    assert lower == ["hidden", "present_key.0", "present_value.0"]
    places = [spec.name for spec in CONTRACT.inputs[1:5]]
    assert upper == ["hidden", *places, "past_key.0", "past_value.0"]
    assert halves.hidden.shape == (1, "n", 48)


def test_an_early_exit_reads_parents_and_gives_scores():
    plain = SplitContract.of(CONTRACT, 1, 48)
    both = SplitContract.of(replace(CONTRACT, tree=True, streams=3), 1, 48, scores=True)
    added = {s.name for s in both.lower_inputs} - {s.name for s in plain.lower_inputs}
    assert added == {"draft_mask", "draft_start", "parents"}
    mask = next(s for s in both.lower_inputs if s.name == "draft_mask")
    assert mask.shape == (1 + CONTRACT.max_width, "n"), "the lower half has no probes"
    added = set(both.lower_outputs) - set(plain.lower_outputs)
    assert [(spec.name, spec.shape) for spec in added] == [("scores", (1, "n"))]


@pytest.mark.parametrize("layers", [0, 2, 3])
def test_a_half_without_layers_is_refused(layers):
    with pytest.raises(ContractError, match=f"cannot be cut below the top {layers}"):
        SplitContract.of(CONTRACT, layers, 48)


def test_accepts_what_is_declared_in_any_order_with_any_name_of_the_row_axis():
    check_tensors(CONTRACT.inputs, reported(CONTRACT.inputs)[::-1], "inputs")
    check_tensors(CONTRACT.outputs, reported(CONTRACT.outputs), "outputs")
    tensors = reported(CONTRACT.inputs)
    tensors[0].shape = [1, "batch_rows"]
    check_tensors(CONTRACT.inputs, tensors, "inputs")


def test_refuses_a_missing_and_an_undeclared_tensor():
    with pytest.raises(ContractError, match=r"the inputs lack 'past_value.1'"):
        check_tensors(CONTRACT.inputs, reported(CONTRACT.inputs[:-1]), "the inputs")
    with pytest.raises(ContractError, match=r"undeclared \['past_value.1'\]"):
        check_tensors(CONTRACT.inputs[:-1], reported(CONTRACT.inputs), "the inputs")


@cases(
    "number, field, wrong, said",
    (5, "type", "tensor(float)", r"'past_key.0' is .*, declared float16"),
    (5, "shape", [1, 2, 33, 16], r"'past_key.0' is .*, declared float16"),
    (5, "shape", [1, 2, 32], r"'past_key.0' is .*, declared float16"),
    (5, "shape", [1, 2, "capacity", 16], r"'past_key.0' is .*, declared float16"),
    (0, "shape", [1, 7], "'input_ids'"),  # the axis of rows must not be fixed
)
def test_refuses_another_type_or_shape(number, field, wrong, said):
    tensors = reported(CONTRACT.inputs)
    setattr(tensors[number], field, wrong)
    with pytest.raises(ContractError, match=said):
        check_tensors(CONTRACT.inputs, tensors, "the inputs")
