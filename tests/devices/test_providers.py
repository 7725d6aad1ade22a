import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import onnx
import pytest
from onnx import numpy_helper

from jetdraft.cli.doctor import examine
from jetdraft.contracts.step_contract import StepContract
from jetdraft.devices import providers, webgpu
from jetdraft.devices.providers import PROVIDERS, Presence, try_provider
from jetdraft.errors import ProviderError
from jetdraft.runtime.passes import session
from jetdraft.runtime.passes.session import _check_provider
from tests import cases
from tests.devices.trees import ORIN_NANO, THOR, write
from tests.programs import assert_refused, jetdraft, succeed

CUDA = (
    "[E:onnxruntime] Failed to load library /x/libonnxruntime_providers_cuda.so with "
    "error: libcublasLt.so.13: cannot open shared object file: No such file\n"
    "[W:onnxruntime] Failed to create CUDAExecutionProvider.\n"
)
CUDA_EP, CPU_EP = PROVIDERS["cuda"].full, PROVIDERS["cpu"].full
BROKEN = Presence("cuda", compiled=True, runs=False, reason="it needs libcublas.so")
CONTRACT = StepContract(100, 512, 64, "float16", ((2, 16),), tree=True)
MACHINE = {"bundle": "b", "gpu": "Orin", "tensorrt": "10.16.2", "onnxruntime": "1.31.1"}
SIZES = ("min", "opt", "max")
RUNS = Presence("webgpu", True, True)


def test_the_graph_of_a_trial_multiplies():
    graph = onnx.load(providers.GRAPH).graph
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


@cases(
    "code, stderr, reason",
    (1, CUDA, "it needs libcublasLt.so.13"),
    (1, "CUDA error cudaErrorNoKernelImageForDevice:no kernel image", "no code"),
    (1, "CUDA failure 100: no CUDA-capable device is detected", "no CUDA device"),
    (1, "CUDA failure 35: CUDA driver version is insufficient", "driver is older"),
    (-11, "", "signal 11"),
    (1, "Traceback\n  ...\nValueError: odd\n", "failed: ValueError: odd"),
    (1, "", "no message"),
)
def test_reasons(code, stderr, reason):
    assert reason in providers.failure_reason(code, stderr)


def presences(**reasons: str):
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
    fix = fixes(write(tmp_path, tree), cuda="this build holds no code for this GPU")
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
    listed = succeed("doctor", "--devices", "--root", root)
    assert "this machine: NVIDIA Jetson Orin Nano" in listed.stdout
    assert "orin-nano-8gb" in listed.stdout.splitlines()[-1]
    shown = jetdraft("doctor", "--devices", "--root", root, "--json").stdout
    assert '"device": "orin-nano-8gb"' in shown.replace("'", '"')
    shown = jetdraft("doctor", "--device", "agx-thor")
    assert "fp4" in shown.stdout
    assert_refused(jetdraft("doctor", "--device", "agx"), "unknown device 'agx'")
    assert "provider cpu" in succeed("doctor", "--json").stdout


class Session:
    def __init__(self, providers, nodes):
        self.providers, self.nodes = providers, nodes

    def get_providers(self):
        return self.providers

    def get_provider_graph_assignment_info(self):
        for owner, op_type in self.nodes:
            node = SimpleNamespace(op_type=op_type)
            yield SimpleNamespace(ep_name=owner, get_nodes=lambda node=node: [node])


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


def test_what_cannot_run_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(providers, "try_provider", lambda name: BROKEN)
    with pytest.raises(ProviderError, match="it needs libcublas"):
        providers.choose_provider("cuda", [("contrib", "float16")])
    assert providers.choose_provider("auto", [("standard", "float16")]).name == "cpu"


