"""The plug-in and its drivers: what is missing is said with its fix."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from jetdraft.cli.doctor import examine
from jetdraft.devices import providers, webgpu
from jetdraft.devices.providers import Presence
from jetdraft.errors import ProviderError
from tests.devices.trees import write


@pytest.fixture
def fresh():
    """The adapter is remembered; each of these tests looks again."""
    webgpu.adapter.cache_clear()
    yield
    webgpu.adapter.cache_clear()


def offered(monkeypatch, version="0.4.0", kinds=("CPU",)):
    """An onnxruntime that offers adapters of these kinds."""
    kind = SimpleNamespace(CPU="CPU", GPU="GPU")
    devices = [
        SimpleNamespace(
            ep_name=webgpu.FULL,
            ep_metadata={"version": version},
            device=SimpleNamespace(type=one, vendor=f"vendor of {one}"),
        )
        for one in kinds
    ]
    ort = SimpleNamespace(
        get_ep_devices=lambda: devices,
        OrtHardwareDeviceType=kind,
        set_default_logger_severity=lambda level: None,
        register_execution_provider_library=lambda name, path: None,
        __version__="1.32.0",
    )
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


@pytest.mark.usefixtures("fresh")
def test_a_gpu_comes_before_a_software_adapter(monkeypatch):
    offered(monkeypatch, kinds=("CPU", "GPU"))
    adapter = webgpu.adapter()
    assert (adapter.name, adapter.software) == ("Orin", False)
    assert adapter.largest_buffer == 4000
    webgpu.adapter.cache_clear()
    offered(monkeypatch)
    adapter = webgpu.adapter()
    assert (adapter.name, adapter.software) == ("llvmpipe", True)


@pytest.mark.usefixtures("fresh")
def test_what_is_missing_is_said_with_its_fix(monkeypatch):
    ort = offered(monkeypatch, kinds=())
    with pytest.raises(ProviderError, match="no adapter; install the GPU's driver"):
        webgpu.adapter()
    offered(monkeypatch, version="0.3.1")
    with pytest.raises(ProviderError, match=r"0\.3\.1 is too old; pip install"):
        webgpu.adapter()

    def refuses(name, path):
        raise RuntimeError("API version 25 is not available\nmore")

    ort = offered(monkeypatch)
    ort.register_execution_provider_library = refuses
    with pytest.raises(ProviderError, match=r"1\.32\.0 cannot load .*\(API version 25"):
        webgpu.adapter()

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(webgpu, "import_module", missing)
    with pytest.raises(ProviderError, match=r"pip install 'jetdraft\[webgpu\]'"):
        webgpu.adapter()


def test_a_missing_loader_and_a_missing_driver(monkeypatch):
    def no_library(name):
        raise OSError(name)

    monkeypatch.setattr(webgpu.ctypes, "CDLL", no_library)
    with pytest.raises(ProviderError, match="apt install libvulkan1"):
        webgpu.vulkan_devices()
    no_driver = SimpleNamespace(vkCreateInstance=lambda *arguments: -9)
    monkeypatch.setattr(webgpu.ctypes, "CDLL", lambda name: no_driver)
    with pytest.raises(ProviderError, match=r"no driver here \(error -9\); install"):
        webgpu.vulkan_devices()


def test_the_trial_says_why_webgpu_does_not_run(monkeypatch):
    monkeypatch.setattr(providers, "find_spec", lambda name: None)
    providers.presence.cache_clear()
    state = providers.presence("webgpu")
    assert not state.compiled
    assert state.reason == webgpu.MISSING
    failed = subprocess.CompletedProcess([], 1, "", "reason: no driver; install it\n")
    monkeypatch.setattr(providers, "find_spec", lambda name: name)
    monkeypatch.setattr(providers.subprocess, "run", lambda *a, **k: failed)
    providers.presence.cache_clear()
    assert providers.presence("webgpu").reason == "no driver; install it"
    lines = "on a software adapter\nran\n"
    software = subprocess.CompletedProcess([], 0, lines, "")
    monkeypatch.setattr(providers.subprocess, "run", lambda *a, **k: software)
    providers.presence.cache_clear()
    assert providers.presence("webgpu").software
    providers.presence.cache_clear()


@pytest.mark.parametrize(
    ("state", "found", "fix"),
    [
        (Presence("webgpu", True, True), "runs", ""),
        (Presence("webgpu", True, True, software=True), "software adapter", "Vulkan"),
        (Presence("webgpu", False, False, webgpu.MISSING), "not installed", ""),
        (
            Presence("webgpu", True, False, "libvulkan.so.1 is missing; apt install"),
            "libvulkan.so.1 is missing",
            "libvulkan1",
        ),
        (
            Presence("webgpu", True, False, "Vulkan has no driver here (error -9)"),
            "no driver",
            "install the GPU's driver",
        ),
        (
            Presence("webgpu", True, False, "the WebGPU plug-in 0.3 is too old"),
            "too old",
            "pip install --upgrade",
        ),
    ],
)
def test_the_doctor_has_a_fix(tmp_path, state, found, fix):
    def presence_of(name):
        return state if name == "webgpu" else Presence(name, True, True)

    write(tmp_path, {"dev/dri/renderD128": ""})
    findings = {one.what: one for one in examine(tmp_path, presence_of)}
    finding = findings["provider webgpu"]
    assert found in finding.found
    assert fix in finding.fix
    assert bool(fix) == bool(finding.fix)


@pytest.mark.parametrize("reason", ["libvulkan.so.1 is missing", "Vulkan has no"])
def test_without_a_gpu_no_driver_would_help(tmp_path, reason):
    def presence_of(name):
        return Presence(name, True, name != "webgpu", reason)

    findings = {one.what: one for one in examine(tmp_path, presence_of)}
    assert reason in findings["provider webgpu"].found
    assert not findings["provider webgpu"].fix
