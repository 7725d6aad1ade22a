"""What sessions read and write in place: tensors, KV buffers, and an encoded source."""

import re
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.step_contract import SOURCE_LENGTH, StepContract
from jetdraft.contracts.tensors import WIDEST, Float32s, TensorSpec, check_tensors
from jetdraft.errors import ContractError
from jetdraft.native import OPERATORS
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import gapless_length

_WEBGPU_LOCK = RLock()  # Its sessions share a queue: two threads end the process.


def run_bound(
    session: ort.InferenceSession, io: ort.IOBinding, options: ort.RunOptions = None
) -> None:
    """Run a bound session; raises `ContractError` if jetdraft's operators refuse."""
    try:
        session.run_with_iobinding(io, options)
    except RuntimeError as error:
        if not re.search(rf"({'|'.join(OPERATORS)}) node\. ", str(error)):
            raise
        reason = str(error).partition("Status Message: ")[2]
        fact = f"a graph of the bundle cannot run ({reason})"
        fix = "export the bundle again with this version"
        raise ContractError(f"{fact}; {fix}") from error


@dataclass(eq=False)
class Tensor:
    """A fixed `value` to bind, and the `array` with the same content on the host.

    In the host's memory both are the same. Otherwise `upload` and `download` copy, and
    `fetch` downloads only if the array is `stale`, that is, older than the last pass.
    """

    array: npt.NDArray[Any]
    value: ort.OrtValue
    _memory: "Memory"
    stale: bool = False

    def upload(self) -> None:
        if self._memory.copies:
            with self._memory.exclusive_use():
                self.value.update_inplace(self.array)

    def download(self) -> None:
        if self._memory.copies:
            with self._memory.exclusive_use():
                np.copyto(self.array, self.value.numpy())
        self.stale = False

    def fetch(self) -> None:
        if self.stale:
            self.download()


