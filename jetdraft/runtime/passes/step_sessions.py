"""The sessions of one step graph, and the choice of the session for a pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensor_check import check_tensors
from jetdraft.ort import ort

EAGER = "-1"
"""onnxruntime's id of a run that neither captures nor replays."""

_OPTION = "gpu_graph_id"


class Captures:
    """One graph id per key, since onnxruntime replays whatever id it gets.

    A replay reads no shape and no value on the host: passes that differ in these need
    different keys. The first run of a key is eager, so that kernels are chosen and
    memory is allocated outside of a capture. The second run captures, and runs the pass
    three times, which is harmless: the rows go to the same slots. Later runs replay.

        captures = Captures()
        captures.run_options((width, length))
    """

    def __init__(self) -> None:
        self.ids: dict[Hashable, int] = {}
        self._warm: set[Hashable] = set()
        self._options: dict[str, ort.RunOptions] = {}

    def run_options(self, key: Hashable | None) -> ort.RunOptions:
        """The options to run a pass of that key with; None is always eager."""
        if key is None:
            return self._options_of(EAGER)
        if key not in self._warm:
            self._warm.add(key)
            return self._options_of(EAGER)
        graph_id = self.ids.setdefault(key, len(self.ids) + 1)
        return self._options_of(str(graph_id))

    def _options_of(self, graph_id: str) -> ort.RunOptions:
        if graph_id not in self._options:
            options = ort.RunOptions()
            options.add_run_config_entry(_OPTION, graph_id)
            self._options[graph_id] = options
        return self._options[graph_id]


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
