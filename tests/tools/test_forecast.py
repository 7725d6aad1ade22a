import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from jetdraft.devices.plan import Question
from jetdraft.errors import ContractError, ProviderError
from tests.devices.planning.test_plan import CONFIG, SMALL
from tests.programs import assert_refused, jetdraft, succeed
from tests.tiny import exported, llama_config, save_checkpoint
from tools.advice import Advisor, excess_loss
from tools.advice import main as advise
from tools.forecast.__main__ import main as command
from tools.forecast.forecast import Fate, forecast, forecasts
from tools.forecast.kernel_table import TABLES, KernelTable

KINDS = ("cpu", "cuda", "webgpu", "tensorrt")
ATTENTION = {"com.microsoft.GroupQueryAttention"}
CONTRIB_OPERATORS = ATTENTION | {
    "com.microsoft.GatherBlockQuantized",
    "com.microsoft.MatMulNBits",
    "com.microsoft.SkipSimplifiedLayerNormalization",
}
REFUSED = {
    ("cpu", "cuda"): ATTENTION,  # fp32
    ("cpu", "webgpu"): ATTENTION,  # branches would get other positions
    ("cpu", "tensorrt"): CONTRIB_OPERATORS,
    ("cuda", "cuda"): set(),
    ("cuda", "webgpu"): ATTENTION,
    ("cuda", "tensorrt"): CONTRIB_OPERATORS,
    ("webgpu", "cuda"): ATTENTION,  # fp32
    ("webgpu", "webgpu"): set(),
    ("webgpu", "tensorrt"): CONTRIB_OPERATORS | {"com.microsoft.RotaryEmbedding"},
    ("tensorrt", "tensorrt"): set(),
    ("tensorrt", "cuda"): set(),
    ("tensorrt", "webgpu"): {"Attention", "TensorScatter", "DequantizeLinear"},
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecasts")
    source = save_checkpoint(folder / "c", llama_config(num_hidden_layers=1))
    how = {"recipe": "int4", "kernel": "onnxruntime"}
    return {n: exported(source, folder / n, provider=n, **how) for n in KINDS}


def graph(folder, *nodes, constants=(), inputs=("x",), kind=TensorProto.FLOAT):
    declared = [helper.make_tensor_value_info(name, kind, [2, 2]) for name in inputs]
    output = helper.make_tensor_value_info("y", kind, [2, 2])
    model = helper.make_model(
        helper.make_graph(nodes, "g", declared, [output], list(constants)),
        opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("own", 1)],
    )
    file = folder / "graph.onnx"
    onnx.save(model, file)
    return file


def test_tables_know_what_decides_here():
    assert KernelTable.of("cuda").source.startswith("onnxruntime-gpu 1.")
    attention = KernelTable.of("cuda").kernels["com.microsoft", "GroupQueryAttention"]
    types = {name for kernel in attention for name in kernel.types["T"]}
    assert types == {"float16", "bfloat16"}, "CUDA has no fp32"
    assert ("", "TensorScatter") in KernelTable.of("cuda").kernels
    assert ("", "TensorScatter") not in KernelTable.of("webgpu").kernels
    assert "int64" in KernelTable.of("webgpu").kernels["", "Add"][-1].types["T"]
    with pytest.raises(ProviderError, match="no table of kernels for 'abacus'"):
        KernelTable.of("abacus")


@pytest.mark.parametrize(("made", "provider"), REFUSED)
def test_each_kind_of_bundle_for_each_provider(bundles, made, provider):
    bundle = bundles[made]
    graphs = list(forecasts(bundle, provider))
    for one in graphs:
        model = onnx.load(bundle.path / one.file, load_external_data=False)
        assert len(one.verdicts) == len(model.graph.node)
    refused = {verdict.operator for one in graphs for verdict in one.refused}
    if provider == made or not REFUSED[made, provider]:
        assert refused == set()
    # Others of ai.onnx may be missing too.
    assert refused >= REFUSED[made, provider]
    contrib = {operator for operator in refused if operator.startswith("com.")}
    assert contrib == {one for one in REFUSED[made, provider] if "." in one}


def test_a_bundle_for_cuda_takes_the_fast_paths(bundles):
    by_file = {one.file: one for one in forecasts(bundles["cuda"], "cuda")}
    line, tree = by_file["target.onnx"], by_file["target-tree.onnx"]
    assert (line.copies, line.no_capture) == (tree.copies, tree.no_capture) == ((), "")
    fast, slow = (
        {verdict.operator.rpartition(".")[2]: verdict for verdict in one.verdicts}
        for one in (line, tree)
    )
    assert fast["GroupQueryAttention"].fate == fast["MatMulNBits"].fate == Fate.FAST
    assert slow["GroupQueryAttention"].fate == Fate.SLOW
    assert "attention_bias" in slow["GroupQueryAttention"].reason


def test_webgpu_captures_chains_only(bundles):
    by_file = {one.file: one for one in forecasts(bundles["webgpu"], "webgpu")}
    assert by_file["target.onnx"].no_capture == ""
    assert "bias" in by_file["target-tree.onnx"].no_capture
    refused = [v for one in forecasts(bundles["cuda"], "webgpu") for v in one.refused]
    wrong = [verdict for verdict in refused if verdict.fate == Fate.WRONG]
    assert wrong
    assert all("position_ids" in verdict.reason for verdict in wrong)


