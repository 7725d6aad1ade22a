from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from onnx import numpy_helper

from jetdraft.cli.doctor import examine
from jetdraft.contracts.step_contract import StepContract
from jetdraft.devices import providers
from jetdraft.devices.providers import (
    PROVIDERS,
    Presence,
    choose_provider,
    engine_folder,
    engine_options,
    failure_reason,
    try_provider,
)
from jetdraft.devices.trial import GRAPH
from jetdraft.errors import ProviderError
from jetdraft.runtime.passes import session
from jetdraft.runtime.passes.session import _check_provider
from tests.cli.running import assert_refused, jetdraft
from tests.devices.trees import ORIN_NANO, THOR, write

CUDA = (
    "[E:onnxruntime] Failed to load library /x/libonnxruntime_providers_cuda.so with "
    "error: libcublasLt.so.13: cannot open shared object file: No such file\n"
    "[W:onnxruntime] Failed to create CUDAExecutionProvider.\n"
)


def test_the_graph_of_a_trial_multiplies():
    graph = onnx.load(GRAPH).graph
    assert [node.op_type for node in graph.node] == ["MatMul"]
    assert numpy_helper.to_array(graph.initializer[0]).tolist() == [[1, 2], [3, 4]]


def test_what_a_trial_finds(monkeypatch):
    """onnxruntime may list a provider whose trial does not end with "ran"."""
    try_provider.cache_clear()
    assert try_provider("cpu") == Presence("cpu", compiled=True, runs=True)
    tensorrt = try_provider("tensorrt")
    assert (tensorrt.compiled, tensorrt.runs) == (False, False)
    assert "built without TensorrtExecutionProvider" in tensorrt.reason
    listed = ["CUDAExecutionProvider"]
    monkeypatch.setattr(providers.ort, "get_available_providers", lambda: listed)
    cuda = try_provider("cuda")
    try_provider.cache_clear()
    assert (cuda.compiled, cuda.runs) == (True, False)
    assert cuda.reason


@pytest.mark.parametrize(
    ("code", "stderr", "reason"),
    [
        (1, CUDA, "it needs libcublasLt.so.13"),
        (1, "CUDA error cudaErrorNoKernelImageForDevice:no kernel image", "no code"),
        (1, "CUDA failure 100: no CUDA-capable device is detected", "no CUDA device"),
        (1, "CUDA failure 35: CUDA driver version is insufficient", "driver is older"),
        (-11, "", "signal 11"),
        (1, "Traceback\n  ...\nValueError: odd\n", "failed: ValueError: odd"),
        (1, "", "no message"),
    ],
)
def test_reasons(code, stderr, reason):
    assert reason in failure_reason(code, stderr)


def presences(**reasons: str):
    """The presence of each provider: it runs unless a reason is given."""
    return lambda name: Presence(
        name, compiled=True, runs=name not in reasons, reason=reasons.get(name, "")
    )


def fixes(root, **reasons):
    return {f.what: f.fix for f in examine(root, presences(**reasons)) if f.fix}


def test_findings_that_cost_speed_have_a_fix(tmp_path):
    assert fixes(write(tmp_path, ORIN_NANO)) == {
        "power mode": "MAXN_SUPER is faster: sudo nvpmodel",
        "gpu clock": "for steady figures: sudo jetson_clocks",
    }
    healthy = {"var/lib/nvpmodel/status": "pmode:0002"}
    healthy["sys/class/devfreq/17000000.gpu/cur_freq"] = "1020000000"
    assert fixes(write(tmp_path, healthy)) == {}


def test_missing_parts_have_a_fix(tmp_path):
    tree = {**THOR, "proc/meminfo": "MemAvailable: 500000 kB\nSwapTotal: 0 kB\n"}
    reason = "this build holds no code for this GPU"
    fix = fixes(write(tmp_path, tree), cuda=reason)
    assert set(fix) == {"cuda", "tensorrt", "free memory", "swap", "provider cuda"}
    assert "deploy/jetson" in fix["provider cuda"]


def test_what_is_wrong_comes_first(tmp_path):
    tree = {**ORIN_NANO, "etc/nv_tegra_release": "?"}
    first, *_ = examine(write(tmp_path, tree), presences(cpu="broken"))
    assert first.wrong
    assert first.fix
    result = jetdraft("doctor", "--root", tmp_path)
    assert result.exit_code == 2
    assert "error: driver: no L4T release file; flash JetPack" in result.stderr


def test_commands(tmp_path):
    root = write(tmp_path, ORIN_NANO)
    listed = jetdraft("doctor", "--devices", "--root", root)
    assert listed.exit_code == 0
    assert "this machine: NVIDIA Jetson Orin Nano" in listed.stdout
    assert "orin-nano-8gb" in listed.stdout.splitlines()[-1]
    shown = jetdraft("doctor", "--devices", "--root", root, "--json").stdout
    assert '"device": "orin-nano-8gb"' in shown.replace("'", '"')
    shown = jetdraft("doctor", "--device", "agx-thor")
    assert "fp4" in shown.stdout
    assert_refused(jetdraft("doctor", "--device", "agx"), "unknown device 'agx'")
    here = jetdraft("doctor", "--json")
    assert here.exit_code == 0, here.stderr
    assert "provider cpu" in here.stdout


