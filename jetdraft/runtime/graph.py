"""One step graph, ready to run at any width without binding anything again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jetdraft.contract import HIDDEN, StepContract, check_tensors
from jetdraft.runtime.cache import Cache
from jetdraft.runtime.ort import ort
from jetdraft.runtime.rows import Int64s

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Answer:
    """What a pass says of m of its rows; views that the next pass overwrites.

    `candidates` int64 [m, K] best first, `candidate_logits` float32 [m, K],
    `logsumexp` float32 [m], `logits` float32 [m, vocab].
    """

    candidates: Int64s
    candidate_logits: Floats
    logsumexp: Floats
    logits: Floats
    _parts: dict[int, Answer] = field(default_factory=dict, repr=False)

    def first(self, rows: int) -> Answer:
        """Its first rows, sliced once however often they are asked for."""
        if rows not in self._parts:
            self._parts[rows] = self.rows(slice(0, rows))
        return self._parts[rows]

    def rows(self, which: slice) -> Answer:
        """A part of the rows."""
        return Answer(
            self.candidates[which],
            self.candidate_logits[which],
            self.logsumexp[which],
            self.logits[which],
        )


class Graph:
    """A session over one `Cache`, with one binding per width made when first used.

    `seconds` adds up the time inside `session.run`, `passes` counts runs.

        graph = Graph(session, contract)
        answer = graph.run([5, 8])      # rows 0 and 1 of an empty cache
        graph.cache.advance(2)
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: StepContract,
        compaction: ort.InferenceSession | None = None,
    ) -> None:
        check_tensors(contract.inputs, session.get_inputs(), "the graph's inputs")
        check_tensors(contract.outputs, session.get_outputs(), "the graph's outputs")
        self.session = session
        self.contract = contract
        self.cache = Cache(contract, compaction)
        self.seconds = 0.0
        self.passes = 0
        self._cursor = np.zeros(1, np.int32)
        self._total = np.zeros(1, np.int32)
        self._bindings: dict[tuple[int, int], _Binding] = {}

    def run(self, tokens: Sequence[int], last_only: bool = False) -> Answer:
        """Run one pass over a chain of n `tokens` at the cache's cursor.

        It answers for all rows, or for the last one only, which spares a prefill the
        LM head of the others. The cursor does not move: whoever knows which rows count
        calls `cache.advance`.
        """
        width, cursor = len(tokens), self.cache.length
        binding = self._binding(width, 1 if last_only else width, self.cache.room)
        binding.fill(tokens, range(cursor, cursor + width))
        binding.show_all()
        return self._run(binding, cursor, width)

    def run_branches(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        ancestors: Sequence[Sequence[int]],
        filled: int = 0,
    ) -> Answer:
        """Run rows of a branching draft, for a tree graph; it answers for all.

        The draft takes slots from the cursor on, `filled` of which earlier passes have
        written. Row i sits `depths[i]` places past the cursor and sees the committed
        rows, the draft's slots `ancestors[i]` and itself.
        """
        width, cursor = len(tokens), self.cache.length
        binding = self._binding(width, width, self.cache.room - filled)
        binding.fill(tokens, [cursor + depth for depth in depths])
        binding.show_only(ancestors, cursor, filled)
        return self._run(binding, cursor + filled, width)

    def _binding(self, width: int, answers: int, room: int) -> _Binding:
        if not 1 <= width <= min(self.contract.max_width, room):
            raise ValueError(
                f"a pass of {width} rows does not fit: {room} rows of room, "
                f"{self.contract.max_width} at most"
            )
        return self._bindings.get((width, answers)) or self._bind(width, answers)

    def _run(self, binding: _Binding, cursor: int, width: int) -> Answer:
        self._cursor[0] = cursor
        self._total[0] = (
            self.contract.capacity if self.contract.tree else cursor + width
        )
        start = time.perf_counter()
        self.session.run_with_iobinding(binding.io)
        self.seconds += time.perf_counter() - start
        self.passes += 1
        return binding.answer

    def _bind(self, width: int, answers: int) -> _Binding:
        binding = _Binding(self, width, answers)
        self._bindings[width, answers] = binding
        return binding

    def feeds(self, width: int, answers: int) -> dict[str, npt.NDArray[np.generic]]:
        """Fresh input arrays for a binding; the cursor's arrays are shared."""
        feeds: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": np.zeros((1, width), np.int64),
            "position_ids": np.zeros((1, width), np.int64),
            "cursor": self._cursor,
            "total_length": self._total,
            "answer_rows": np.arange(width - answers, width, dtype=np.int64),
        }
        if self.contract.tree:
            bias = self.contract.bias
            feeds[bias.name] = np.zeros(bias.sized(width), bias.dtype)
        return feeds


class _Binding:
    """Inputs, outputs and buffers of one width, bound once."""

    def __init__(self, graph: Graph, width: int, answers: int) -> None:
        feeds = graph.feeds(width, answers)
        # Setting an item of a view costs a tenth of what a numpy call does.
        self.input_ids = memoryview(feeds["input_ids"][0])
        self.position_ids = memoryview(feeds["position_ids"][0])
        bias = feeds.get("attention_bias")
        self.bias = None if bias is None else bias[0, 0]
        self.hidden = slice(0)
        outputs = {
            spec.name: np.zeros(spec.sized(width, answers), spec.dtype)
            for spec in graph.contract.answers
        }
        self.io = graph.session.io_binding()
        # The OrtValues alias the arrays; the binding keeps both alive.
        self.kept = {
            name: ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in (feeds | outputs).items()
        }
        for name in feeds:
            self.io.bind_ortvalue_input(name, self.kept[name])
        for name in outputs:
            self.io.bind_ortvalue_output(name, self.kept[name])
        for name, buffer in graph.cache.buffers.items():
            self.io.bind_ortvalue_input(name, buffer)
            self.io.bind_ortvalue_output(name.replace("past_", "present_"), buffer)
        self.answer = Answer(*(array[0] for array in outputs.values()))

    def fill(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set the rows' tokens and positions."""
        for row, token in enumerate(tokens):
            self.input_ids[row] = token
            self.position_ids[row] = positions[row]

    def show_all(self) -> None:
        """Let every row see all slots before it."""
        if self.bias is not None and self.hidden.stop:
            self.bias[:, self.hidden] = 0
            self.hidden = slice(0)

    def show_only(
        self, ancestors: Sequence[Sequence[int]], cursor: int, filled: int
    ) -> None:
        """Hide the draft's slots from rows that do not descend from them."""
        if self.bias is None:
            raise ValueError("a chain graph cannot run branches; use a tree graph")
        self.show_all()
        self.hidden = slice(cursor, cursor + filled + len(ancestors))
        block = self.bias[:, self.hidden]
        block[:] = HIDDEN
        for row, seen in enumerate(ancestors):
            block[row, [*seen, filled + row]] = 0
