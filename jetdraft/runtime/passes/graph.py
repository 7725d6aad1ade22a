"""One step graph, ready to run at any width without binding anything again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jetdraft.contracts.step_contract import SELECTING, STATE_ROWS, Reading
from jetdraft.contracts.tensors import WIDEST, Float32s, Int64s
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import NO_PROBES, NO_PROBING, Probes, Probing, Rows
from jetdraft.runtime.passes.answer import Answer, Ran, answer_of
from jetdraft.runtime.passes.binding import PassBinding, VisibleSlots
from jetdraft.runtime.passes.buffers import HOST, Cache, Memory, SourceBuffers
from jetdraft.runtime.passes.pictures import PictureRows
from jetdraft.runtime.passes.session import Captures, StepSession, StepSessions

MAX_WIDE_BINDINGS = 8  # Bindings for prompts, which may have any length.
MIN_LENGTH = 256  # The smallest `total_length` of captured graphs.


class Graph:
    """Sessions over one `Cache`, with a binding for each size of a pass.

    `seconds` adds up the time inside `session.run`, `passes` counts the passes. With
    ascending `lengths`, `total_length` is the smallest that holds the pass, else exact.
    Without `captures` no CUDA graph is captured. A given `cache` is another graph's.
    """

    def __init__(
        self,
        sessions: StepSessions,
        compaction: ort.InferenceSession | None = None,
        memory: Memory = HOST,
        captures: Captures | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.sessions = sessions
        self.contract = sessions.any.contract
        self.memory = memory
        self.captures = captures
        self.lengths: Sequence[int] = ()
        # Set before the first pass, for a graph that reads a target or an encoder.
        self.target_cache: Cache | None = None
        self.source: SourceBuffers | None = None
        self.pictures: PictureRows | None = None
        # What selecting passes read and write in place, on the host.
        self.selected = HOST.tensors(self.contract.selections("past"))
        self.prepare(exact=True)
        self.cache = cache or Cache(self.contract, compaction, memory)
        self.seconds = 0.0
        self.passes = 0
        self._bindings: dict[_PassSize, _GraphBinding] = {}
        self._wide_bindings: dict[_PassSize, _GraphBinding] = {}
        # All widths share an array: one for each would take a tenth of the weights.
        logits = np.zeros((1, WIDEST, self.contract.choices), np.float32)
        self.shared = {"logits": logits}

    def prepare(self, exact: bool, reading: Reading = Reading.ALL) -> None:
        """Set the `total_length`s of the next generation, and which rows it reads.

        A captured graph has a fixed `total_length`. Kernels split their work by it, so
        it decides how they round: an `exact` generation uses a single length.
        """
        self.reading = reading
        for tensor in self.selected.values():  # no query is like zeros
            tensor.array.fill(0)
        if self.captures is not None:
            most, powers = self.contract.slots, [1 << n for n in range(32)]
            some = [] if exact else [n for n in powers if MIN_LENGTH <= n < most]
            self.lengths = [*some, most]

    def make_selecting(self) -> Graph:
        """A new graph over the same sessions and buffers, whose passes select rows."""
        graph = Graph(self.sessions, memory=self.memory, cache=self.cache)
        graph.pictures = self.pictures
        graph.prepare(exact=False, reading=Reading.SELECTED)
        return graph

    def run(
        self,
        tokens: Sequence[int],
        last_only: bool = False,
        width: int = 0,
        probing: Probing = NO_PROBING,
        features: Float32s | None = None,
        block: Sequence[int] = (),
        recent: Int64s | None = None,
        silent: bool = False,
    ) -> Answer:
        """Run one pass over a chain of n `tokens` at the cache's cursor.

        It answers for all rows, or with `last_only` for the last row alone; a `silent`
        pass answers for no row. Rows that fill up the `width` repeat the last token.
        The caller moves the cursor with `cache.advance`. A head graph reads `features`
        float [n, w] and `recent` int64 [n, q]; `block` has the first tokens of a graph
        that fills a block.
        """
        rows, cursor, room = len(tokens), self.cache.length, self.cache.room
        width = max(width, rows)
        last_only = last_only and rows > 1
        if not last_only and not self.contract.block:  # a block follows the last row
            width = self.sessions.width(width, room)
        probes = NO_PROBES
        if not last_only:
            probes = self._fitting_probes(probing, rows, room - width)
        answers = 0 if silent else 1 if last_only else width
        is_whole = self.pictures and self.pictures.next_rows(cursor, 0) == (rows, rows)
        size = _PassSize(width, answers, probes, False, rows if is_whole else 0)
        binding = self._bind(size, room)
        binding.fill(tokens, range(cursor, cursor + width))
        binding.fill_rows("features", features)
        binding.fill_rows("recent_ids", recent)
        if self.contract.block:
            unknown = [self.contract.vocab_size] * (self.contract.block - len(block))
            binding.arrays["block"][0] = [*block, *unknown]
        if probes.total:
            chain = [list(range(row)) for row in range(width)]
            binding.show_only([*chain, *self._probe_slots(probes, chain)], cursor)
        else:
            binding.show_all()
        if self.contract.states:
            binding.arrays[STATE_ROWS.name][:] = self.cache.begin_pass(rows, width)
        # Here and not in a method: each frame above a pass costs time in every round.
        self.seconds += binding.run(self._set_inputs(binding, cursor))
        if self.contract.states:
            self.cache.end_pass()
        self.passes += 1
        if last_only or width == rows or self.contract.guesses:
            return binding.answer
        return binding.answer.first(rows)

    def verify(self, rows: Rows, width: int, probing: Probing = NO_PROBING) -> Ran:
        """Run a draft in a pass of `width` rows; returns the draft and its answer."""
        probing = probing if rows.probes is None else Probing(counts=rows.probes)
        if rows.is_chain:
            return rows, self.run(rows.tokens, width=width, probing=probing)
        rows.check()
        return rows, self.run_branches(
            rows.tokens, rows.depths, rows.ancestors, width=width, probing=probing
        )

    def commit(self, path: Sequence[int], ends_at_gap: bool) -> int:
        """Commit the rows of a path of the last pass, see `Target.commit`."""
        return self.cache.commit(path, ends_at_gap)

    def adopt(self, other: Graph) -> None:
        """Use the sessions and buffers of another graph of the same contract."""
        self.sessions, self.captures = other.sessions, other.captures
        self.cache, self.source = other.cache, other.source
        self.pictures = other.pictures
        self._bindings, self._wide_bindings = {}, {}

    def draft_room(self, filled: int) -> int:
        """How many more rows a draft with `filled` slots may have."""
        return min(self.cache.room, self.contract.draft_slots) - filled

    def run_branches(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        ancestors: Sequence[Sequence[int]],
        filled: int = 0,
        width: int = 0,
        probing: Probing = NO_PROBING,
        features: Float32s | None = None,
        recent: Int64s | None = None,
    ) -> Answer:
        """Run rows of a branching draft in a tree graph, which answers for all rows.

        Earlier passes of the same draft `filled` that many slots from the cursor on;
        these rows get the next ones. Row i lies `depths[i]` positions past the cursor
        and sees the committed rows, its `ancestors[i]` and itself.
        """
        if not self.contract.tree:
            raise ValueError("a chain graph cannot run branches; use a tree graph")
        rows, cursor, room = len(tokens), self.cache.length, self.draft_room(filled)
        width = self.sessions.width(max(width, rows), room)
        probes = self._fitting_probes(probing, rows, room - width)
        binding = self._bind(_PassSize(width, width, probes, branching=True), room)
        padding = width - rows
        binding.fill(tokens, [cursor + depth for depth in (*depths, *[0] * padding)])
        binding.fill_rows("features", features)
        binding.fill_rows("recent_ids", recent)
        seen = [*ancestors, *[[]] * padding]
        binding.show_only([*seen, *self._probe_slots(probes, seen)], cursor, filled)
        self.seconds += binding.run(self._set_inputs(binding, cursor + filled))
        self.passes += 1
        return binding.answer if width == rows else binding.answer.first(rows)

    def _bind(self, size: _PassSize, room: int) -> _GraphBinding:
        """The binding for a size, made once; raises `ValueError` if it is too wide."""
        if not 1 <= size.width <= min(self.contract.max_width, room):
            fact = f"a pass of {size.width} rows does not fit: {room} rows of room, "
            fact += f"{self.contract.max_width} at most"
            raise ValueError(fact)
        # Narrow passes have few sizes, and captured graphs need their memory.
        is_wide = size.width > WIDEST
        bindings = self._wide_bindings if is_wide else self._bindings
        binding = bindings.pop(size, None)
        if binding is None:
            if is_wide and len(bindings) == MAX_WIDE_BINDINGS:
                del bindings[next(iter(bindings))]
            session = self.sessions.of(size.width, size.branching)
            binding = _GraphBinding(self, session, size)
        bindings[size] = binding  # the last to be dropped
        return binding

    def _fitting_probes(self, probing: Probing, rows: int, room: int) -> Probes:
        """The probes of a pass; `NO_PROBES` if they do not fit into the buffers."""
        probes, contract = probing.of(rows), self.contract
        slots = contract.prefix + probes.total * contract.members
        return probes if slots <= room else NO_PROBES

    def _probe_slots(
        self, probes: Probes, ancestors: Sequence[Sequence[int]]
    ) -> VisibleSlots:
        """For each slot after the rows of a pass, the slots that it attends to."""
        return probes.visible(ancestors, self.contract.members, self.contract.prefix)

    def _set_inputs(self, binding: _GraphBinding, cursor: int) -> ort.RunOptions | None:
        """Set the inputs that are one number; returns the options to run the pass."""
        size = binding.size
        filled = cursor + size.width
        lengths = [self.contract.slots] if binding.has_bias else self.lengths
        length = next((length for length in lengths if length >= filled), filled)
        binding.cursor[0] = cursor
        binding.total_length[0] = length
        if self.target_cache is not None:
            binding.arrays["target_length"][0] = self.target_cache.length
        if self.contract.selection is not None:
            binding.arrays[SELECTING.name][0] = self.reading
        if self.captures is None:
            return None
        # Prefills have few passes of any width, which are not worth a capture.
        is_prefill = size.width > WIDEST
        return self.captures.run_options(None if is_prefill else (size, length))


@dataclass(frozen=True)
class _PassSize:
    """The sizes of a binding's passes; they answer for their last `answers` rows."""

    width: int
    answers: int
    probes: Probes
    branching: bool
    seen: int = 0  # Rows of a picture that see each other.


