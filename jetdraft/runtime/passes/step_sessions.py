"""The sessions of one step graph, and the choice of the session for a pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensor_check import check_tensors
from jetdraft.ort import ort


@dataclass(frozen=True)
class StepSession:
    """A session and the contract that its inputs and outputs were checked against."""

    session: ort.InferenceSession
    contract: StepContract

    def __post_init__(self) -> None:
        contract, session = self.contract, self.session
        check_tensors(contract.inputs, session.get_inputs(), "the graph's inputs")
        check_tensors(contract.outputs, session.get_outputs(), "the graph's outputs")


class StepSessions:
    """A session for any pass, and further sessions that run some passes faster.

    `chain` runs passes that do not branch; it has no attention bias, which some kernels
    run faster. `fixed` has sessions that each run passes of one width only, by width; a
    pass runs in the narrowest of them that holds its rows, filled up with padding rows.
    The `owners` of weights are kept alive for the sessions that share these.

        sessions = StepSessions(session, contract, fixed={4: narrow, 8: wide})
        sessions.width(3, room=100)         # 4
        sessions.of(4, branching=False)
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: StepContract,
        chain: ort.InferenceSession | None = None,
        fixed: Mapping[int, ort.InferenceSession] | None = None,
        owners: Sequence[ort.OrtValue] = (),
    ) -> None:
        self._owners = owners
        self.any = StepSession(session, contract)
        self.chain = self.any
        if chain is not None:
            self.chain = StepSession(chain, replace(contract, tree=False))
        self.fixed = {w: StepSession(s, contract) for w, s in (fixed or {}).items()}
        self._widths = sorted(self.fixed)

    def width(self, rows: int, room: int) -> int:
        """The width of a pass over `rows` rows if the buffers have `room` rows left."""
        place = bisect_left(self._widths, rows)
        if place < len(self._widths) and self._widths[place] <= room:
            return self._widths[place]
        return rows

    def of(self, width: int, branching: bool) -> StepSession:
        """The session for a pass of that width."""
        return self.fixed.get(width, self.any if branching else self.chain)
