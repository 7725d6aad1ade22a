"""The sessions of one step graph, and which of them runs a pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jetdraft.contract import StepContract, check_tensors
from jetdraft.ort import ort


@dataclass(frozen=True)
class StepSession:
    """A session and its contract, checked when it is made."""

    session: ort.InferenceSession
    contract: StepContract

    def __post_init__(self) -> None:
        contract, session = self.contract, self.session
        check_tensors(contract.inputs, session.get_inputs(), "the graph's inputs")
        check_tensors(contract.outputs, session.get_outputs(), "the graph's outputs")


class StepSessions:
    """A session for every pass, and others that are faster at some.

    `chain` runs what does not branch, where a provider has a faster kernel without an
    attention bias. `fixed` has sessions built for passes of one width each; a pass goes
    to the narrowest that holds it and is filled up. `weights` that sessions share live
    as long as these.

        engines = StepSessions(session, contract, fixed={4: narrow, 8: wide})
        engines.width(3, room=100)         # 4
        engines.of(4, branching=False)
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: StepContract,
        chain: ort.InferenceSession | None = None,
        fixed: Mapping[int, ort.InferenceSession] | None = None,
        weights: Mapping[str, ort.OrtValue] | None = None,
    ) -> None:
        self._weights = weights
        self.any = StepSession(session, contract)
        self.chain = self.any
        if chain is not None:
            self.chain = StepSession(chain, replace(contract, tree=False))
        self.fixed = {w: StepSession(s, contract) for w, s in (fixed or {}).items()}
        self._widths = sorted(self.fixed)

    def width(self, rows: int, room: int) -> int:
        """How wide a pass over so many rows is, where `room` rows fit."""
        place = bisect_left(self._widths, rows)
        if place < len(self._widths) and self._widths[place] <= room:
            return self._widths[place]
        return rows

    def of(self, width: int, branching: bool) -> StepSession:
        """Who runs a pass of that width."""
        other = self.any if branching else self.chain
        return self.fixed.get(width, other)
