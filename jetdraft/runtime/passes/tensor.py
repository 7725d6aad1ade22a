"""Arrays that a session reads and writes, on the host or on a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.ort import ort

_ALONE = RLock()
"""WebGPU's sessions share one queue: two threads in it end the process."""


class Tensor:
    """A fixed `value` to bind, and the `array` with the same content on the host.

    In the host's memory both are one. Otherwise `upload` and `download` copy, and
    `fetch` downloads only if the array is `stale`, that is, older than the last pass.

        tensor = Memory("cuda").tensor((1, 4), "int64")
        tensor.array[0] = [5, 8, 9, 2]
        tensor.upload()
    """

    def __init__(
        self, array: npt.NDArray[Any], value: ort.OrtValue, memory: Memory
    ) -> None:
        self.array = array
        self.value = value
        self.stale = False
        self._memory = memory

    def upload(self) -> None:
        """Copy the array to the device."""
        if self._memory.copies:
            with self._memory.alone():
                self.value.update_inplace(self.array)

    def download(self) -> None:
        """Copy the value to the host."""
        if self._memory.copies:
            with self._memory.alone():
                np.copyto(self.array, self.value.numpy())
        self.stale = False

    def fetch(self) -> None:
        """Download if the array is stale."""
        if self.stale:
            self.download()


@dataclass(frozen=True)
class Memory:
    """The memory that tensors are allocated in: a `device`, "cpu", "cuda" or "webgpu".

    `copies` says that host and session do not share this memory. Tests set it without a
    GPU, to run the code that a GPU needs. Kernels read the inputs `on_host` there.

        Memory("cuda", copies=True).tensor((1, 2, 2048, 64), "float16").value
    """

    device: str = "cpu"
    copies: bool = False
    on_host: tuple[str, ...] = ("total_length",)

    def tensor(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A tensor of zeros: a NaN in new memory would spread even from masked rows."""
        array = np.zeros(shape, dtype)
        if not self.copies:
            value = ort.OrtValue.ortvalue_from_numpy(array)
        else:
            with self.alone():
                value = ort.OrtValue.ortvalue_from_shape_and_type(
                    shape, np.dtype(dtype).type, self.device, 0
                )
                if array.size:
                    value.update_inplace(array)
        return Tensor(array, value, self)

    def alone(self) -> AbstractContextManager[object]:
        """What to hold while a session or a copy uses this memory."""
        return _ALONE if self.device == "webgpu" else nullcontext()


HOST = Memory()
"""The memory of the CPU provider; nothing is copied."""
