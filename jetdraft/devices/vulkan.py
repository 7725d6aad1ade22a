"""The Vulkan devices of this machine, read from the loader without a package."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from jetdraft.errors import ProviderError

_LOADER = "libvulkan.so.1"
_INSTANCE = 1
"""VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO"""

_CPU = 4
"""VK_PHYSICAL_DEVICE_TYPE_CPU"""

_NAME, _STORAGE_RANGE = 20, 324
"""Bytes into VkPhysicalDeviceProperties: `deviceName`, `limits.maxStorageBufferRange`.
"""

_MOST = 16


@dataclass(frozen=True)
class VulkanDevice:
    """A device, its largest storage buffer in bytes, and whether it is software."""

    name: str
    largest_buffer: int
    software: bool


class _InstanceInfo(ctypes.Structure):
    """VkInstanceCreateInfo without layers and extensions."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("layer_count", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


def vulkan_devices() -> list[VulkanDevice]:
    """All devices; raises `ProviderError` if the loader or a driver is missing.

    [device.name for device in vulkan_devices()]
    """
    try:
        vulkan = ctypes.CDLL(_LOADER)
    except OSError as error:
        raise ProviderError(
            f"{_LOADER} is missing; for a GPU, apt install libvulkan1 and its driver"
        ) from error
    instance, info = ctypes.c_void_p(), _InstanceInfo(kind=_INSTANCE)
    failed = vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance))
    if failed:
        raise ProviderError(
            f"Vulkan has no driver here (error {failed}); install the GPU's driver"
        )
    try:
        return _devices(vulkan, instance)
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _devices(vulkan: ctypes.CDLL, instance: ctypes.c_void_p) -> list[VulkanDevice]:
    """The devices of an instance."""
    count, handles = ctypes.c_uint32(_MOST), (ctypes.c_void_p * _MOST)()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
    devices = []
    for handle in handles[: count.value]:
        properties = ctypes.create_string_buffer(4096)
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), properties)
        words = (ctypes.c_uint32 * 1024).from_buffer(properties)
        name = properties.raw[_NAME : _NAME + 256].split(b"\0")[0].decode()
        largest, kind = words[_STORAGE_RANGE // 4], words[4]
        devices.append(VulkanDevice(name, largest, kind == _CPU))
    return devices