def test_a_planted_node_is_found(tmp_path):
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="before"),
        helper.make_node("Planted", ["a"], ["b"], name="planted", domain="own"),
        helper.make_node("Relu", ["b"], ["y"], name="after"),
    ]
    file = graph(tmp_path, *nodes)
    for provider in TABLES:
        one = forecast(file, provider)
        assert [verdict.node for verdict in one.refused] == ["planted"]
        assert "own.Planted" in one.refused[0].reason
        assert "own.Planted runs elsewhere" in one.no_capture
    assert forecast(file, "cuda").copies == ("a", "b")


def test_types_and_versions_decide(tmp_path):
    file = graph(tmp_path, helper.make_node("Sin", ["x"], ["y"]), kind=TensorProto.INT8)
    [refused] = forecast(file, "cuda").refused
    assert "is int8, the kernel takes" in refused.reason
    model = onnx.load(file)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    onnx.save(model, file)
    assert forecast(file, "cuda").refused == []


def test_what_chooses_at_run_time_cannot_be_captured(tmp_path):
    value = helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 2])
    relu = helper.make_node("Relu", ["x"], ["z"])
    part = helper.make_graph([relu], "branch", [], [value])
    true = numpy_helper.from_array(np.array(True), "yes")
    node = helper.make_node("If", ["yes"], ["y"], then_branch=part, else_branch=part)
    one = forecast(graph(tmp_path, node, constants=[true]), "cuda")
    assert one.no_capture == "If chooses at run time what runs"


def test_damaged_files_and_unknown_providers(tmp_path, bundles):
    file = tmp_path / "graph.onnx"
    file.write_bytes(b"\x00\x01not a graph")
    with pytest.raises(ContractError, match=r"graph\.onnx is not an ONNX graph"):
        forecast(file, "cuda")
    with pytest.raises(ProviderError, match="choose cuda, tensorrt, webgpu"):
        list(forecasts(bundles["cpu"], "abacus"))


def test_the_command_line(bundles):
    done = succeed(bundles["cuda"].path, "cuda", command=command)
    assert "target.onnx on cuda, by onnxruntime-gpu" in done.stdout
    assert "0 Memcpy nodes, capture" in done.stdout
    assert "fast path: flash decoding" in done.stdout
    done = jetdraft(bundles["cuda"].path, "tensorrt", "--json", command=command)
    assert done.exit_code == 2
    fields = json.loads(done.stdout)
    fates = {v["fate"] for one in fields["graphs"] for v in one["verdicts"]}
    assert "no kernel" in fates
    assert "cannot run on tensorrt, for example" in done.stderr
    assert_refused(jetdraft(bundles["cuda"].path, "abacus", command=command), "abacus")


@pytest.fixture
def advisor(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return Advisor(Question(file, "orin-nx-16gb", provider="cuda"))


def test_at_20_tokens_a_weight_both_halves_of_the_loss_are_equal():
    assert excess_loss(1e6, 20e6) == pytest.approx(2 * excess_loss(1e6, 1e30), rel=1e-3)


def test_the_advised_drafter_is_the_fastest_and_more_tokens_cost_nothing(advisor):
    best = advisor.best()
    others = (advisor.predict(*shape, 200) for shape in advisor.shapes())
    speeds = [one.choice.tokens_per_second for one in others]
    assert best.choice.tokens_per_second == max(speeds)
    assert best.choice.speedup > 1.0
    assert best.tokens == 200 * best.weights
    shape = best.layers, best.hidden_size
    some, many = (advisor.predict(*shape, n) for n in (20, 2000))
    assert some.acceptance < best.acceptance < many.acceptance < 1.0
    assert some.draft_ms == best.draft_ms == many.draft_ms
    assert some.choice.tokens_per_second < many.choice.tokens_per_second


def test_a_drafter_that_is_given_has_the_acceptance(advisor, tmp_path):
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**SMALL, "hidden_size": 512}))
    given = replace(advisor.question, drafter=file, acceptance=0.7)
    best = Advisor(given).best()
    assert Advisor(replace(given, acceptance=0.8)).best().acceptance > best.acceptance


def test_a_draft_vocabulary_makes_steps_cheap_and_misses_what_it_lacks(advisor):
    whole, cut = advisor.best(), replace(advisor, draft_vocab=8192).best()
    assert cut.choice.tokens_per_second > whole.choice.tokens_per_second
    covered = replace(advisor, draft_vocab=8192, coverage=0.5).best()
    assert covered.acceptance <= 0.5
    assert covered.choice.tokens_per_second < cut.choice.tokens_per_second


def test_the_program_says_size_and_budgets(advisor):
    how = (advisor.question.target, "--device", "orin-nx-16gb")
    first, *budgets = jetdraft(*how, command=advise).stdout.splitlines()
    best = advisor.best()
    assert f"width {best.hidden_size}, layers: {best.layers}" in first
    assert len(budgets) == 3
    for line, tokens in zip(budgets, (20, 200, 2000), strict=True):
        assert f"({tokens} a weight)" in line
    given = ("--draft-vocab", 8192, "--coverage", 0.5, "--json")
    cut = replace(advisor, draft_vocab=8192, coverage=0.5).best()
    assert json.loads(jetdraft(*how, *given, command=advise).stdout)[0] == cut.to_json()


def test_a_device_that_is_unknown_is_one_line(advisor):
    refused = jetdraft(advisor.question.target, "--device", "nano", command=advise)
    assert_refused(refused, "unknown device 'nano'")