def test_auto_takes_the_fastest_that_can(monkeypatch):
    runs = Presence("", compiled=True, runs=True)
    monkeypatch.setattr(providers, "try_provider", lambda name: runs)
    for flavour, dtype, name in (
        ("standard", "float32", "tensorrt"),
        ("contrib", "float16", "cuda"),
        ("contrib", "float32", "webgpu"),
    ):
        assert providers.choose_provider("auto", [(flavour, dtype)]).name == name
        recurrent = providers.choose_provider("auto", [(flavour, dtype)], "states")
        assert recurrent.name == "cpu"
    runs = replace(runs, software=True)
    assert providers.choose_provider("auto", [("contrib", "float32")]).name == "cpu"


def shapes(text):
    return dict(part.split(":") for part in text.split(","))


def test_an_engine_of_one_width_knows_one_shape_and_of_all_the_prefill_s(tmp_path):
    options = providers.engine_options(CONTRACT, 4, tmp_path)
    least, usual, largest = (options[f"trt_profile_{name}_shapes"] for name in SIZES)
    rows = {"input_ids": "1x4", "position_ids": "1x4", "answer_rows": "4"}
    assert shapes(least) == {**rows, "draft_mask": "65x4"}
    assert least == usual == largest
    assert options["trt_engine_cache_path"] == str(tmp_path / "width-4")
    options = providers.engine_options(CONTRACT, None, tmp_path)
    sizes = [shapes(options[f"trt_profile_{name}_shapes"]) for name in SIZES]
    rows_and_answers = [(size["input_ids"], size["answer_rows"]) for size in sizes]
    assert rows_and_answers == [("1x1", "1"), ("1x64", "1"), ("1x64", "64")]


def test_onnxruntime_takes_texts():
    options = providers.engine_options(CONTRACT, 2, None)
    assert options["trt_fp16_enable"] == "1"
    assert options["trt_engine_cache_enable"] == "0"
    assert all(isinstance(value, str) for value in options.values())


@pytest.mark.parametrize("changed", list(MACHINE))
def test_engines_of_the_same_machine_are_kept(tmp_path, recwarn, changed):
    folder = providers.engine_folder(tmp_path / "engines", MACHINE)
    (folder / "an.engine").write_text("built")
    assert providers.engine_folder(tmp_path / "engines", MACHINE) == folder
    assert (folder / "an.engine").exists()
    other = {**MACHINE, changed: "another"}
    assert not recwarn
    with pytest.warns(UserWarning, match="built again"):
        assert providers.engine_folder(tmp_path / "engines", other) == folder
    assert not (folder / "an.engine").exists()
    recwarn.clear()
    providers.engine_folder(tmp_path / "engines", other)
    assert not recwarn


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="built at every load"):
        assert providers.engine_folder(tmp_path / "file" / "engines", MACHINE) is None


def forget():
    webgpu.find_adapter.cache_clear()
    providers.try_provider.cache_clear()


@pytest.fixture(autouse=True)
def fresh():
    """What was found is remembered; each of these tests looks again."""
    forget()
    yield
    forget()


def offered(monkeypatch, version="0.4.0", kinds=("CPU",)):
    kind = SimpleNamespace(CPU="CPU", GPU="GPU")
    devices = [
        SimpleNamespace(
            ep_name=webgpu.EP_NAME,
            ep_metadata={"version": version},
            device=SimpleNamespace(type=one, vendor=f"vendor of {one}"),
        )
        for one in kinds
    ]
    ort = SimpleNamespace(OrtHardwareDeviceType=kind, __version__="1.32.0")
    ort.get_ep_devices = lambda: devices
    ort.set_default_logger_severity = lambda level: None
    ort.register_execution_provider_library = lambda name, path: None
    monkeypatch.setattr(webgpu, "ort", ort)
    plugin = SimpleNamespace(get_library_path=lambda: "plugin.so")
    monkeypatch.setattr(webgpu, "import_module", lambda name: plugin)
    drivers = [
        webgpu.VulkanDevice("llvmpipe", 100, software=True),
        webgpu.VulkanDevice("Orin", 4000, software=False),
    ]
    monkeypatch.setattr(webgpu, "vulkan_devices", lambda: drivers)
    monkeypatch.setattr(sys, "platform", "linux")
    return ort


