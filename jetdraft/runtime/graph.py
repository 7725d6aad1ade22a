"""One step graph, ready to run at any width without binding anything again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from jetdraft.contract import HIDDEN, StepContract, check_tensors
from jetdraft.runtime.cache import Cache
from jetdraft.runtime.ort import ort
from jetdraft.runtime.probes import NO_PROBES, Probes, Probing
from jetdraft.runtime.rows import Int64s

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Answer:
    """What a pass says of m of its rows; views that the next pass overwrites.

    `candidates` int64 [m, K] best first, `candidate_logits` float32 [m, K],
    `logsumexp` float32 [m], `logits` float32 [m, vocab]. `streams` has, for each row
    that carried some, what its streams say of the tokens after the row's own.
    """

    candidates: Int64s
    candidate_logits: Floats
    logsumexp: Floats
    logits: Floats
    streams: Mapping[int, Answer] = field(default_factory=dict, repr=False)
    _parts: dict[int, Answer] = field(default_factory=dict, repr=False)

    @property
    def probes(self) -> int:
        """How many probes the pass had."""
        return sum(len(said.candidates) for said in self.streams.values())

    def first(self, rows: int) -> Answer:
        """Its first rows, sliced once however often they are asked for."""
        if rows not in self._parts:
            part = self.rows(slice(0, rows))
            self._parts[rows] = replace(part, streams=self.streams)
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

    `seconds` adds up the time inside `session.run`, `passes` counts runs, and `probing`
    says which rows of coming passes carry streams, in a graph that has them.

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
        self.probing = Probing()
        self._bindings: dict[tuple[int, int, Probes], _Binding] = {}

    def run(
        self, tokens: Sequence[int], last_only: bool = False, width: int = 0
    ) -> Answer:
        """Run one pass over a chain of n `tokens` at the cache's cursor.

        It answers for all rows, or for the last one only, which spares a prefill the
        LM head of the others. Rows that only fill up a `width` repeat the last token.
        The cursor does not move: whoever knows which rows count calls `cache.advance`.
        """
        rows, cursor, room = len(tokens), self.cache.length, self.cache.room
        width = max(width, rows)
        probes = NO_PROBES if last_only else self._probes(rows, room - width)
        binding = self._binding(width, 1 if last_only else width, probes, room)
        binding.fill(tokens, range(cursor, cursor + width))
        if probes.total:
            binding.show_only([list(range(row)) for row in range(width)], cursor)
        else:
            binding.show_all()
        answer = self._run(binding, cursor, width)
        return answer if last_only or width == rows else answer.first(rows)

    def run_branches(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        ancestors: Sequence[Sequence[int]],
        filled: int = 0,
        width: int = 0,
    ) -> Answer:
        """Run rows of a branching draft, for a tree graph; it answers for all.

        The draft takes slots from the cursor on, `filled` of which earlier passes have
        written. Row i sits `depths[i]` places past the cursor and sees the committed
        rows, the draft's slots `ancestors[i]` and itself.
        """
        if not self.contract.tree:
            raise ValueError("a chain graph cannot run branches; use a tree graph")
        rows, cursor, room = len(tokens), self.cache.length, self.cache.room - filled
        width = max(width, rows)
        probes = self._probes(rows, room - width)
        binding = self._binding(width, width, probes, room)
        padding = width - rows
        binding.fill(tokens, [cursor + depth for depth in (*depths, *[0] * padding)])
        binding.show_only([*ancestors, *[[]] * padding], cursor, filled)
        answer = self._run(binding, cursor + filled, width)
        return answer if width == rows else answer.first(rows)

    def _probes(self, rows: int, room: int) -> Probes:
        """Those of the coming pass; their rows must fit into the buffers too."""
        probes = self.probing.of(rows)
        return probes if probes.total <= room else NO_PROBES

    def _binding(self, width: int, answers: int, probes: Probes, room: int) -> _Binding:
        if not 1 <= width <= min(self.contract.max_width, room):
            raise ValueError(
                f"a pass of {width} rows does not fit: {room} rows of room, "
                f"{self.contract.max_width} at most"
            )
        key = (width, answers, probes)
        if key not in self._bindings:
            self._bindings[key] = _Binding(self, *key)
        return self._bindings[key]

    def _run(self, binding: _Binding, cursor: int, width: int) -> Answer:
        self._cursor[0] = cursor
        self._total[0] = (
            self.contract.capacity if self.contract.biased else cursor + width
        )
        start = time.perf_counter()
        self.session.run_with_iobinding(binding.io)
        self.seconds += time.perf_counter() - start
        self.passes += 1
        return binding.answer

    def feeds(
        self, width: int, answers: int, probes: Probes
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Fresh input arrays for a binding; the cursor's arrays are shared."""
        feeds: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": np.zeros((1, width), np.int64),
            "position_ids": np.zeros((1, width), np.int64),
            "cursor": self._cursor,
            "total_length": self._total,
            "answer_rows": np.arange(width - answers, width, dtype=np.int64),
        }
        if self.contract.biased:
            bias = self.contract.bias
            shape = bias.sized(width, probes=probes.total)
            feeds[bias.name] = np.zeros(shape, bias.dtype)
        if self.contract.streams:
            feeds["probe_rows"] = np.array(probes.rows, np.int64)
            feeds["probe_ids"] = np.array(probes.ids, np.int64)
        return feeds