class Session:
    """The two calls of an onnxruntime session that say which provider runs a node."""

    def __init__(self, providers, nodes):
        self.providers, self.nodes = providers, nodes

    def get_providers(self):
        return self.providers

    def get_provider_graph_assignment_info(self):
        for owner, op_type in self.nodes:
            node = SimpleNamespace(op_type=op_type)
            yield SimpleNamespace(ep_name=owner, get_nodes=lambda node=node: [node])


CUDA_EP, CPU_EP = PROVIDERS["cuda"].full, PROVIDERS["cpu"].full


def test_a_silent_fall_back_is_an_error(monkeypatch):
    """Sizes alone may be computed on the CPU."""
    nodes = [(CUDA_EP, "MatMul"), (CPU_EP, "Shape"), (CPU_EP, "Concat")]
    _check_provider(Session([CUDA_EP, CPU_EP], nodes), "cuda", Path("a.onnx"))
    nodes += [(CPU_EP, "Attention"), (CPU_EP, "TopK")]
    with pytest.raises(ProviderError, match="no kernels for Attention, TopK of"):
        _check_provider(Session([CUDA_EP, CPU_EP], nodes), "cuda", Path("a.onnx"))
    monkeypatch.setattr(session, "try_provider", lambda name: BROKEN)
    with pytest.raises(ProviderError, match="cannot be used here: it needs libcublas"):
        _check_provider(Session([CPU_EP], []), "cuda", Path("a.onnx"))


BROKEN = Presence("cuda", compiled=True, runs=False, reason="it needs libcublas.so")


def test_what_cannot_run_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(providers, "try_provider", lambda name: BROKEN)
    with pytest.raises(ProviderError, match="it needs libcublas"):
        choose_provider("cuda", [("contrib", "float16")])
    assert choose_provider("auto", [("standard", "float16")]).name == "cpu"


def test_auto_takes_the_fastest_that_can(monkeypatch):
    runs = Presence("", compiled=True, runs=True)
    monkeypatch.setattr(providers, "try_provider", lambda name: runs)
    for flavour, dtype, name in (
        ("standard", "float32", "tensorrt"),
        ("contrib", "float16", "cuda"),
        ("contrib", "float32", "webgpu"),
    ):
        assert choose_provider("auto", [(flavour, dtype)]).name == name
        assert choose_provider("auto", [(flavour, dtype)], "states").name == "cpu"
    runs = replace(runs, software=True)
    assert choose_provider("auto", [("contrib", "float32")]).name == "cpu"


CONTRACT = StepContract(100, 512, 64, "float16", ((2, 16),), tree=True)
MACHINE = {"bundle": "b", "gpu": "Orin", "tensorrt": "10.16.2", "onnxruntime": "1.31.1"}
SIZES = ("min", "opt", "max")


def shapes(text):
    return dict(part.split(":") for part in text.split(","))


def test_an_engine_of_one_width_knows_one_shape(tmp_path):
    options = engine_options(CONTRACT, 4, tmp_path)
    least, usual, largest = (options[f"trt_profile_{name}_shapes"] for name in SIZES)
    assert shapes(least) == {
        "input_ids": "1x4", "position_ids": "1x4", "answer_rows": "4",
        "draft_mask": "65x4",
    }  # fmt: skip
    assert least == usual == largest
    assert options["trt_engine_cache_path"] == str(tmp_path / "width-4")


def test_an_engine_of_all_widths_is_fastest_at_a_prefill(tmp_path):
    options = engine_options(CONTRACT, None, tmp_path)
    sizes = [shapes(options[f"trt_profile_{name}_shapes"]) for name in SIZES]
    rows_and_answers = [(size["input_ids"], size["answer_rows"]) for size in sizes]
    assert rows_and_answers == [("1x1", "1"), ("1x64", "1"), ("1x64", "64")]


def test_onnxruntime_takes_texts():
    options = engine_options(CONTRACT, 2, None)
    assert options["trt_fp16_enable"] == "1"
    assert options["trt_engine_cache_enable"] == "0"
    assert all(isinstance(value, str) for value in options.values())


@pytest.mark.parametrize("changed", list(MACHINE))
def test_engines_of_the_same_machine_are_kept(tmp_path, recwarn, changed):
    """Those of another version are built again."""
    folder = engine_folder(tmp_path / "engines", MACHINE)
    (folder / "an.engine").write_text("built")
    assert engine_folder(tmp_path / "engines", MACHINE) == folder
    assert (folder / "an.engine").exists()
    other = {**MACHINE, changed: "another"}
    assert not recwarn
    with pytest.warns(UserWarning, match="built again"):
        assert engine_folder(tmp_path / "engines", other) == folder
    assert not (folder / "an.engine").exists()
    recwarn.clear()
    engine_folder(tmp_path / "engines", other)
    assert not recwarn


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="built at every load"):
        assert engine_folder(tmp_path / "file" / "engines", MACHINE) is None
