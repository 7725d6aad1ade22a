"""One step graph, ready to run at any width without binding anything again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contract import StepContract, check_tensors
from jetdraft.runtime.binding import Bound, Floats
from jetdraft.runtime.cache import Cache
from jetdraft.runtime.ort import ort
from jetdraft.runtime.probes import NO_PROBES, Probes, Probing
from jetdraft.runtime.rows import Int64s, Rows, without_gaps


@dataclass(frozen=True)
class Answer:
    """What a pass says of m of its rows; views that the next pass overwrites.

    `candidates` int64 [m, K] best first, `candidate_logits` float32 [m, K],
    `logsumexp` float32 [m], `logits` float32 [m, vocab], `hidden` float32 [m, h] of
    graphs that give it. `streams` has, for each row
    that carried some, what its streams say of the tokens after the row's own.
    """

    candidates: Int64s
    candidate_logits: Floats
    logsumexp: Floats
    logits: Floats
    hidden: Floats | None = None
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
            None if self.hidden is None else self.hidden[which],
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
            chain = [list(range(row)) for row in range(width)]
            binding.show_only([*chain, *probes.seen(chain)], cursor)
        else:
            binding.show_all()
        answer = self._run(binding, cursor, width)
        return answer if last_only or width == rows else answer.first(rows)

    def verify(self, rows: Rows, width: int) -> tuple[Rows, Answer]:
        """Run a draft in a pass of that width: the rows that were run, and the answer.

        Here these are all rows.
        """
        if rows.is_chain:
            return rows, self.run(rows.tokens, width=width)
        rows.check()
        answer = self.run_branches(
            rows.tokens, rows.depths, rows.ancestors, width=width
        )
        return rows, answer

    def commit(self, path: Sequence[int], exact: bool) -> int:
        """Commit the rows of a path of the last pass; how many of them.

        An `exact` commit ends where the path leaves a gap in the buffer, any other
        moves what lies behind gaps.
        """
        if not exact:
            self.cache.compact(path)
            return len(path)
        proven = without_gaps(path)
        self.cache.advance(proven)
        return proven

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
        seen = [*ancestors, *[[]] * padding]
        binding.show_only([*seen, *probes.seen(seen)], cursor, filled)
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
        capacity = self.contract.capacity
        binding.cursor[0] = cursor
        binding.total_length[0] = capacity if self.contract.biased else cursor + width
        self.seconds += binding.run()
        self.passes += 1
        return binding.answer


class _Binding(Bound):
    """What a pass of one width binds, and its answer."""

    def __init__(self, graph: Graph, width: int, answers: int, probes: Probes) -> None:
        contract = graph.contract
        super().__init__(
            graph.session,
            contract.inputs,
            contract.outputs,
            graph.cache.buffers,
            width,
            answers,
            probes.total,
        )
        self.probes = probes
        self.input_ids = self.view("input_ids")
        self.position_ids = self.view("position_ids")
        self.arrays["answer_rows"][:] = np.arange(width - answers, width)
        if contract.streams:
            self.arrays["probe_rows"][:] = probes.rows
            self.arrays["probe_ids"][:] = probes.ids
        self.answer = answer_of(self.arrays, contract, probes)

    def fill(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set the rows' tokens and positions; the last token fills up the rest."""
        for row, position in enumerate(positions):
            self.input_ids[row] = tokens[row] if row < len(tokens) else tokens[-1]
            self.position_ids[row] = position


def answer_of(
    arrays: Mapping[str, npt.NDArray[Any]], contract: StepContract, probes: Probes
) -> Answer:
    """The answer that a binding's output arrays hold."""
    found = [arrays[spec.name][0] for spec in contract.answers]
    hidden = arrays["hidden"][0] if contract.hidden_size else None
    main, drafts = found[:4], found[-4:]
    streams = {}
    for index, row in enumerate(probes.carriers):
        own = slice(index * probes.streams, (index + 1) * probes.streams)
        streams[row] = Answer(*(array[own] for array in drafts))
    return Answer(main[0], main[1], main[2], main[3], hidden, streams)
