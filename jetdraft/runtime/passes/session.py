"""Opens onnxruntime sessions, and chooses the session of a step graph for a pass."""

import os
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import check_tensors
from jetdraft.devices import webgpu
from jetdraft.devices.memory import release_files
from jetdraft.devices.providers import PROVIDER_FIX, PROVIDERS, try_provider
from jetdraft.errors import ContractError, OptionError, ProviderError
from jetdraft.native import DOMAIN, LIBRARY, isa
from jetdraft.ort import ort

SIZE_OPERATORS = {"Shape", "Size", "Squeeze", "Unsqueeze", "Cast", "Concat"}
SIZE_OPERATORS |= {"Range", "Add", "Expand"}
"""Operators that a provider may leave to the CPU: they compute sizes of a pass."""

EAGER = "-1"  # onnxruntime's id of a run that neither captures nor replays.
MAX_THREADS_PER_CORE = 8  # With more, threads wait for each other for long.


class Spinning(Enum):
    """When the threads of a session keep their cores busy while they wait."""

    ALWAYS = "always"
    IN_PASSES = "in passes"
    NEVER = "never"


class Threads(NamedTuple):
    number: int
    spinning: Spinning


ONE_THREAD = Threads(1, Spinning.NEVER)


def threads_of_pair(target: int, drafter: int) -> tuple[Threads, Threads]:
    """The threads of a target and its drafter, which take turns on the same cores.

    A drafter's one thread sleeps while it waits; more yield the cores between passes.
    """
    if drafter == 1:
        return Threads(target, Spinning.ALWAYS), ONE_THREAD
    yielding = Spinning.IN_PASSES
    return Threads(target, yielding), Threads(drafter, yielding)


def default_threads() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def open_session(
    file: Path,
    provider: str,
    threads: Threads = ONE_THREAD,
    weights: Mapping[str, npt.NDArray[np.generic]] | None = None,
    shared: Mapping[str, ort.OrtValue] | None = None,
    provider_options: Mapping[str, str] | None = None,
) -> ort.InferenceSession:
    """Open a session of the graph in `file` on a `provider`, such as "cuda".

    `weights` replace the graph's own, by name, and so do the `shared` weights, which
    lie in the provider's memory and must outlive the session. Raises `ProviderError` if
    the provider cannot run the whole graph, `ContractError` for a file that cannot be
    loaded, and `OptionError` for wrong `threads`.
    """
    full = PROVIDERS[provider].full
    options = _session_options(provider, threads)
    how: dict[str, Any] = {"providers": [(full, dict(provider_options or {}))]}
    if provider == "webgpu":
        webgpu.add_adapter(options, how.pop("providers")[0][1])
    weights = weights or {}
    no_library = None
    try:
        if provider == "cpu" and isa():
            options.register_custom_ops_library(str(LIBRARY))
    except ProviderError as error:  # some graphs do without
        no_library = error
    try:
        values = [ort.OrtValue.ortvalue_from_numpy(w) for w in weights.values()]
        options.add_external_initializers(list(weights), values)
        for name, value in (shared or {}).items():
            options.add_initializer(name, value)
        # The fallback of the Python package prints, then opens another session.
        session = ort.InferenceSession(str(file), options, enable_fallback=0, **how)
    except Exception as error:  # onnxruntime's exceptions have no common base
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if no_library and DOMAIN in reason.rpartition("failed:")[2]:  # after the file
            raise no_library from error
        if provider != "cpu":
            fact = f"{full} cannot load {file} ({reason}); {PROVIDER_FIX}"
            raise ProviderError(fact) from error
        fact = f"onnxruntime cannot load {file} ({reason})"
        fix = "export the bundle again with this version"
        raise ContractError(f"{fact}; {fix}") from error
    _check_provider(session, provider, file)
    # The kernels have copies of most weights, packed in their own way.
    release_files(file.parent)
    return session


def _session_options(provider: str, threads: Threads) -> ort.SessionOptions:
    """The options of a session; raises `OptionError` for wrong `threads`."""
    count, spinning = threads
    most = MAX_THREADS_PER_CORE * (os.cpu_count() or 1)
    if type(count) is not int or not 1 <= count <= most:
        fact = f"threads {count!r} is out of range; give 1 to {most} on this machine"
        raise OptionError(fact, "threads")
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = count, 1
    # On the CPU every error is an exception too, which we report in a line of our own.
    options.log_severity_level = 4 if provider == "cpu" else 3
    # A pattern keeps memory for each width, and may allocate it inside of a capture.
    options.enable_mem_pattern = False
    for name, value in (
        ("session.intra_op.allow_spinning", str(int(spinning != Spinning.NEVER))),
        ("session.force_spinning_stop", str(int(spinning == Spinning.IN_PASSES))),
        # For a MatMul after a DequantizeLinear; the same level as in `Recipe`.
        ("session.qdq_matmulnbits_accuracy_level", "4"),
        ("session.record_ep_graph_assignment_info", "1"),
    ):
        options.add_session_config_entry(name, value)
    return options


def _check_provider(session: ort.InferenceSession, provider: str, file: Path) -> None:
    """Raise `ProviderError` if the CPU runs nodes that the provider should run."""
    full = PROVIDERS[provider].full
    if session.get_providers()[0] != full:
        reason = try_provider(provider).reason or "onnxruntime left it out"
        raise ProviderError(f"{full} cannot be used here: {reason}; {PROVIDER_FIX}")
    parts = session.get_provider_graph_assignment_info()
    others = (part for part in parts if part.ep_name != full)
    elsewhere = {node.op_type for part in others for node in part.get_nodes()}
    if missing := elsewhere - SIZE_OPERATORS:
        fact = f"{full} has no kernels for {', '.join(sorted(missing))} of {file}"
        raise ProviderError(f"{fact}; export the bundle for this provider")


class Captures:
    """Run options by key: passes with the same key are captured once, then replayed.

    A replay reads no shape and no value on the host: passes that differ in these need
    different keys, each with its graph id. The first run of a key is eager, so that
    kernels are chosen and memory is allocated before. The second captures, and runs the
    pass three times, which is harmless: the rows go to the same slots.
    """

    def __init__(self) -> None:
        self.ids: dict[Hashable, int] = {}
        self._warm: set[Hashable] = set()
        self._options: dict[str, ort.RunOptions] = {}

    def run_options(self, key: Hashable | None) -> ort.RunOptions:
        """The options for the next run of a key; None never captures or replays."""
        graph_id = EAGER
        if key in self._warm:
            graph_id = str(self.ids.setdefault(key, len(self.ids) + 1))
        elif key is not None:
            self._warm.add(key)
        if graph_id not in self._options:
            options = ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", graph_id)
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

    `chain` has no attention bias, which some kernels run faster. Of the `fixed` widths
    a pass takes the narrowest that holds its rows, padded. `owners` of shared weights
    are kept alive.
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
        """The width for `rows` rows: a fixed width that fits `room`, or `rows`."""
        place = bisect_left(self._widths, rows)
        if place < len(self._widths) and self._widths[place] <= room:
            return self._widths[place]
        return rows

    def of(self, width: int, branching: bool) -> StepSession:
        """The session for a pass of that width, with or without branches."""
        return self.fixed.get(width, self.any if branching else self.chain)
