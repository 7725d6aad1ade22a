"""What sessions read and write in place: tensors, KV buffers, and an encoded source."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.step_contract import SOURCE_LENGTH, STATE_ROWS, StepContract
from jetdraft.contracts.tensors import Float32s, TensorSpec, check_tensors
from jetdraft.errors import ContractError
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import gapless_length

_WEBGPU_LOCK = RLock()
"""WebGPU's sessions share one queue: two threads in it end the process."""


def run_bound(
    session: ort.InferenceSession, io: ort.IOBinding, options: ort.RunOptions = None
) -> None:
    """Run a bound session; raises `ContractError` if jetdraft's operators refuse."""
    try:
        session.run_with_iobinding(io, options)
    except RuntimeError as error:
        _, node, reason = str(error).partition("Packed node. ")
        if not node:
            raise
        reason = reason.partition("Status Message: ")[2]
        raise ContractError(
            f"a graph of the bundle cannot run ({reason}); export the bundle again "
            "with this version"
        ) from error


class Tensor:
    """A fixed `value` to bind, and the `array` with the same content on the host.

    In the host's memory both are the same. Otherwise `upload` and `download` copy, and
    `fetch` downloads only if the array is `stale`, that is, older than the last pass.
    """

    def __init__(
        self, array: npt.NDArray[Any], value: ort.OrtValue, memory: Memory
    ) -> None:
        self.array = array
        self.value = value
        self.stale = False
        self._memory = memory

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
    """The `device` that tensors are allocated on, "cpu", "cuda" or "webgpu".

    `copies` says that host and session do not share it; tests set it without a GPU.
    """

    device: str = "cpu"
    copies: bool = False
    on_host: tuple[str, ...] = ("total_length",)

    def tensor(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A new tensor of zeros: a NaN would spread even from masked rows."""
        array = np.zeros(shape, dtype)
        if not self.copies:
            value = ort.OrtValue.ortvalue_from_numpy(array)
        else:
            with self.exclusive_use():
                value = ort.OrtValue.ortvalue_from_shape_and_type(
                    shape, np.dtype(dtype).type, self.device, 0
                )
                if array.size:
                    value.update_inplace(array)
        return Tensor(array, value, self)

    def tensors(self, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """New tensors of zeros by name; their declared shapes are fixed."""
        return {spec.name: self.tensor(spec.shape_for(), spec.dtype) for spec in specs}

    def exclusive_use(self) -> AbstractContextManager[object]:
        """The lock to hold while a session or a copy uses this memory, if any."""
        return _WEBGPU_LOCK if self.device == "webgpu" else nullcontext()


HOST = Memory()
"""The memory of the CPU provider; nothing is copied."""


class Cache:
    """Fixed buffers, allocated once, and a cursor; rows beyond `length` are stale.

    A `compaction` session moves the rows of an accepted branch together, in `seconds`.
    `replay_seconds` is the part of it that states took.

    Recurrent states have no rows to go back to. A pass reads them in one place and
    writes them in another, so the states before it are still there: to commit a part of
    its rows, the compaction session goes over these rows again. A longer way back leads
    to 0, or to the one length whose states `keep` has copied.
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
        self.length = 0
        self.seconds = self.replay_seconds = 0.0
        self.memory = memory
        tensors = memory.tensors(contract.buffers("past"))
        self.buffers = {name: tensor.value for name, tensor in tensors.items()}
        self._compaction = compaction
        self._moves: dict[int, _MoveBinding] = {}
        # `turn` says which of both places the next pass reads.
        places = [memory.tensors(contract.states("past")) for _ in range(2)]
        self._states, self.turn = places if places[0] else [], 0
        self._kept: tuple[int, dict[str, npt.NDArray[Any]]] = 0, {}
        self._last_pass: tuple[int, Mapping[str, Tensor]] | None = None
        self._replays: dict[tuple[int, int], _ReplayBinding] = {}

    @property
    def room(self) -> int:
        """How many rows the next pass may have."""
        return min(self.capacity - self.length, self._widest)

    def advance(self, rows: int) -> None:
        """Commit the next `rows` rows; raises `ValueError` if they do not fit."""
        if not 0 <= rows <= self.room:
            raise ValueError(f"cannot commit {rows} rows, {self.room} fit")
        if self._states and rows:
            self._advance_states(rows)
        self.length += rows

    def rewind(self, length: int) -> None:
        """Go back to `length` committed rows, without a copy of rows.

        Raises `ValueError` for a length that is not `resumable`.
        """
        if not 0 <= length <= self.length or length != self.resumable(length):
            raise ValueError(f"cannot rewind from {self.length} rows to {length}")
        if self._states and length < self.length:
            at, kept = self._kept
            self.set_states(kept if at == length else {})
        self.place(length)

    def place(self, length: int) -> None:
        """Let whatever the buffers and states hold count as `length` rows."""
        self.length = length
        if self._kept[0] > length:
            self._kept = 0, {}

    def resumable(self, length: int) -> int:
        """The most rows, up to `length`, that a sequence can go on from."""
        if not self._states or length >= self.length:
            return min(length, self.length)
        return self._kept[0] if self._kept[0] <= length else 0

    def keep(self) -> None:
        """Copy the states, if there are any, so that `rewind` can come back here."""
        if self._states:
            self._kept = self.length, self.copy_states()

    def states(self, turn: int) -> dict[str, ort.OrtValue]:
        """The values that a pass of that turn reads and writes, by name; or {}."""
        if not self._states:
            return {}
        past, present = self._states[turn], self._states[1 - turn]
        named = {n.replace("past_", "present_"): t.value for n, t in present.items()}
        return {name: tensor.value for name, tensor in past.items()} | named

    @property
    def turns(self) -> int:
        """How many bindings a pass needs, since states change their places."""
        return len(self._states) or 1

    def passed(self, rows: int, tensors: Mapping[str, Tensor]) -> None:
        """Record a pass of `rows` rows without padding, and what it kept of them."""
        self._last_pass = rows, tensors

    def _advance_states(self, rows: int) -> None:
        """Let the states go over the first `rows` rows of the last pass."""
        if self._last_pass is None or rows > self._last_pass[0]:
            raise ValueError(f"no pass has run the {rows} rows to commit")
        count, tensors = self._last_pass
        if rows < count:
            assert self._compaction is not None
            key = id(tensors), self.turn
            if key not in self._replays:
                self._replays[key] = _ReplayBinding(self._compaction, self, tensors)
            with self.memory.exclusive_use():
                start = time.perf_counter()
                self._replays[key].run(rows)
                spent = time.perf_counter() - start
            self.seconds += spent
            self.replay_seconds += spent
        self.turn, self._last_pass = 1 - self.turn, None

    def copy_states(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of the states by name; {} without states."""
        now = self._states[self.turn] if self._states else {}
        for tensor in now.values():
            tensor.download()
        return {name: tensor.array.copy() for name, tensor in now.items()}

    def set_states(self, stored: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write states that `copy_states` has copied; what is missing becomes zero."""
        for name, tensor in self._states[self.turn].items() if self._states else ():
            np.copyto(tensor.array, stored.get(name, 0))
            tensor.upload()
        self._last_pass = None

    def forms(self, rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """The shapes and types of what `copy_rows` gives."""
        shapes = {
            name: ((*buffer.shape()[:2], rows, buffer.shape()[3]), buffer.numpy().dtype)
            for name, buffer in self.buffers.items()
        }
        states = self._states[0] if self._states else {}
        return shapes | {n: (t.array.shape, t.array.dtype) for n, t in states.items()}

    def copy_rows(self, rows: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the first `rows` rows by buffer, [1, kv_heads, rows, head_dim].

        With them the states after these rows, which must be `resumable`.
        """
        states = self.copy_states() if rows == self.length else self._kept[1]
        with self.memory.exclusive_use():
            return states | {
                name: np.ascontiguousarray(buffer.numpy()[:, :, :rows])
                for name, buffer in self.buffers.items()
            }

    def restore(self, stored: Mapping[str, npt.NDArray[Any]], rows: int) -> None:
        """Write the rows that `copy_rows` has copied, and commit `rows` rows."""
        with self.memory.exclusive_use():
            for name, buffer in self.buffers.items():
                whole = np.array(buffer.numpy())
                whole[:, :, :rows] = stored[name]
                buffer.update_inplace(whole)
        self.set_states(stored)
        self._kept = 0, {}
        self.length = rows
        self.keep()

    def compact(self, path: Sequence[int]) -> None:
        """Commit the rows `path` of the last pass, and close its gaps in place."""
        kept = gapless_length(path)
        if kept < len(path):
            self._move_rows([self.length + r for r in path[kept:]], self.length + kept)
        self.advance(len(path))

    def _move_rows(self, source: list[int], target: int) -> None:
        """Move the rows `source` to the rows from `target` on, in place."""
        if self._compaction is None:
            raise ValueError("this cache has no compaction graph; give it one")
        move = self._moves.get(len(source))
        if move is None:
            move = _MoveBinding(self._compaction, self, len(source))
            self._moves[len(source)] = move
        with self.memory.exclusive_use():
            start = time.perf_counter()
            move.set(source, target)
            self._compaction.run_with_iobinding(move.io)
            self.seconds += time.perf_counter() - start


class _ReplayBinding:
    """The binding of the session that goes over rows again, after a pass of one kind.

    `tensors` are the pass's, by name.
    """

    def __init__(
        self, session: ort.InferenceSession, cache: Cache, tensors: Mapping[str, Tensor]
    ) -> None:
        self._session, self._tensors = session, tensors  # which must stay alive
        self._rows = cache.memory.tensor(STATE_ROWS.shape_for(), STATE_ROWS.dtype)
        self._io = session.io_binding()
        states = cache.states(cache.turn)
        for value in session.get_inputs():
            if value.name == STATE_ROWS.name:
                self._io.bind_ortvalue_input(value.name, self._rows.value)
            else:
                kept = tensors.get(value.name)
                bound = states[value.name] if kept is None else kept.value
                self._io.bind_ortvalue_input(value.name, bound)
        for value in session.get_outputs():
            self._io.bind_ortvalue_output(value.name, states[value.name])

    def run(self, rows: int) -> None:
        """Write the states after `rows` rows."""
        self._rows.array[0] = rows
        self._rows.upload()
        run_bound(self._session, self._io)


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


SourceInput = Sequence[int] | Float32s
"""What an encoder reads: token ids, or a sound's features float32 [bins, frames]."""


def source_tokens(material: SourceInput) -> list[int]:
    """The token ids that an encoder reads; empty for a sound."""
    return [] if np.ndim(material) > 1 else [int(token) for token in material]


class SourceBuffers:
    """The cross buffers of a decoder; an encoder writes them in place, in `seconds`."""

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: StepContract,
        memory: Memory = HOST,
    ) -> None:
        self._input = contract.encoder_input
        check_tensors((self._input,), session.get_inputs(), "the encoder's inputs")
        check_tensors(
            contract.cross_inputs, session.get_outputs(), "the encoder's outputs"
        )
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
        # For the case that the pass fails.
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
        """Set how many slots the decoder reads."""
        self._length.array[0] = length
        self._length.upload()