class _Binding:
    """Inputs, outputs and buffers of one width, bound once."""

    def __init__(self, graph: Graph, width: int, answers: int, probes: Probes) -> None:
        feeds = graph.feeds(width, answers, probes)
        self.probes = probes
        # Setting an item of a view costs a tenth of what a numpy call does.
        self.input_ids = memoryview(feeds["input_ids"][0])
        self.position_ids = memoryview(feeds["position_ids"][0])
        bias = feeds.get("attention_bias")
        self.bias = None if bias is None else bias[0, 0]
        self.hidden = slice(0)
        outputs = {
            spec.name: np.zeros(spec.sized(width, answers, probes.total), spec.dtype)
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
        found = [array[0] for array in outputs.values()]
        drafts = Answer(*found[4:]) if probes.total else None
        self.answer = Answer(
            candidates=found[0],
            candidate_logits=found[1],
            logsumexp=found[2],
            logits=found[3],
            streams={
                row: drafts.rows(slice(i * probes.streams, (i + 1) * probes.streams))
                for i, row in enumerate(probes.carriers)
                if drafts is not None
            },
        )

    def fill(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set the rows' tokens and positions; the last token fills up the rest."""
        for row, position in enumerate(positions):
            self.input_ids[row] = tokens[row] if row < len(tokens) else tokens[-1]
            self.position_ids[row] = position

    def show_all(self) -> None:
        """Let every row see all slots before it."""
        if self.bias is not None and self.hidden.stop:
            self.bias[:, self.hidden] = 0
            self.hidden = slice(0)

    def show_only(
        self, ancestors: Sequence[Sequence[int]], cursor: int, filled: int = 0
    ) -> None:
        """Hide the draft's slots from rows that do not descend from them.

        A probe only sees its carrier, the carrier's ancestors and its own kin.
        """
        assert self.bias is not None
        self.show_all()
        seen = (*map(tuple, ancestors), *map(tuple, self.probes.seen(ancestors)))
        self.hidden = slice(cursor, cursor + filled + len(seen))
        self.bias[:, self.hidden] = _visible(seen, filled)


@lru_cache(maxsize=256)
def _visible(seen: tuple[tuple[int, ...], ...], filled: int) -> Floats:
    """What is added to the scores of a draft's slots, [rows, filled + rows]."""
    block = np.full((len(seen), filled + len(seen)), HIDDEN, np.float32)
    for row, slots in enumerate(seen):
        block[row, [*slots, filled + row]] = 0
    return block
