"""The two graphs of a target; the lower may run ahead (Kangaroo, 2404.18911)."""

# The lower half writes into the target's own buffers, and its cursor also counts the
# rows that it ran ahead; the upper half takes up their states when they are verified.

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jetdraft.contracts.step_contract import SplitContract
from jetdraft.contracts.tensors import Float32s, check_tensors
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import NO_PROBES, NO_PROBING, Probes, Probing, Rows
from jetdraft.runtime.passes.answer import Answer, Ran, answer_of
from jetdraft.runtime.passes.binding import PassBinding
from jetdraft.runtime.passes.buffers import HOST, Cache
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.prefix import common_length

Buffers = Mapping[str, ort.OrtValue]
Size = tuple[int, int, Probes]  # Of a pass: its width, answered rows, and probes.
# The graphs of a target, as bindings are kept for them and as errors name them.
LOWER, UPPER = "lower half", "upper half"


class SplitSessions(NamedTuple):
    """The sessions of both halves, and their contract."""

    lower: ort.InferenceSession
    upper: ort.InferenceSession
    contract: SplitContract


class PlacedRows(NamedTuple):
    """Rows in slots after the first `filled`; row i sees the slots `ancestors[i]`.

    It is `depths[i]` positions past the cursor.
    """

    tokens: Sequence[int]
    depths: Sequence[int]
    ancestors: Sequence[Sequence[int]]
    filled: int = 0

    @classmethod
    def of(cls, rows: Rows, first: int = 0, end: int | None = None) -> "PlacedRows":
        """The rows `first` to `end` of a draft, each in the slot of its number."""
        part = slice(first, end)
        return cls(rows.tokens[part], rows.depths[part], rows.ancestors[part], first)


class Halves:
    """The lower and the upper half of a target, bound once for each size of a pass.

    `seconds` adds up the time inside `session.run`, `passes` counts the passes that
    gave an answer. Raises `ContractError` for graphs that are not these halves.
    """

    def __init__(
        self, sessions: SplitSessions, buffers: Sequence[Buffers], whole: Graph
    ) -> None:
        lower, upper, contract = sessions
        self._sessions, self.contract = sessions, contract
        self._graphs = {
            LOWER: (lower, contract.lower_inputs, contract.lower_outputs),
            UPPER: (upper, contract.upper_inputs, contract.upper.outputs),
        }
        for name, (session, inputs, outputs) in self._graphs.items():
            check_tensors(inputs, session.get_inputs(), f"the {name}'s inputs")
            check_tensors(outputs, session.get_outputs(), f"the {name}'s outputs")
        self._buffers = dict(zip((LOWER, UPPER), buffers, strict=True))
        self._pictures = whole.pictures
        self._bindings: dict[tuple[str, int, int, Probes], PassBinding] = {}
        self.seconds, self.passes = 0.0, 0

    def run_lower(
        self, rows: PlacedRows, width: int, cursor: int, parents: Sequence[int] = ()
    ) -> PassBinding:
        """Run rows of a draft from the cursor on; an early exit needs all `parents`."""
        bound, tokens = self._bind(LOWER, width), rows.tokens
        if self._pictures:
            tokens = self._pictures.put_into(tokens, [cursor + d for d in rows.depths])
        bound.fill_rows("input_ids", np.array(tokens))
        if self.contract.scores:
            bound.arrays["parents"][:] = [*parents, *[0] * (width - len(tokens))]
        self._run_placed(bound, rows, NO_PROBES, cursor)
        return bound

    def run_upper(
        self, rows: PlacedRows, states: Float32s, size: Size, cursor: int
    ) -> Answer:
        """Run `states` [n, h] in a pass of `size`."""
        bound, probes = self._bind(UPPER, *size), size[2]
        bound.fill_rows("hidden", states)
        self._run_placed(bound, rows, probes, cursor)
        self.passes += 1
        return answer_of(bound.tensors, self.contract.upper, probes)

    def _bind(
        self, name: str, width: int, answers: int = 0, probes: Probes = NO_PROBES
    ) -> PassBinding:
        """The binding of a graph for passes of a size, made by the first call."""
        key = name, width, answers, probes
        if key not in self._bindings:
            sizes = width, answers, probes.total
            graph, seen = self._graphs[name], self._pictures and self._pictures.values
            bound = PassBinding(*graph, self._buffers[name], sizes, HOST, seen or {})
            if answers:
                bound.arrays["answer_rows"][:] = range(width - answers, width)
            if name == UPPER and self.contract.whole.streams:
                bound.arrays["probe_rows"][:] = probes.rows
                bound.arrays["probe_ids"][:] = probes.ids
            self._bindings[key] = bound
        return self._bindings[key]

    def _run_placed(
        self, bound: PassBinding, rows: PlacedRows, probes: Probes, cursor: int
    ) -> None:
        """Set positions, mask and lengths of a pass, and run it; adds to `seconds`."""
        padding = bound.arrays["position_ids"].shape[1] - len(rows.tokens)
        depths = [*rows.depths, *[0] * padding]
        bound.arrays["position_ids"][0] = [cursor + depth for depth in depths]
        seen: list[Sequence[int]] = [*rows.ancestors, *[[]] * padding]
        bound.show_only([*seen, *probes.visible(seen)], cursor, rows.filled)
        bound.cursor[0] = cursor + rows.filled
        bound.total_length[0] = self.contract.whole.slots
        self.seconds += bound.run()


