"""A session's inputs, outputs and KV buffers, bound once for passes of one size."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contract import HIDDEN, TensorSpec
from jetdraft.runtime.ort import ort

Floats = npt.NDArray[np.float32]
Seen = Sequence[Sequence[int]]
"""Per row, the slots of a draft that it sees beside itself."""


class Bound:
    """Arrays that a pass reads and fills; all sizes are fixed.

    `arrays` holds the inputs and outputs by name, `seconds` the time of all passes.

        bound = Bound(session, inputs, outputs, buffers, rows=4, answers=4, probes=0)
        bound.arrays["input_ids"][0] = [5, 8, 9, 2]
        bound.run()
        bound.arrays["logits"]
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
    ) -> None:
        self.session = session
        self.io = session.io_binding()
        presents = {name.replace("past_", "present_") for name in buffers}
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        # The OrtValues alias the arrays; both must stay alive.
        self._kept: dict[str, ort.OrtValue] = {}
        for specs, bind in (
            (inputs, self.io.bind_ortvalue_input),
            (outputs, self.io.bind_ortvalue_output),
        ):
            for spec in specs:
                if spec.name in buffers or spec.name in presents:
                    continue
                array = np.zeros(spec.sized(rows, answers, probes), spec.dtype)
                self.arrays[spec.name] = array
                self._kept[spec.name] = ort.OrtValue.ortvalue_from_numpy(array)
                bind(spec.name, self._kept[spec.name])
        for name, buffer in buffers.items():
            self.io.bind_ortvalue_input(name, buffer)
            self.io.bind_ortvalue_output(name.replace("past_", "present_"), buffer)
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

    def run(self) -> float:
        """One pass; the seconds that it took."""
        start = time.perf_counter()
        self.session.run_with_iobinding(self.io)
        return time.perf_counter() - start

    def show_all(self) -> None:
        """Let every row see all slots before it."""
        if self._bias is not None and self._hidden.stop:
            self._bias[:, self._hidden] = 0
            self._hidden = slice(0)

    def show_only(self, seen: Seen, cursor: int, filled: int = 0) -> None:
        """Hide the draft's slots, from the cursor on, but for those that rows may see.

        The first `filled` of them were written by earlier passes.
        """
        assert self._bias is not None
        self.show_all()
        self._hidden = slice(cursor, cursor + filled + len(seen))
        self._bias[:, self._hidden] = _visible(tuple(map(tuple, seen)), filled)


@lru_cache(maxsize=256)
def _visible(seen: tuple[tuple[int, ...], ...], filled: int) -> Floats:
    """What is added to the scores of a draft's slots, [rows, filled + rows]."""
    block = np.full((len(seen), filled + len(seen)), HIDDEN, np.float32)
    for row, slots in enumerate(seen):
        block[row, [*slots, filled + row]] = 0
    return block
