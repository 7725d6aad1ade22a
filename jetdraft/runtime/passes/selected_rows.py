"""The rows that each layer has selected of its buffers, from one pass to the next."""

from __future__ import annotations

import numpy as np

from jetdraft.contracts.step_contract import StepContract
from jetdraft.runtime.passes.tensor import HOST


class SelectedRows:
    """Tensors that selecting passes read and write in place, on the host.

    selected = SelectedRows(contract)
    selected.forget()    # before another text
    """

    def __init__(self, contract: StepContract) -> None:
        self._tensors = {
            spec.name: HOST.tensor(spec.sized(), spec.dtype)
            for spec in contract.selected("past")
        }
        self.buffers = {name: tensor.value for name, tensor in self._tensors.items()}
        self.forget()

    def forget(self) -> None:
        """Let the next pass select anew: no query is like zeros."""
        for tensor in self._tensors.values():
            tensor.array[...] = np.zeros((), tensor.array.dtype)
