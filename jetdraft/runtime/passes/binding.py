"""Binds a session's inputs, outputs and KV buffers once, for passes of one size."""

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.tensors import Float32s, Int64s, TensorSpec
from jetdraft.ort import ort
from jetdraft.runtime.passes.buffers import HOST, Memory, Tensor, run_bound

VisibleSlots = Sequence[Sequence[int]]  # Slots that a row attends to beside its own.
_Slots = tuple[tuple[int, ...], ...]  # By row.
_ROWS = ("answer_rows", "probe_rows", "prefix_rows", "picture_rows")
STEADY = (*_ROWS, "probe_ids", "draft_mask")
ON_REQUEST = ("logits", "probe_logits")  # Copied when the host reads them.


class PassBinding:
    """The inputs and outputs of passes with fixed numbers of rows, answers and probes.

    `tensors` holds them by name, `arrays` their arrays on the host. `buffers` are KV
    buffers and recurrent states by input; another graph's `borrowed` are only read.
    Outputs lie in `shared` arrays where given. `TensorSpec.shape_for` takes `sizes`.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        buffers: Mapping[str, ort.OrtValue],
        sizes: Sequence[int],
        memory: Memory = HOST,
        borrowed: Mapping[str, ort.OrtValue] = MappingProxyType({}),
        shared: Mapping[str, Float32s] = MappingProxyType({}),
    ) -> None:
        self.session, self._memory = session, memory
        self.io = session.io_binding()
        # A value can share the memory of its array, so both must stay alive.
        self.tensors: dict[str, Tensor] = {}
        presents = {name: name.replace("past_", "present_") for name in buffers}
        fixed = {**buffers, **{presents[n]: b for n, b in buffers.items()}, **borrowed}
        for spec in (*inputs, *outputs):
            if spec.name not in fixed:
                place = HOST if spec.name in memory.on_host else memory
                shape, array = spec.shape_for(*sizes), shared.get(spec.name)
                self.tensors[spec.name] = place.tensor(shape, spec.dtype, array)
        own = {name: tensor.value for name, tensor in self.tensors.items()}
        values = {**own, **fixed}
        for spec in inputs:
            self.io.bind_ortvalue_input(spec.name, values[spec.name])
        for spec in outputs:
            self.io.bind_ortvalue_output(spec.name, values[spec.name])
        self.arrays = {name: tensor.array for name, tensor in self.tensors.items()}
        self._copies = memory.copies
        # Steady inputs are uploaded before the next pass if their names are here.
        self._changed = {name for name in STEADY if name in self.tensors}
        read = {spec.name for spec in inputs}
        others = [(n, n in read, t) for n, t in self.tensors.items() if n not in STEADY]
        self._uploads = [tensor for _, is_read, tensor in others if is_read]
        self._on_request = [self.tensors[n] for n in ON_REQUEST if n in self.tensors]
        written = [(name, tensor) for name, is_read, tensor in others if not is_read]
        self._downloads = [tensor for name, tensor in written if name not in ON_REQUEST]
        self._mask_shows: tuple[_Slots, int] | None = None
        # To set an item of a view takes a tenth of the time of a numpy call.
        self.cursor = self.view("cursor")
        self.total_length = self.view("total_length")

    def view(self, name: str) -> memoryview:
        """A flat view of an input's or output's host array, to read and to set."""
        array: Any = self.arrays[name]
        return memoryview(array.reshape(-1))

    def run(self, options: ort.RunOptions | None = None) -> float:
        """Run one pass; returns the seconds that it took, with its copies."""
        with self._memory.exclusive_use():
            start = time.perf_counter()
            if self._copies:
                steady = [self.tensors[name] for name in self._changed]
                for tensor in (*self._uploads, *steady):
                    tensor.upload()
                self._changed.clear()
            run_bound(self.session, self.io, options)
            if self._copies:
                for tensor in self._downloads:
                    tensor.download()
                for tensor in self._on_request:
                    tensor.stale = True
            return time.perf_counter() - start

    def fill_rows(self, name: str, numbers: Float32s | Int64s | None) -> None:
        """Set an input that has numbers for each row; padding gets the last row's."""
        if numbers is not None:
            array = self.arrays[name][0]
            array[: len(numbers)] = numbers
            array[len(numbers) :] = numbers[-1]

    def show_all(self) -> None:
        """Let every row attend to all slots before it: clears the draft mask."""
        if self._mask_shows is not None:
            self._write_draft_mask(None)

    def show_only(self, visible: VisibleSlots, cursor: int, filled: int = 0) -> None:
        """Hide the slots from the cursor on, except the `visible` slots of each row.

        They count from the cursor; earlier passes wrote the first `filled`.
        """
        self.arrays["draft_start"][0] = cursor
        shown = (tuple(map(tuple, visible)), filled)
        if shown != self._mask_shows:
            self._write_draft_mask(shown)

    def _write_draft_mask(self, shown: tuple[_Slots, int] | None) -> None:
        """Write the draft mask in place; with None no slot is hidden."""
        mask = self.arrays["draft_mask"]
        mask[:] = 0
        if shown is not None:
            lines = _hidden_slots(*shown)
            mask[1 : 1 + len(lines)] = lines
        self._mask_shows = shown
        self._changed.add("draft_mask")


@lru_cache(maxsize=256)
def _hidden_slots(visible: _Slots, filled: int) -> npt.NDArray[np.uint8]:
    """The mask uint8 [filled + rows, rows]: 1 where a slot is hidden from a row."""
    mask = np.ones((filled + len(visible), len(visible)), np.uint8)
    for row, slots in enumerate(visible):
        mask[[*slots, filled + row], row] = 0
    return mask