@dataclass(frozen=True)
class Memory:
    """A `device`, "cpu", "cuda" or "webgpu", and whether a session `copies` from it."""

    device: str = "cpu"
    copies: bool = False
    on_host: tuple[str, ...] = ("total_length",)

    def tensor(
        self, shape: tuple[int, ...], dtype: str, whole: npt.NDArray[Any] | None = None
    ) -> Tensor:
        """A new tensor of zeros: a NaN would spread even from masked rows.

        On the host, a part of the array `whole`, its first rows, if it has as many.
        """
        array = np.zeros(shape, dtype)
        if whole is not None and not self.copies and shape[1] <= whole.shape[1]:
            array = whole[:, : shape[1]]
        if not self.copies:
            value = ort.OrtValue.ortvalue_from_numpy(array)
        else:
            with self.exclusive_use():
                given = shape, array.dtype.type, self.device, 0
                value = ort.OrtValue.ortvalue_from_shape_and_type(*given)
                if array.size:
                    value.update_inplace(array)
        return Tensor(array, value, self)

    def tensors(self, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """New tensors of zeros by name; their declared shapes are fixed."""
        return {spec.name: self.tensor(spec.shape_for(), spec.dtype) for spec in specs}

    def exclusive_use(self) -> AbstractContextManager[object]:
        """The lock to hold while a session or a copy uses this memory, if any."""
        return _WEBGPU_LOCK if self.device == "webgpu" else nullcontext()


HOST = Memory()  # The memory of the CPU provider; nothing is copied.
Arrays = dict[str, npt.NDArray[Any]]  # Rows or states by name.
KEPT = "kept_rows"  # The name of the number of rows that copied states lack.


class Cache:
    """Fixed buffers, allocated once, and a cursor; rows beyond `length` are stale.

    A `compaction` session, whose `seconds` are counted, moves the rows of an accepted
    branch together.

    Recurrent `states` have no rows to go back to. They lag behind: a pass keeps its
    rows beside them, and the next pass takes up the rows that were committed. A longer
    way back leads to 0, or to the one length whose states `mark` has copied.
    """

    def __init__(
        self,
        contract: StepContract,
        compaction: ort.InferenceSession | None = None,
        memory: Memory = HOST,
    ) -> None:
        self.capacity = contract.capacity
        # A biased pass over all slots is a first prompt to onnxruntime's attention,
        # which counts the positions of such a pass in place of reading them.
        self._widest = contract.slots - int(contract.has_bias)
        self.length, self.seconds, self.memory = 0, 0.0, memory
        tensors = memory.tensors(contract.buffers("past"))
        self.buffers = {name: tensor.value for name, tensor in tensors.items()}
        self._compaction = compaction
        self._moves: dict[int, _MoveBinding] = {}
        self._states = memory.tensors(contract.state_tensors("past"))
        self.states = {name: tensor.value for name, tensor in self._states.items()}
        # Rows and width of an uncommitted pass, and how many rows the states lack.
        self._last_pass, self._kept = (0, 0), 0
        # Whether the states may have rows of a wide or failed pass.
        self.is_ahead = self._was_ahead = False
        self._mark: tuple[int, Arrays] = 0, {}

    @property
    def room(self) -> int:
        """How many rows the next pass may have."""
        return min(self.capacity - self.length, self._widest)

    def advance(self, rows: int) -> None:
        """Commit the next `rows` rows; raises `ValueError` if they do not fit."""
        if not 0 <= rows <= self.room:
            raise ValueError(f"cannot commit {rows} rows, {self.room} fit")
        if self._states and rows:
            count, width = self._last_pass
            if rows > count or (rows < count and width > WIDEST):
                raise ValueError(f"cannot commit {rows} rows of a pass over {count}")
            # Without a call in between, Ctrl-C cannot separate these assignments.
            self._kept = 0 if width > WIDEST else rows
            self._last_pass, self.is_ahead = (0, 0), self._was_ahead
        self.length += rows

    def begin_pass(self, rows: int, width: int) -> tuple[int, int]:
        """Expect a pass that changes the states; return its `STATE_ROWS`."""
        kept, self._was_ahead = self._kept, self.is_ahead
        self.is_ahead, self._kept, self._last_pass = True, 0, (rows, width)
        return kept, rows

    def end_pass(self) -> None:
        """Note that the pass has run; a wide pass has put its rows into the states."""
        self.is_ahead = self._was_ahead or self._last_pass[1] > WIDEST

    def rewind(self, length: int) -> None:
        """Go back to `length` rows without a copy; `ValueError` if not `resumable`."""
        if not 0 <= length <= self.length or length != self.resumable(length):
            raise ValueError(f"cannot rewind from {self.length} rows to {length}")
        if length < self.length or self.is_ahead or not length:
            self.set_states(self._mark[1] if self._mark[0] == length else {})
        self.place(length)

    def place(self, length: int) -> None:
        """Let whatever the buffers and states hold count as `length` rows."""
        self.length = length
        if self._mark[0] > length:
            self._mark = 0, {}

    def resumable(self, length: int) -> int:
        """The most rows, up to `length`, that a sequence can continue from."""
        if not self._states or (length >= self.length and not self.is_ahead):
            return min(length, self.length)
        return self._mark[0] if self._mark[0] <= length else 0

    def mark(self) -> None:
        """Copy the states, if there are any, so that `rewind` can come back here."""
        self._mark = self.length, self.copy_states()

    def copy_states(self) -> Arrays:
        """Copies of the states by name; {} without states."""
        for tensor in self._states.values():
            tensor.download()
        return {name: array.copy() for name, array in self._state_arrays().items()}

    def _state_arrays(self) -> Arrays:
        arrays = {name: tensor.array for name, tensor in self._states.items()}
        return arrays and arrays | {KEPT: np.array(self._kept)}

    def set_states(self, stored: Arrays) -> None:
        """Write states that `copy_states` has copied; what is missing becomes zero."""
        self.is_ahead = True  # until all is written
        for name, tensor in self._states.items():
            np.copyto(tensor.array, stored.get(name, 0))
            tensor.upload()
        self._kept, self._last_pass = int(stored.get(KEPT, 0)), (0, 0)
        self.is_ahead = False

    def forms(self, rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """The shapes and types of what `copy_rows` gives."""
        kv = {name: buffer.numpy() for name, buffer in self.buffers.items()}
        shapes = {n: ((*a.shape[:2], rows, a.shape[3]), a.dtype) for n, a in kv.items()}
        states = self._state_arrays().items()
        return shapes | {n: (array.shape, array.dtype) for n, array in states}

    def copy_rows(self, rows: int) -> Arrays:
        """Copies of the first `rows` rows by buffer, [1, kv_heads, rows, head_dim].

        States are copied too; then `ValueError` is raised for less than all rows.
        """
        if self._states and rows != self.length:
            raise ValueError(f"states are of {self.length} rows, not of {rows}")
        with self.memory.exclusive_use():
            return self.copy_states() | {
                name: np.ascontiguousarray(buffer.numpy()[:, :, :rows])
                for name, buffer in self.buffers.items()
            }

    def restore(self, stored: Arrays, rows: int) -> None:
        """Write what `copy_rows` has copied, and commit `rows` rows."""
        with self.memory.exclusive_use():
            for name, buffer in self.buffers.items():
                whole = np.array(buffer.numpy())
                whole[:, :, :rows] = stored[name]
                buffer.update_inplace(whole)
        self.set_states(stored)
        self.length = rows
        self.mark()

    def commit(self, path: Sequence[int], ends_at_gap: bool = False) -> int:
        """Commit a path to its first gap, or moved together; returns how many rows."""
        kept = gapless_length(path)
        if kept < len(path) and not ends_at_gap:
            if self._compaction is None:
                raise ValueError("this cache has no compaction graph; give it one")
            if (rows := len(path) - kept) not in self._moves:
                self._moves[rows] = _MoveBinding(self._compaction, self, rows)
            move, source = self._moves[rows], [self.length + r for r in path[kept:]]
            with self.memory.exclusive_use():
                start = time.perf_counter()
                move.set(source, self.length + kept)
                self._compaction.run_with_iobinding(move.io)
                self.seconds += time.perf_counter() - start
            kept = len(path)
        self.advance(kept)
        return kept


class _MoveBinding:
    """The binding of the compaction session for moves of `rows` rows."""

    def __init__(self, session: ort.InferenceSession, cache: Cache, rows: int) -> None:
        self.source = cache.memory.tensor((rows,), "int64")
        places = 1 if session.get_inputs()[1].shape == [1] else rows
        self.target = cache.memory.tensor((places,), "int64")
        self.io = session.io_binding()
        self.io.bind_ortvalue_input("source", self.source.value)
        self.io.bind_ortvalue_input("target", self.target.value)
        for name, buffer in cache.buffers.items():
            self.io.bind_ortvalue_input(name, buffer)
            self.io.bind_ortvalue_output(name.replace("past_", "present_"), buffer)

    def set(self, source: list[int], target: int) -> None:
        """Set the rows to move, and their first new row; uploads both."""
        self.source.array[:] = source
        self.target.array[:] = range(target, target + len(self.target.array))
        self.source.upload()
        self.target.upload()


SourceInput = Sequence[int] | Float32s  # Token ids, or [bins, frames] of a sound.


def source_tokens(material: SourceInput) -> list[int]:
    """The token ids that an encoder reads; empty for a sound."""
    return [] if np.ndim(material) > 1 else [int(token) for token in material]


class SourceBuffers:
    """The cross buffers of a decoder; an encoder writes them in place, in `seconds`."""

    def __init__(
        self, session: ort.InferenceSession, contract: StepContract, memory: Memory
    ) -> None:
        self._input = contract.encoder_input
        check_tensors((self._input,), session.get_inputs(), "the encoder's inputs")
        outputs = session.get_outputs()
        check_tensors(contract.cross_inputs, outputs, "the encoder's outputs")
        self.slots = contract.source_slots
        self.tokens: list[int] = []
        self.seconds = 0.0
        self._material: npt.NDArray[Any] = np.zeros(0)
        self._session, self._memory = session, memory
        self._buffers = memory.tensors(contract.cross_inputs)
        # Passes that are compared before any source is read must differ.
        for seed, tensor in enumerate(self._buffers.values()):
            random = np.random.default_rng(seed)
            tensor.array[:] = random.standard_normal(tensor.array.shape, np.float32)
            tensor.upload()
        self._length = memory.tensor(SOURCE_LENGTH.shape_for(), SOURCE_LENGTH.dtype)
        self._set_length(self.slots)

    @property
    def values(self) -> dict[str, ort.OrtValue]:
        """The values to bind, by the names of the decoder's inputs."""
        tensors = {**self._buffers, SOURCE_LENGTH.name: self._length}
        return {name: tensor.value for name, tensor in tensors.items()}

    def encode(self, material: SourceInput) -> bool:
        """Encode a source in place; False if the buffers held it already."""
        array = np.asarray(material, self._input.dtype)
        if np.array_equal(array, self._material):
            return False
        self._material, self.tokens = np.zeros(0), []
        with self._memory.exclusive_use():
            start = time.perf_counter()
            io = self._session.io_binding()
            io.bind_cpu_input(self._input.name, array[None])
            for name, tensor in self._buffers.items():
                io.bind_ortvalue_output(name, tensor.value)
            run_bound(self._session, io)
            self.seconds += time.perf_counter() - start
        self._material, self.tokens = array, source_tokens(material)
        # A sound fills all slots.
        self._set_length(len(self.tokens) or self.slots)
        return True

    def _set_length(self, length: int) -> None:
        self._length.array[0] = length
        self._length.upload()