def test_a_gpu_comes_before_a_software_adapter(monkeypatch):
    offered(monkeypatch, kinds=("CPU", "GPU"))
    adapter = webgpu.find_adapter()
    assert (adapter.name, adapter.software) == ("Orin", False)
    assert adapter.largest_buffer == 4000
    forget()
    offered(monkeypatch)
    adapter = webgpu.find_adapter()
    assert (adapter.name, adapter.software) == ("llvmpipe", True)


def test_what_is_missing_is_said_with_its_fix(monkeypatch):
    ort = offered(monkeypatch, kinds=())
    with pytest.raises(ProviderError, match="no adapter; install the GPU's driver"):
        webgpu.find_adapter()
    offered(monkeypatch, version="0.3.1")
    with pytest.raises(ProviderError, match=r"0\.3\.1 is too old; pip install"):
        webgpu.find_adapter()

    ort = offered(monkeypatch)
    refused = RuntimeError("API version 25 is not available\nmore")
    ort.register_execution_provider_library = Mock(side_effect=refused)
    with pytest.raises(ProviderError, match=r"1\.32\.0 cannot load .*\(API version 25"):
        webgpu.find_adapter()
    monkeypatch.setattr(webgpu, "import_module", Mock(side_effect=ImportError))
    with pytest.raises(ProviderError, match=r"pip install 'jetdraft\[webgpu\]'"):
        webgpu.find_adapter()


def test_a_missing_loader_and_a_missing_driver(monkeypatch):
    monkeypatch.setattr(webgpu.ctypes, "CDLL", Mock(side_effect=OSError))
    with pytest.raises(ProviderError, match="apt install libvulkan1"):
        webgpu.vulkan_devices()
    no_driver = SimpleNamespace(vkCreateInstance=lambda *arguments: -9)
    monkeypatch.setattr(webgpu.ctypes, "CDLL", lambda name: no_driver)
    with pytest.raises(ProviderError, match=r"no driver here \(error -9\); install"):
        webgpu.vulkan_devices()


def test_the_trial_says_why_webgpu_does_not_run(monkeypatch):
    monkeypatch.setattr(providers, "find_spec", lambda name: None)
    state = providers.try_provider("webgpu")
    assert not state.compiled
    assert state.reason == webgpu.MISSING_MESSAGE
    failed = subprocess.CompletedProcess([], 1, "", "reason: no driver; install it\n")
    monkeypatch.setattr(providers, "find_spec", lambda name: name)
    monkeypatch.setattr(providers.subprocess, "run", lambda *a, **k: failed)
    forget()
    assert providers.try_provider("webgpu").reason == "no driver; install it"
    software = subprocess.CompletedProcess([], 0, "on a software adapter\nran\n", "")
    monkeypatch.setattr(providers.subprocess, "run", lambda *a, **k: software)
    forget()
    assert providers.try_provider("webgpu").software


def stopped(reason):
    return Presence("webgpu", True, False, reason)


@cases(
    "state, gpu, fix",
    (RUNS, True, ""),
    (replace(RUNS, software=True), True, "Vulkan"),
    (Presence("webgpu", False, False, webgpu.MISSING_MESSAGE), True, ""),
    (stopped("libvulkan.so.1 is missing; apt install"), True, "libvulkan1"),
    (stopped("Vulkan has no driver here (error -9)"), True, "install the GPU's"),
    (stopped("the WebGPU plug-in 0.3 is too old"), True, "pip install --upgrade"),
    # Without a GPU no driver would help.
    (stopped("libvulkan.so.1 is missing"), False, ""),
    (stopped("Vulkan has no"), False, ""),
)
def test_the_doctor_has_a_fix(tmp_path, state, gpu, fix):
    def presence_of(name):
        return state if name == "webgpu" else Presence(name, True, True)

    if gpu:
        write(tmp_path, {"dev/dri/renderD128": ""})
    findings = {one.what: one for one in examine(tmp_path, presence_of)}
    finding = findings["provider webgpu"]
    found = state.reason or ("software adapter" if state.software else "runs")
    assert found.partition(";")[0] in finding.found
    assert fix in finding.fix
    assert bool(fix) == bool(finding.fix)
