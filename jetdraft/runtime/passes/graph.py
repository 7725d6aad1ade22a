"""One step graph, ready to run at any width without binding anything again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jetdraft.contract import WIDEST, StepContract
from jetdraft.ort import ort
from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.drafts.probes import NO_PROBES, Probes, Probing
from jetdraft.runtime.drafts.rows import Rows, without_gaps
from jetdraft.runtime.passes.binding import Bound
from jetdraft.runtime.passes.cache import Cache
from jetdraft.runtime.passes.captures import Captures
from jetdraft.runtime.passes.step_sessions import StepSession, StepSessions
from jetdraft.runtime.passes.tensor import HOST, Memory, Tensor

SHORTEST = 256
"""The least `total_length` of captured graphs."""


@dataclass(frozen=True)
class Answer:
    """What a pass says of m of its rows; views that the next pass overwrites.

    `candidates` int64 [m, K] best first, `candidate_logits` float32 [m, K],
    `logsumexp` float32 [m], `logits` float32 [m, vocab], `hidden` float32 [m, h] of
    graphs that give it. `streams` has, for each row that carried some, what its streams
    say of the tokens after the row's own. The logits come from the device when they are
    first looked at.
    """

    candidates: Int64s
    candidate_logits: Float32s
    logsumexp: Float32s
    _logits: Float32s
    hidden: Float32s | None = None
    streams: Mapping[int, Answer] = field(default_factory=dict, repr=False)
    _parts: dict[int, Answer] = field(default_factory=dict, repr=False)
    _source: Tensor | None = field(default=None, repr=False)

    @property
    def logits(self) -> Float32s:
        """All logits of the rows."""
        if self._source is not None:
            self._source.fetch()
        return self._logits

    @property
    def vocab_size(self) -> int:
        """How many tokens there are to choose from."""
        return int(self._logits.shape[1])

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
            self._logits[which],
            None if self.hidden is None else self.hidden[which],
            _source=self._source,
        )


class Graph:
    """Sessions over one `Cache`, with one binding per width made when first used.

    `seconds` adds up the time inside `session.run`, `passes` counts runs, and `probing`
    says which rows of coming passes carry streams, in a graph that has them. With
    `lengths`, ascending up to the capacity, `total_length` is the least that holds a
    pass; without, it is counted. Without `captures` no CUDA graph is captured.

        graph = Graph(StepSessions(session, contract))
        answer = graph.run([5, 8])      # rows 0 and 1 of an empty cache
        graph.cache.advance(2)
    """

    def __init__(
        self,
        engines: StepSessions,
        compaction: ort.InferenceSession | None = None,
        memory: Memory = HOST,
        captures: Captures | None = None,
    ) -> None:
        self.engines = engines
        self.contract = engines.any.contract
        self.memory = memory
        self.captures = captures
        self.lengths: Sequence[int] = ()
        self.prepare(exact=True)
        self.cache = Cache(self.contract, compaction, memory)
        self.seconds = 0.0
        self.passes = 0
        self.probing = Probing()
        self._bindings: dict[_Size, _Binding] = {}

    def prepare(self, exact: bool) -> None:
        """Get ready for generations that are exact, or need not be.

        A captured graph keeps its `total_length`, so there are few. Kernels split their
        work by it and round accordingly: exact ones know a single one.
        """
        if self.captures is not None:
            most = self.contract.capacity
            self.lengths = [most] if exact else _lengths(most)

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
        last_only = last_only and rows > 1
        if not last_only:
            width = self.engines.width(width, room)
        probes = NO_PROBES if last_only else self._probes(rows, room - width)
        size = _Size(width, 1 if last_only else width, probes, branching=False)
        binding = self._binding(size, room)
        binding.fill(tokens, range(cursor, cursor + width))
        if probes.total:
            chain = [list(range(row)) for row in range(width)]
            binding.show_only([*chain, *probes.seen(chain)], cursor)
        else:
            binding.show_all()
        answer = self._run(binding, cursor)
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
        width = self.engines.width(max(width, rows), room)
        probes = self._probes(rows, room - width)
        binding = self._binding(_Size(width, width, probes, branching=True), room)
        padding = width - rows
        binding.fill(tokens, [cursor + depth for depth in (*depths, *[0] * padding)])
        seen = [*ancestors, *[[]] * padding]
        binding.show_only([*seen, *probes.seen(seen)], cursor, filled)
        answer = self._run(binding, cursor + filled)
        return answer if width == rows else answer.first(rows)

    def _probes(self, rows: int, room: int) -> Probes:
        """Those of the coming pass; their rows must fit into the buffers too."""
        probes = self.probing.of(rows)
        return probes if probes.total <= room else NO_PROBES

    def _binding(self, size: _Size, room: int) -> _Binding:
        if not 1 <= size.width <= min(self.contract.max_width, room):
            raise ValueError(
                f"a pass of {size.width} rows does not fit: {room} rows of room, "
                f"{self.contract.max_width} at most"
            )
        if size not in self._bindings:
            engine = self.engines.of(size.width, size.branching)
            self._bindings[size] = _Binding(self, engine, size)
        return self._bindings[size]

    def _run(self, binding: _Binding, cursor: int) -> Answer:
        size = binding.size
        length = self._length(cursor + size.width, binding.biased)
        binding.cursor[0] = cursor
        binding.total_length[0] = length
        options = None
        if self.captures is not None:
            # Passes of a prefill are few and of any width: not worth a graph each.
            once = size.width > WIDEST
            options = self.captures.run_options(None if once else (size, length))
        self.seconds += binding.run(options)
        self.passes += 1
        return binding.answer

    def _length(self, filled: int, biased: bool) -> int:
        """What `total_length` says of a pass that fills the buffers that far."""
        if biased:
            return self.contract.capacity
        return next((each for each in self.lengths if each >= filled), filled)


def _lengths(capacity: int) -> list[int]:
    """Powers of two, and the capacity."""
    powers = (SHORTEST << doubling for doubling in range(capacity.bit_length()))
    return [*(length for length in powers if length < capacity), capacity]


@dataclass(frozen=True)
class _Size:
    """What passes of one binding have in common; they answer for the last rows."""

    width: int
    answers: int
    probes: Probes
    branching: bool


class _Binding(Bound):
    """What a pass of one width binds, and its answer."""

    def __init__(self, graph: Graph, engine: StepSession, size: _Size) -> None:
        contract, probes = engine.contract, size.probes
        super().__init__(
            engine.session,
            contract.inputs,
            contract.outputs,
            graph.cache.buffers,
            size.width,
            size.answers,
            probes.total,
            graph.memory,
        )
        self.size = size
        self.biased = contract.biased
        self.input_ids = self.view("input_ids")
        self.position_ids = self.view("position_ids")
        first = size.width - size.answers
        self.arrays["answer_rows"][:] = np.arange(first, size.width)
        if contract.streams:
            self.arrays["probe_rows"][:] = probes.rows
            self.arrays["probe_ids"][:] = probes.ids
        self.answer = answer_of(self.tensors, contract, probes)

    def fill(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set the rows' tokens and positions; the last token fills up the rest."""
        for row, position in enumerate(positions):
            self.input_ids[row] = tokens[row] if row < len(tokens) else tokens[-1]
            self.position_ids[row] = position


def answer_of(
    tensors: Mapping[str, Tensor], contract: StepContract, probes: Probes
) -> Answer:
    """The answer that a binding's outputs hold."""
    hidden = tensors["hidden"].array[0] if contract.hidden_size else None
    streams = {}
    for index, row in enumerate(probes.carriers):
        own = slice(index * probes.streams, (index + 1) * probes.streams)
        streams[row] = _answer(tensors, "probe_").rows(own)
    return replace(_answer(tensors, ""), hidden=hidden, streams=streams)


def _answer(tensors: Mapping[str, Tensor], prefix: str) -> Answer:
    candidates, values, logsumexp, logits = (
        tensors[prefix + name]
        for name in ("candidates", "candidate_logits", "logsumexp", "logits")
    )
    return Answer(
        candidates.array[0],
        values.array[0],
        logsumexp.array[0],
        logits.array[0],
        _source=logits,
    )
