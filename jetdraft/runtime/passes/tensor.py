"""Arrays that a session reads and fills, on the host or on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.ort import ort


class Tensor:
    """A fixed `value` to bind, and the `array` that the host sees of it.

    On the host both are the same memory. Elsewhere `upload` and `download` copy, and
    `fetch` downloads what a pass has made stale, once.

        tensor = Memory("cuda").tensor((1, 4), "int64")
        tensor.array[0] = [5, 8, 9, 2]
        tensor.upload()
    """

    def __init__(
        self, array: npt.NDArray[Any], value: ort.OrtValue, copies: bool
    ) -> None:
        self.array = array
        self.value = value
        self.stale = False
        self._copies = copies

    def upload(self) -> None:
        """Give the device what the host has."""
        if self._copies:
            self.value.update_inplace(self.array)

    def download(self) -> None:
        """Give the host what the device has."""
        if self._copies:
            np.copyto(self.array, self.value.numpy())
        self.stale = False

    def fetch(self) -> None:
        """Download, unless that was done since the last pass."""
        if self.stale:
            self.download()


@dataclass(frozen=True)
class Memory:
    """Where tensors lie: a `device` of onnxruntime's, "cpu" or "cuda".

    `copies` says that host and session do not share memory; without a GPU, tests set it
    to run what runs with one.

        Memory("cuda", copies=True).tensor((1, 2, 2048, 64), "float16").value
    """

    device: str = "cpu"
    copies: bool = False

    def tensor(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Zeros. What lies in a new buffer would be added, masked or not, as a NaN."""
        array = np.zeros(shape, dtype)
        if not self.copies:
            value = ort.OrtValue.ortvalue_from_numpy(array)
        else:
            value = ort.OrtValue.ortvalue_from_shape_and_type(
                shape, np.dtype(dtype).type, self.device, 0
            )
            if array.size:
                value.update_inplace(array)
        return Tensor(array, value, self.copies)


HOST = Memory()
"""What the CPU provider computes on, and no copy is made for."""