class LeadingHalf:
    """A `Target` over the buffers of `whole`; `ahead` are the lower half's tokens."""

    def __init__(self, whole: Graph, sessions: SplitSessions) -> None:
        self.whole, self.contract = whole, whole.contract
        buffers, lower = whole.cache.buffers, sessions.contract.lower
        below = {spec.name: buffers[spec.name] for spec in lower.buffers("past")}
        first, above = len(lower.kv_shapes), {}
        for name in buffers.keys() - below.keys():
            kind, layer = name.split(".")
            above[f"{kind}.{int(layer) - first}"] = buffers[name]
        self.halves = Halves(sessions, (below, above), whole)
        self.widths: Sequence[int] = ()
        self.ahead: list[int] = []
        self._states = np.zeros((0, sessions.contract.hidden_size), np.float32)
        self._base = 0
        """How many rows of the last `lead` are not committed."""

    @property
    def cache(self) -> Cache:
        """The buffers of both halves, with the upper half's cursor."""
        return self.whole.cache

    @property
    def seconds(self) -> float:
        return self.whole.seconds + self.halves.seconds

    @property
    def passes(self) -> int:
        return self.whole.passes + self.halves.passes

    def prepare(self, widths: Sequence[int]) -> None:
        """Begin a generation with these widths."""
        self.widths = sorted(widths)
        self._keep_ahead(0)

    def run(
        self, tokens: Sequence[int], last_only: bool = False, width: int = 0
    ) -> Answer:
        self._keep_ahead(0)
        return self.whole.run(tokens, last_only, width)

    def lead(self, text: Sequence[int]) -> Float32s | None:
        """Run the lower half over the rows of `text` that are not committed yet.

        Returns the states [n, h] that leave it, or None if the rows do not fit.
        """
        rows = Rows.chain(list(text[self.cache.length :]))
        self._keep_ahead(common_length(self.ahead, rows.tokens))
        self._base = len(rows)
        return self._run_ahead(rows)

    def branch(self, rows: PlacedRows) -> Float32s:
        """Run a draft's rows after the last `lead`; the lower half's states [n, h]."""
        cursor, count = self.cache.length + self._base, len(rows.tokens)
        goes_on = count == 1 and list(rows.ancestors[0]) == list(range(rows.filled))
        width = self._fitting_width(count, self._base + rows.filled)
        bound = self.halves.run_lower(rows, width or count, cursor)
        states = bound.arrays["hidden"][0, :count].astype(np.float32)
        if goes_on and width and len(self.ahead) == self._base + rows.filled:
            self._append_ahead(rows.tokens, states)
        return states

    def verify(self, rows: Rows, width: int, probing: Probing = NO_PROBING) -> Ran:
        rows.check()
        same = common_length(self.ahead, rows.tokens)
        self._keep_ahead(common_length(rows.parents[:same], range(-1, same - 1)))
        leads = self.ahead and not probing.streams
        states = self._run_ahead(rows) if leads else None
        if states is None:
            self._keep_ahead(0)
            return self.whole.verify(rows, width, probing)
        placed, size = PlacedRows.of(rows), (width, width, NO_PROBES)
        answer = self.halves.run_upper(placed, states, size, self.cache.length)
        return rows, replace(answer.first(len(rows)), features=states)

    def commit(self, path: Sequence[int], ends_at_gap: bool) -> int:
        """Commit the rows of a path, see `Target.commit`; no rows are ahead then."""
        self._keep_ahead(0)
        return self.whole.commit(path, ends_at_gap)

    def _keep_ahead(self, count: int) -> None:
        del self.ahead[count:]
        self._states = self._states[:count]

    def _append_ahead(self, tokens: Sequence[int], states: Float32s) -> None:
        self.ahead += tokens
        self._states = np.concatenate([self._states, states])

    def _fitting_width(self, rows: int, filled: int) -> int | None:
        seen = self.whole.pictures
        if seen and (seen.ids[self.cache.length :] >= self.contract.vocab_size).any():
            return None  # The upper half reads rows of text alone.
        room = self.whole.draft_room(filled)
        return next((w for w in self.widths if rows <= w <= room), None)

    def _run_ahead(self, rows: Rows) -> Float32s | None:
        """Run the lower half over all rows; states [n, h], or None without room."""
        while (first := len(self.ahead)) < len(rows):
            end = min(len(rows), first + self.widths[-1])
            width = self._fitting_width(end - first, first)
            if width is None:
                return None
            part = PlacedRows.of(rows, first, end)
            bound = self.halves.run_lower(part, width, self.cache.length)
            self._append_ahead(part.tokens, bound.arrays["hidden"][0, : end - first])
        return self._states