class _GraphBinding(PassBinding):
    """The inputs and outputs of passes of one size, and their answer."""

    def __init__(self, graph: Graph, session: StepSession, size: _PassSize) -> None:
        contract, probes = session.contract, size.probes
        # The buffers of other graphs that it reads, by the names of its inputs.
        borrowed = {} if graph.source is None else graph.source.values
        if graph.pictures is not None:
            borrowed |= graph.pictures.values
        names = [spec.name for spec in graph.contract.target_kv]
        if names and graph.target_cache is None:
            raise ValueError("this graph reads the target's buffers; set its lender")
        own = {} if graph.target_cache is None else graph.target_cache.buffers
        borrowed |= {name: own[name.replace("target_", "past_")] for name in names}
        selected = {name: tensor.value for name, tensor in graph.selected.items()}
        given = session.session, contract.inputs, contract.outputs
        buffers = {**graph.cache.buffers, **graph.cache.states, **selected}
        counts = size.width, size.answers, probes.total
        sizes = *counts, contract.members, contract.prefix, size.seen
        others = graph.memory, borrowed, graph.shared
        super().__init__(*given, buffers, sizes, *others)
        self.size, self.pictures = size, graph.pictures
        self.has_bias = contract.has_bias
        self.input_ids = self.view("input_ids")
        self.position_ids = self.view("position_ids")
        self.arrays["answer_rows"][:] = np.arange(size.width - size.answers, size.width)
        if contract.streams:
            self.arrays["probe_rows"][:] = probes.rows
            self.arrays["probe_ids"][:] = probes.ids
        if contract.whole_pictures:
            self.arrays["picture_rows"][:] = np.arange(size.seen)
        if contract.prefix:
            self.arrays["prefix_rows"][:] = range(len(self.arrays["prefix_rows"]))
        self.answer = answer_of(self.tensors, contract, probes)

    def fill(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Set the rows' tokens and positions; padding rows get the last token."""
        if self.pictures is not None:
            tokens = self.pictures.put_into(tokens, positions)
        for row, position in enumerate(positions):
            self.input_ids[row] = tokens[row] if row < len(tokens) else tokens[-1]
            self.position_ids[row] = position
