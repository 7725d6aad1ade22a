"""The two graphs of a target, which a host can run apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jetdraft.contracts.step_contract import SplitContract
from jetdraft.contracts.tensors import Float32s, check_tensors
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import NO_PROBES, Probes, Rows
from jetdraft.runtime.passes.answer import Answer, answer_of
from jetdraft.runtime.passes.binding import PassBinding

Buffers = Mapping[str, ort.OrtValue]
LOWER, UPPER, EXIT = "lower half", "upper half", "exit"
"""The graphs of a target, as bindings are kept for them and as errors name them."""


class SplitSessions(NamedTuple):
    """The sessions of both halves, and of a graph that leaves the upper layers out."""

    lower: ort.InferenceSession
    upper: ort.InferenceSession
    contract: SplitContract
    exit: ort.InferenceSession | None = None


class PlacedRows(NamedTuple):
    """Rows of a pass, in the slots of a draft after the first `filled` slots.

    Row i is `depths[i]` positions past the cursor, and sees the slots `ancestors[i]`.
    """

    tokens: Sequence[int]
    depths: Sequence[int]
    ancestors: Sequence[Sequence[int]]
    filled: int = 0

    @classmethod
    def of(cls, rows: Rows, first: int = 0, end: int | None = None) -> PlacedRows:
        """The rows `first` to `end` of a draft, each in the slot of its number."""
        part = slice(first, end)
        return cls(rows.tokens[part], rows.depths[part], rows.ancestors[part], first)


class Halves:
    """The lower and the upper half of a target, bound once for each size of a pass.

    `seconds` adds up the time inside `session.run`, `passes` counts the passes that
    gave an answer. Raises `ContractError` for graphs that are not these halves.
    """

    def __init__(
        self, sessions: SplitSessions, lower_buffers: Buffers, upper_buffers: Buffers
    ) -> None:
        lower, upper, contract, leaving = sessions
        self._sessions, self.contract = sessions, contract
        self._graphs = {
            LOWER: (lower, contract.lower_inputs, contract.lower_outputs),
            UPPER: (upper, contract.upper_inputs, contract.upper.outputs),
            EXIT: (leaving, contract.exit_inputs, contract.upper.outputs),
        }
        for name, (session, inputs, outputs) in self._graphs.items():
            if session is not None:
                check_tensors(inputs, session.get_inputs(), f"the {name}'s inputs")
                check_tensors(outputs, session.get_outputs(), f"the {name}'s outputs")
        self._buffers = {LOWER: lower_buffers, UPPER: upper_buffers}
        self._bindings: dict[tuple[str, int, int, Probes], PassBinding] = {}
        self.seconds = 0.0
        self.passes = 0

    def run_lower(
        self, rows: PlacedRows, width: int, cursor: int, parents: Sequence[int] = ()
    ) -> PassBinding:
        """Run rows of a draft that begins at the cursor; returns their binding.

        An early exit needs the `parents` of all rows; the root is its own parent.
        """
        bound, padding = self._bind(LOWER, width), width - len(rows.tokens)
        tokens = list(rows.tokens)
        bound.arrays["input_ids"][0] = tokens + tokens[-1:] * padding
        if self.contract.scores:
            bound.arrays["parents"][:] = [*parents, *[0] * padding]
        self._run_placed(bound, rows, padding, NO_PROBES, cursor)
        return bound

    def run_upper(
        self,
        rows: PlacedRows,
        states: Float32s,
        size: tuple[int, int, Probes],
        cursor: int,
    ) -> Answer:
        """Run rows whose `states` [n, h] the lower half has given.

        The `size` is the width, the number of rows to answer for, and the probes.
        """
        bound, probes = self._bind(UPPER, *size), size[2]
        bound.fill_rows("hidden", states)
        self._run_placed(bound, rows, size[0] - len(rows.tokens), probes, cursor)
        self.passes += 1
        return answer_of(bound.tensors, self.contract.upper, probes)

    def run_exit(
        self,
        rows: PlacedRows,
        states: Float32s,
        exit_states: Float32s,
        width: int,
        cursor: int,
    ) -> Answer:
        """Answer for rows without the upper layers, but fill these layers' buffers.

        The lower half has given the `states` [n, h]; the LM head reads `exit_states`.
        """
        bound = self._bind(EXIT, width, width)
        bound.fill_rows("hidden", states)
        bound.fill_rows("exit_hidden", exit_states)
        depths = [*rows.depths, *[0] * (width - len(rows.tokens))]
        bound.arrays["position_ids"][0] = [cursor + depth for depth in depths]
        bound.cursor[0], bound.total_length[0] = cursor, cursor + width
        self.seconds += bound.run()
        self.passes += 1
        return answer_of(bound.tensors, self.contract.upper, NO_PROBES)

    def _bind(
        self, name: str, width: int, answers: int = 0, probes: Probes = NO_PROBES
    ) -> PassBinding:
        """The binding of a graph for passes of a size, made by the first call."""
        key = name, width, answers, probes
        if key not in self._bindings:
            session, inputs, outputs = self._graphs[name]
            assert session is not None
            buffers = self._buffers[LOWER if name == LOWER else UPPER]
            total = probes.total
            bound = PassBinding(
                session, inputs, outputs, buffers, width, answers, total
            )
            if answers:
                bound.arrays["answer_rows"][:] = range(width - answers, width)
            if name == UPPER and self.contract.whole.streams:
                bound.arrays["probe_rows"][:] = probes.rows
                bound.arrays["probe_ids"][:] = probes.ids
            self._bindings[key] = bound
        return self._bindings[key]

    def _run_placed(
        self,
        bound: PassBinding,
        rows: PlacedRows,
        padding: int,
        probes: Probes,
        cursor: int,
    ) -> None:
        """Set positions, mask and lengths of a pass, and run it; adds to `seconds`."""
        depths = [*rows.depths, *[0] * padding]
        bound.arrays["position_ids"][0] = [cursor + depth for depth in depths]
        seen: list[Sequence[int]] = [*rows.ancestors, *[[]] * padding]
        bound.show_only([*seen, *probes.visible(seen)], cursor, rows.filled)
        bound.cursor[0] = cursor + rows.filled
        bound.total_length[0] = self.contract.whole.slots
        self.seconds += bound.run()
