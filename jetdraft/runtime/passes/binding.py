"""A session's inputs, outputs and KV buffers, bound once for passes of one size."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contract import HIDDEN, TensorSpec
from jetdraft.ort import ort
from jetdraft.runtime.passes.tensor import HOST, Memory, Tensor

Floats = npt.NDArray[np.float32]
Seen = Sequence[Sequence[int]]
"""Per row, the slots of a draft that it sees beside itself."""

ON_HOST = ("total_length",)
"""Inputs that kernels read on the host, on any device."""

STEADY = ("answer_rows", "probe_rows", "probe_ids", "attention_bias")
"""Inputs that most passes leave as they are."""

ON_REQUEST = ("logits", "probe_logits")
"""Outputs that stay on the device until somebody looks at them."""


class Bound:
    """Arrays that a pass reads and fills; all sizes are fixed.

    `arrays` holds the inputs and outputs by name as the host sees them, `tensors` the
    same with what is on the device.

        bound = Bound(session, inputs, outputs, buffers, rows=4, answers=4, probes=0)
        bound.arrays["input_ids"][0] = [5, 8, 9, 2]
        bound.run()
        bound.arrays["candidates"]
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        buffers: Mapping[str, ort.OrtValue],
        rows: int,
        answers: int,
        probes: int,
        memory: Memory = HOST,
    ) -> None:
        self.session = session
        self.io = session.io_binding()
        # The values alias the arrays or go with them; both must stay alive.
        self.tensors: dict[str, Tensor] = {}
        ends = {name.replace("past_", "present_") for name in buffers} | set(buffers)
        for specs, bind in (
            (inputs, self.io.bind_ortvalue_input),
            (outputs, self.io.bind_ortvalue_output),
        ):
            for spec in specs:
                if spec.name in ends:
                    continue
                where = HOST if spec.name in ON_HOST else memory
                tensor = where.tensor(spec.sized(rows, answers, probes), spec.dtype)
                self.tensors[spec.name] = tensor
                bind(spec.name, tensor.value)
        for name, buffer in buffers.items():
            self.io.bind_ortvalue_input(name, buffer)
            self.io.bind_ortvalue_output(name.replace("past_", "present_"), buffer)
        self.arrays = {name: tensor.array for name, tensor in self.tensors.items()}
        self._copies = None
        if memory.copies:
            self._copies = _Copies(self.tensors, {spec.name for spec in inputs})
        bias = self.arrays.get("attention_bias")
        self._bias = None if bias is None else bias[0, 0]
        self._hidden = slice(0)
        # Setting an item of a view costs a tenth of what a numpy call does.
        self.cursor = self.view("cursor")
        self.total_length = self.view("total_length")

    def view(self, name: str) -> memoryview:
        """The items of an array [n] or [1, n]."""
        array: Any = self.arrays[name]
        return memoryview(array.reshape(-1))

    def run(self, options: ort.RunOptions | None = None) -> float:
        """One pass; the seconds that it took, copies included."""
        start = time.perf_counter()
        if self._copies is not None:
            self._copies.upload()
        self.session.run_with_iobinding(self.io, options)
        if self._copies is not None:
            self._copies.download()
        return time.perf_counter() - start

    def _show(self, slots: slice, values: Floats | int) -> None:
        assert self._bias is not None
        self._bias[:, slots] = values
        if self._copies is not None:
            self._copies.changed.add("attention_bias")

    def show_all(self) -> None:
        """Let every row see all slots before it."""
        if self._bias is not None and self._hidden.stop:
            self._show(self._hidden, 0)
            self._hidden = slice(0)

    def show_only(self, seen: Seen, cursor: int, filled: int = 0) -> None:
        """Hide the draft's slots, from the cursor on, but for those that rows may see.

        The first `filled` of them were written by earlier passes.
        """
        self.show_all()
        self._hidden = slice(cursor, cursor + filled + len(seen))
        self._show(self._hidden, _visible(tuple(map(tuple, seen)), filled))


class _Copies:
    """What of a binding goes to the device before a pass, and comes back after it.

    `changed` are the steady inputs that the next pass must bring.
    """

    def __init__(self, tensors: Mapping[str, Tensor], inputs: set[str]) -> None:
        self._tensors = tensors
        self.changed = {name for name in STEADY if name in tensors}
        kinds: dict[str, list[Tensor]] = {"moving": [], "late": [], "at once": []}
        for name, tensor in tensors.items():
            if name in inputs and name not in (*ON_HOST, *STEADY):
                kinds["moving"].append(tensor)
            elif name not in inputs:
                kinds["late" if name in ON_REQUEST else "at once"].append(tensor)
        self._moving, self._late, self._at_once = kinds.values()

    def upload(self) -> None:
        for tensor in self._moving:
            tensor.upload()
        for name in self.changed:
            self._tensors[name].upload()
        self.changed.clear()

    def download(self) -> None:
        for tensor in self._at_once:
            tensor.download()
        for tensor in self._late:
            tensor.stale = True


@lru_cache(maxsize=256)
def _visible(seen: tuple[tuple[int, ...], ...], filled: int) -> Floats:
    """What is added to the scores of a draft's slots, [rows, filled + rows]."""
    block = np.full((len(seen), filled + len(seen)), HIDDEN, np.float32)
    for row, slots in enumerate(seen):
        block[row, [*slots, filled + row]] = 0
    return block
