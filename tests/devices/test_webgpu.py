"""The plug-in and its drivers: what is missing is said with its fix."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from jetdraft.cli.doctor import examine
from jetdraft.devices import providers, webgpu
from jetdraft.devices.providers import Presence
from jetdraft.errors import ProviderError
from tests.devices.trees import write


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
    """An onnxruntime that offers adapters of these kinds."""
    kind = SimpleNamespace(CPU="CPU", GPU="GPU")
    devices = [
        SimpleNamespace(
            ep_name=webgpu.EP_NAME,
            ep_metadata={"version": version},
            device=SimpleNamespace(type=one, vendor=f"vendor of {one}"),
        )
        for one in kinds
    ]
    ort = SimpleNamespace(
        get_ep_devices=lambda: devices, OrtHardwareDeviceType=kind,
        set_default_logger_severity=lambda level: None,
        register_execution_provider_library=lambda name, path: None,
        __version__="1.32.0",
    )  # fmt: skip
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
    lines = "on a software adapter\nran\n"
    software = subprocess.CompletedProcess([], 0, lines, "")
    monkeypatch.setattr(providers.subprocess, "run", lambda *a, **k: software)
    forget()
    assert providers.try_provider("webgpu").software


RUNS = Presence("webgpu", True, True)


def stopped(reason):
    return Presence("webgpu", True, False, reason)


@pytest.mark.parametrize(
    ("state", "gpu", "fix"),
    [
        (RUNS, True, ""),
        (replace(RUNS, software=True), True, "Vulkan"),
        (Presence("webgpu", False, False, webgpu.MISSING_MESSAGE), True, ""),
        (stopped("libvulkan.so.1 is missing; apt install"), True, "libvulkan1"),
        (stopped("Vulkan has no driver here (error -9)"), True, "install the GPU's"),
        (stopped("the WebGPU plug-in 0.3 is too old"), True, "pip install --upgrade"),
        # Without a GPU no driver would help.
        (stopped("libvulkan.so.1 is missing"), False, ""),
        (stopped("Vulkan has no"), False, ""),
    ],
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
