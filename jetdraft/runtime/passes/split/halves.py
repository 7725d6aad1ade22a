"""The two graphs of a target, which a host can run apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jetdraft.contracts.split_contract import SplitContract
from jetdraft.contracts.tensor_check import check_tensors
from jetdraft.ort import ort
from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.drafts.probes import NO_PROBES, Probes
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer, answer_of
from jetdraft.runtime.passes.binding import Bound

Buffers = Mapping[str, ort.OrtValue]
"""The KV buffers of a half, by the names of its inputs."""


class SplitSessions(NamedTuple):
    """The sessions of both halves, and the contract that they were made for.

    `exit` leaves the upper layers out; None if the bundle has no such graph.
    """

    lower: ort.InferenceSession
    upper: ort.InferenceSession
    contract: SplitContract
    exit: ort.InferenceSession | None = None


class Placed(NamedTuple):
    """Rows of a pass, in the slots of a draft behind the first `filled` slots.

    Row i is `depths[i]` places past the cursor and sees the committed rows, the draft's
    slots `ancestors[i]` and itself.
    """

    tokens: Sequence[int]
    depths: Sequence[int]
    ancestors: Sequence[Sequence[int]]
    filled: int = 0

    @classmethod
    def of(cls, rows: Rows, first: int = 0, end: int | None = None) -> Placed:
        """The rows of a draft from row `first` on, each in the slot of its number."""
        part = slice(first, end)
        return cls(rows.tokens[part], rows.depths[part], rows.ancestors[part], first)


class Halves:
    """The lower and the upper half of a target, bound once for each size of a pass.

    `seconds` adds up the time inside `session.run`, `passes` counts the passes of the
    upper half. Whose rows lie where in the buffers is the caller's affair. Raises
    `ContractError` for graphs that are not these halves.

        halves = Halves(sessions, lower_buffers, upper_buffers)
        below = halves.run_lower(Placed.of(rows), 4, cursor)
        halves.run_upper(Placed.of(rows), states, (4, 4, NO_PROBES), cursor)
    """

    def __init__(
        self, sessions: SplitSessions, lower_buffers: Buffers, upper_buffers: Buffers
    ) -> None:
        lower, upper, contract, exit_session = sessions
        for session, inputs, outputs, name in (
            (lower, contract.lower_inputs, contract.lower_outputs, "lower half"),
            (upper, contract.upper_inputs, contract.upper_outputs, "upper half"),
            (exit_session, contract.exit_inputs, contract.upper_outputs, "exit"),
        ):
            if session is None:
                continue
            check_tensors(inputs, session.get_inputs(), f"the {name}'s inputs")
            check_tensors(outputs, session.get_outputs(), f"the {name}'s outputs")
        self.contract = contract
        self.seconds = 0.0
        self.passes = 0
        self._sessions, self._buffers = sessions, (lower_buffers, upper_buffers)
        self._lower: dict[int, Bound] = {}
        self._upper: dict[tuple[int, int, Probes], Bound] = {}
        self._exits: dict[int, Bound] = {}

    def run_lower(
        self, rows: Placed, width: int, cursor: int, parents: Sequence[int] = ()
    ) -> Bound:
        """Run rows of a draft that begins at the cursor; gives inputs and outputs.

        An early exit needs the `parents` of all rows; the root is its own parent.
        """
        if width not in self._lower:
            self._lower[width] = Bound(
                self._sessions.lower,
                self.contract.lower_inputs,
                self.contract.lower_outputs,
                self._buffers[0],
                width,
                0,
                0,
            )
        bound, padding = self._lower[width], width - len(rows.tokens)
        tokens = list(rows.tokens)
        bound.arrays["input_ids"][0] = tokens + tokens[-1:] * padding
        if self.contract.scores:
            bound.arrays["parents"][:] = [*parents, *[0] * padding]
        self._place(bound, rows, padding, NO_PROBES, cursor)
        return bound

    def run_upper(
        self, rows: Placed, states: Float32s, size: tuple[int, int, Probes], cursor: int
    ) -> Answer:
        """Run rows whose `states` [n, h] the lower half has given.

        The `size` holds the width, the number of rows that the answer covers, and the
        probes.
        """
        width, answers, probes = size
        if size not in self._upper:
            self._upper[size] = Bound(
                self._sessions.upper,
                self.contract.upper_inputs,
                self.contract.upper_outputs,
                self._buffers[1],
                width,
                answers,
                probes.total,
            )
            arrays = self._upper[size].arrays
            arrays["answer_rows"][:] = range(width - answers, width)
            if self.contract.whole.streams:
                arrays["probe_rows"][:] = probes.rows
                arrays["probe_ids"][:] = probes.ids
        bound, count = self._upper[size], len(rows.tokens)
        hidden = bound.arrays["hidden"][0]
        hidden[:count] = states
        hidden[count:] = states[-1]
        self._place(bound, rows, width - count, probes, cursor)
        self.passes += 1
        return answer_of(bound.tensors, self.contract.upper, probes)

    def run_exit(
        self,
        rows: Placed,
        states: Float32s,
        exit_states: Float32s,
        width: int,
        cursor: int,
    ) -> Answer:
        """Fill the upper layers' buffers for rows that leave them out; gives answers.

        The lower half has given the `states` [n, h]; the LM head reads `exit_states`.
        """
        assert self._sessions.exit is not None
        if width not in self._exits:
            self._exits[width] = Bound(
                self._sessions.exit,
                self.contract.exit_inputs,
                self.contract.upper_outputs,
                self._buffers[1],
                width,
                width,
                0,
            )
            self._exits[width].arrays["answer_rows"][:] = range(width)
        bound, count = self._exits[width], len(rows.tokens)
        for name, numbers in (("hidden", states), ("exit_hidden", exit_states)):
            bound.arrays[name][0, :count] = numbers
            bound.arrays[name][0, count:] = numbers[-1]
        depths = [*rows.depths, *[0] * (width - count)]
        bound.arrays["position_ids"][0] = [cursor + depth for depth in depths]
        bound.cursor[0], bound.total_length[0] = cursor, cursor + width
        self.seconds += bound.run()
        self.passes += 1
        return answer_of(bound.tensors, self.contract.upper, NO_PROBES)

    def _place(
        self, bound: Bound, rows: Placed, padding: int, probes: Probes, cursor: int
    ) -> None:
        """Set the positions and the mask of a pass, and run it."""
        depths = [*rows.depths, *[0] * padding]
        bound.arrays["position_ids"][0] = [cursor + depth for depth in depths]
        seen: list[Sequence[int]] = [*rows.ancestors, *[[]] * padding]
        bound.show_only([*seen, *probes.seen(seen)], cursor, rows.filled)
        bound.cursor[0] = cursor + rows.filled
        bound.total_length[0] = self.contract.whole.slots
        self.seconds += bound.run()
