"""onnxruntime's WebGPU provider, a plug-in that runs on Vulkan, Metal or Direct3D."""

import ctypes
import functools
import math
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import WIDEST
from jetdraft.errors import ProviderError, as_error, refusing
from jetdraft.ort import import_onnx, ort

PLUGIN = "onnxruntime_ep_webgpu"  # The package that holds the plug-in.
EP_NAME = "WebGpuExecutionProvider"  # onnxruntime's name of the provider.
_UPGRADE = "pip install --upgrade 'jetdraft[webgpu]'"
MISSING_MESSAGE = "the WebGPU plug-in is not installed; pip install 'jetdraft[webgpu]'"
# The first version of the plug-in whose values can be bound without a session.
OLDEST_PLUGIN = (0, 4)
# An environment variable: with 1 the plug-in also offers drivers on the CPU.
_SOFTWARE_VARIABLE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
_ERRORS_ONLY = 3  # onnxruntime's level of logs with errors only.


@dataclass(frozen=True)
class VulkanDevice:
    """A Vulkan device: its name, largest storage buffer in bytes, if it is software."""

    name: str
    largest_buffer: int
    software: bool


@dataclass(frozen=True)
class Adapter(VulkanDevice):
    """What WebGPU runs on, with onnxruntime's `device`; `largest_buffer` may be 0.

    A `software` adapter computes on the CPU.
    """

    device: Any


@functools.cache
def find_adapter() -> Adapter:
    """Return the plug-in's first GPU, or software adapter; raises `ProviderError`."""
    drivers = vulkan_devices() if sys.platform == "linux" else []
    with refusing(ProviderError(MISSING_MESSAGE), ImportError):
        plugin = import_module(PLUGIN)
    os.environ.setdefault(_SOFTWARE_VARIABLE, "1")
    ort.set_default_logger_severity(_ERRORS_ONLY)  # it warns of that variable
    fact = f"onnxruntime {ort.__version__} cannot load the WebGPU plug-in"
    # onnxruntime's exceptions have no common base.
    with as_error(ProviderError, Exception, fact, _UPGRADE):
        ort.register_execution_provider_library("webgpu", plugin.get_library_path())
    offered = [device for device in ort.get_ep_devices() if device.ep_name == EP_NAME]
    if not offered:
        fact = "the WebGPU plug-in finds no adapter; install the GPU's driver"
        raise ProviderError(fact)
    device = min(offered, key=_is_software)
    version = str(device.ep_metadata.get("version", "0"))
    if tuple(map(int, version.split(".")[:2])) < OLDEST_PLUGIN:
        fact = f"the WebGPU plug-in {version} is too old"
        raise ProviderError(f"{fact}; {_UPGRADE}")
    software = _is_software(device)
    unknown = VulkanDevice(str(device.device.vendor), 0, software)
    driver = next((one for one in drivers if one.software == software), unknown)
    return Adapter(**vars(driver), device=device)


def _is_software(device: Any) -> bool:
    return bool(device.device.type == ort.OrtHardwareDeviceType.CPU)


def add_adapter(options: Any, provider_options: dict[str, str]) -> None:
    """Let a session with `options` run on the adapter; changes `options` in place."""
    options.add_provider_for_devices([find_adapter().device], provider_options)


def check_buffers(file: Path, contract: StepContract) -> None:
    """Raise `ProviderError` if a tensor is larger than a buffer of WebGPU may be."""
    graph = import_onnx().load(file, load_external_data=False).graph
    stored = ((t.name, entry) for t in graph.initializer for entry in t.external_data)
    sizes = {name: int(entry.value) for name, entry in stored if entry.key == "length"}
    rows = WIDEST, WIDEST, WIDEST, contract.members, contract.prefix
    for spec in (*contract.inputs, *contract.outputs):
        numbers = math.prod(spec.shape_for(*rows))
        sizes[spec.name] = numbers * np.dtype(spec.dtype).itemsize
    largest = max(sizes, key=lambda name: sizes[name])
    limit = find_adapter().largest_buffer
    if 0 < limit < sizes[largest]:
        raise ProviderError(
            f"{largest} of {file} takes {sizes[largest] / 1e6:.0f} MB, and a buffer on "
            f"{find_adapter().name} holds {limit / 1e6:.0f} MB; choose "
            "--provider cpu, or export with a smaller --capacity"
        )


_LOADER = "libvulkan.so.1"  # The library that loads Vulkan's drivers.
# VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO and VK_PHYSICAL_DEVICE_TYPE_CPU.
_INSTANCE, _CPU_TYPE = 1, 4
# Bytes before deviceName and maxStorageBufferRange in VkPhysicalDeviceProperties.
_NAME, _STORAGE_RANGE = 20, 324
_MAX_DEVICES = 16  # The most devices that are listed.


class _InstanceInfo(ctypes.Structure):
    """VkInstanceCreateInfo without layers and extensions."""

    _fields_ = (
        *(("kind", ctypes.c_uint32), ("next", ctypes.c_void_p)),
        *(("flags", ctypes.c_uint32), ("application", ctypes.c_void_p)),
        *(("layer_count", ctypes.c_uint32), ("layers", ctypes.c_void_p)),
        *(("extension_count", ctypes.c_uint32), ("extensions", ctypes.c_void_p)),
    )


def vulkan_devices() -> list[VulkanDevice]:
    """All Vulkan devices; raises `ProviderError` without loader or driver."""
    fact = f"{_LOADER} is missing; for a GPU, apt install libvulkan1 and its driver"
    with refusing(ProviderError(fact), OSError):
        vulkan = ctypes.CDLL(_LOADER)
    instance, info = ctypes.c_void_p(), _InstanceInfo(kind=_INSTANCE)
    failed = vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance))
    if failed:
        fact = f"Vulkan has no driver here (error {failed}); install the GPU's driver"
        raise ProviderError(fact)
    count, handles = ctypes.c_uint32(_MAX_DEVICES), (ctypes.c_void_p * _MAX_DEVICES)()
    devices = []
    try:
        vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
        for handle in handles[: count.value]:
            properties = ctypes.create_string_buffer(4096)
            vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), properties)
            words = (ctypes.c_uint32 * 1024).from_buffer(properties)
            name = properties.raw[_NAME : _NAME + 256].split(b"\0")[0].decode()
            largest, kind = words[_STORAGE_RANGE // 4], words[4]
            devices.append(VulkanDevice(name, largest, kind == _CPU_TYPE))
    finally:
        vulkan.vkDestroyInstance(instance, None)
    return devices
