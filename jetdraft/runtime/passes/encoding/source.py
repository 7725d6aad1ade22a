"""What a decoder reads beside its own text: a source, encoded once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.source_contract import SourceContract
from jetdraft.contracts.step_contract import SOURCE_LENGTH, StepContract
from jetdraft.contracts.tensor_check import check_tensors
from jetdraft.ort import ort
from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.passes.tensor import HOST, Memory, Tensor

Material = Sequence[int] | Float32s
"""What an encoder reads: token ids, or a sound's features float32 [bins, frames]."""


def tokens_of(material: Material) -> list[int]:
    """The tokens of what an encoder reads; a sound has none.

    tokens_of([5, 8, 1])    # [5, 8, 1]
    """
    return [] if np.ndim(material) > 1 else [int(token) for token in material]


class Source:
    """The cross buffers of one decoder, allocated once; a decoder only reads them.

    The encoder's session runs once for each source, and writes the buffers in place.
    `lent` has them by the decoder's inputs; `seconds` adds up the encoder's time.

        source = Source(session, contract)
        source.read([5, 8, 1])
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: StepContract,
        memory: Memory = HOST,
    ) -> None:
        declared = SourceContract(contract)
        check_tensors(declared.inputs, session.get_inputs(), "the encoder's inputs")
        check_tensors(declared.outputs, session.get_outputs(), "the encoder's outputs")
        self.slots = contract.source_slots
        self.tokens: list[int] = []
        self.seconds = 0.0
        [self._input] = declared.inputs
        self._material: npt.NDArray[Any] = np.zeros(0)
        self._session, self._memory = session, memory
        self._buffers = {
            spec.name: _filled(memory.tensor(spec.sized(), spec.dtype), place)
            for place, spec in enumerate(declared.outputs)
        }
        self._length = memory.tensor(SOURCE_LENGTH.sized(), SOURCE_LENGTH.dtype)
        self._set_length(self.slots)

    @property
    def lent(self) -> dict[str, ort.OrtValue]:
        """The values to bind, by the names of the decoder's inputs."""
        tensors = {**self._buffers, SOURCE_LENGTH.name: self._length}
        return {name: tensor.value for name, tensor in tensors.items()}

    def read(self, material: Material) -> bool:
        """Encode a source, unless the buffers hold it already; says whether it ran."""
        array = np.asarray(material, self._input.dtype)
        if np.array_equal(array, self._material):
            return False
        # For the case that the pass fails.
        self._material, self.tokens = np.zeros(0), []
        with self._memory.alone():
            start = time.perf_counter()
            io = self._session.io_binding()
            io.bind_cpu_input(self._input.name, array[None])
            for name, tensor in self._buffers.items():
                io.bind_ortvalue_output(name, tensor.value)
            self._session.run_with_iobinding(io)
            self.seconds += time.perf_counter() - start
        self._material, self.tokens = array, tokens_of(material)
        # A sound fills all slots.
        self._set_length(len(self.tokens) or self.slots)
        return True

    def _set_length(self, length: int) -> None:
        self._length.array[0] = length
        self._length.upload()


def _filled(tensor: Tensor, seed: int) -> Tensor:
    """Random numbers, so that passes which are compared before any source differ."""
    random = np.random.default_rng(seed)
    tensor.array[:] = random.standard_normal(tensor.array.shape, np.float32)
    tensor.upload()
    return tensor
