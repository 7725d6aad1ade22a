"""What a provider will do with a graph: said node by node, without the provider."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from jetdraft.bundle import Bundle
from jetdraft.manifest import GraphEntry
from jetdraft.runtime.passes.session import SIZE_OPERATORS
from tools.forecast import fast_paths
from tools.forecast.graph_view import GraphView, Operator
from tools.forecast.kernel_table import KernelTable
from tools.forecast.parser_limits import parser_limit
from tools.forecast.placement import Placement

CONTROL = ("If", "Loop", "Scan")


class Fate(Enum):
    """What becomes of a node, from best to worst."""

    FAST = "fast path"
    RUNS = "kernel"
    SLOW = "fast path missed"
    HOST = "on the CPU"
    MISSING = "no kernel"
    WRONG = "wrong result"


REFUSED = (Fate.MISSING, Fate.WRONG)
"""The fates with which a graph cannot be used on the provider."""


@dataclass(frozen=True)
class Verdict:
    """The fate of one node, and the reason; a plain kernel needs none."""

    node: str
    operator: str
    fate: Fate
    reason: str = ""


@dataclass(frozen=True)
class Forecast:
    """What a provider will do with the graph in `file`.

    `source` is what the table of kernels was taken from. `copies` are the values that
    Memcpy nodes copy. `no_capture` says why the graph cannot be captured, and is empty
    if it can.
    """

    file: str
    provider: str
    source: str
    verdicts: tuple[Verdict, ...]
    copies: tuple[str, ...]
    no_capture: str

    @property
    def refused(self) -> list[Verdict]:
        """The nodes that the provider cannot run, or would run wrong."""
        return [verdict for verdict in self.verdicts if verdict.fate in REFUSED]

    @property
    def groups(self) -> Counter[tuple[str, Fate, str]]:
        """The number of nodes by operator, fate and reason, the worst fates last."""
        order = list(Fate)
        found = Counter((v.operator, v.fate, v.reason) for v in self.verdicts)
        keys = sorted(found, key=lambda key: (order.index(key[1]), key[0], key[2]))
        return Counter({key: found[key] for key in keys})

    def lines(self) -> Iterator[str]:
        """A summary: the graph, then nodes by operator, fate and reason."""
        capture = f"no capture: {self.no_capture}" if self.no_capture else "capture"
        copies = f"{len(self.copies)} Memcpy nodes"
        yield f"{self.file} on {self.provider}, by {self.source}: {copies}, {capture}"
        for (operator, fate, reason), count in self.groups.items():
            ending = f": {reason}" if reason else ""
            yield f"  {count:4} {operator:44} {fate.value}{ending}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object with a list of all nodes."""
        verdicts = [{**asdict(v), "fate": v.fate.value} for v in self.verdicts]
        return {**asdict(self), "verdicts": verdicts}


def forecast(file: Path, provider: str) -> Forecast:
    """Forecast the graph in `file` on "cuda", "tensorrt" or "webgpu".

    Reads no weights and opens no session. The graph is judged as it is written:
    onnxruntime's own rewrites may save nodes. Raises `ContractError` for a damaged
    file, and `ProviderError` for a provider without a table or if onnx is missing.

        forecast(Path("bundle/target.onnx"), "cuda").refused
    """
    table = KernelTable.of(provider)
    graph = GraphView.read(file)
    refusals = [_refusal(table, operator, graph) for operator in graph.operators]
    has_kernel = [not refusal for refusal in refusals]
    placement = Placement.of(graph, has_kernel, whole=provider == "tensorrt")
    verdicts = tuple(
        _verdict(provider, operator, graph, refusal, index in placement.on_host)
        for index, (operator, refusal) in enumerate(
            zip(graph.operators, refusals, strict=True)
        )
    )
    no_capture = _no_capture(provider, graph, verdicts, placement)
    return Forecast(
        file.name, provider, table.source, verdicts, placement.copies, no_capture
    )


def forecasts(bundle: Bundle, provider: str) -> Iterator[Forecast]:
    """Forecast all graphs of a bundle that run on the provider.

    The halves of a target are left out, since they run on the CPU only.

        [one.refused for one in forecasts(bundle, "cuda")]
    """
    for entry in bundle.graphs.values():
        yield from graph_forecasts(bundle.path, entry, provider)


def graph_forecasts(
    folder: Path, entry: GraphEntry, provider: str
) -> Iterator[Forecast]:
    """Forecast the graphs of one model, in a bundle's folder; see `forecasts`."""
    for file in (entry.file, entry.tree_file, entry.encoder_file):
        if file is not None:
            yield forecast(folder / file, provider)
    if entry.compaction_file is not None:
        # Beside TensorRT the runtime moves cache rows with CUDA.
        mover = "cuda" if provider == "tensorrt" else provider
        yield forecast(folder / entry.compaction_file, mover)


def _refusal(table: KernelTable, operator: Operator, graph: GraphView) -> str:
    """Why the provider does not take an operator; empty if it does."""
    refusal = table.refusal(operator)
    if refusal:
        return refusal
    if table.provider == "tensorrt":
        return parser_limit(operator, graph)
    return ""


def _verdict(
    provider: str, operator: Operator, graph: GraphView, refusal: str, on_host: bool
) -> Verdict:
    fate, reason = Fate.RUNS, ""
    if refusal:
        may_stay = operator.kind in SIZE_OPERATORS and not operator.domain
        fate, reason = (Fate.HOST if may_stay else Fate.MISSING), refusal
    elif on_host:
        fate, reason = Fate.HOST, "computes sizes of a pass"
    elif way := fast_paths.way(provider, operator, graph):
        fate, reason = _FATES[way.path], way.reason
    return Verdict(operator.name, operator.title, fate, reason)


_FATES = {
    fast_paths.Path.FAST: Fate.FAST,
    fast_paths.Path.SLOW: Fate.SLOW,
    fast_paths.Path.REFUSED: Fate.MISSING,
    fast_paths.Path.WRONG: Fate.WRONG,
}


def _no_capture(
    provider: str, graph: GraphView, verdicts: tuple[Verdict, ...], placement: Placement
) -> str:
    """Why a graph of launches cannot be captured; empty if it can."""
    control = [one.kind for one in graph.operators if one.kind in CONTROL]
    if control:
        return f"{control[0]} chooses at run time what runs"
    missing = [verdict for verdict in verdicts if verdict.fate == Fate.MISSING]
    if missing:
        return f"{missing[0].operator} runs elsewhere or not at all"
    if placement.copies:
        count = len(placement.copies)
        return f"{count} Memcpy nodes, for example of {placement.copies[0]}"
    if provider == "webgpu" and "draft_mask" in graph.inputs:
        return "attention compares its bias with a length that is on the device only"
    if provider == "tensorrt" and placement.on_host:
        return "TensorRT must take the whole graph"
    return ""
