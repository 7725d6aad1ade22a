"""Measuring a target on this machine: which widths agree bit by bit, and their times.

Kernels differ by width, and so may the last bit of a row's logits. Widths whose rows
are identical form a *class*; an exact generation stays inside one, so that its text
cannot depend on how rows were grouped into passes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.files import replacing
from jetdraft.runtime.costs import WIDEST
from jetdraft.runtime.graph import Graph
from jetdraft.runtime.probes import Probing

_TOKENS = 48
_START = 12
_TURNS = 5


@dataclass(frozen=True)
class Calibration:
    """What was measured: `classes` of widths, milliseconds per pass by width.

    `gaps[w]` is the largest logit difference between width w and the exact class,
    `probe_ms` what a probe adds to a pass, and `probes_agree` says whether the rows of
    the exact class are the same bit by bit with probes beside them, `trees_agree` the
    same of passes that branch, which may run in a session of their own.

        measure(target, drafter).exact_widths    # [2, 3, ..., 16]
    """

    classes: list[list[int]]
    gaps: dict[int, float]
    target_ms: dict[int, float]
    drafter_ms: dict[int, float]
    probe_ms: float = 0.0
    probes_agree: bool = True
    trees_agree: bool = True

    @property
    def exact_widths(self) -> list[int]:
        """The largest class; of equals, the one with the narrowest width."""
        return max(self.classes, key=lambda widths: (len(widths), -widths[0]))

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Calibration:
        """Read `to_json`'s object; JSON turned the widths into text."""
        tables = {
            name: {int(width): float(value) for width, value in fields[name].items()}
            for name in ("gaps", "target_ms", "drafter_ms")
        }
        classes = [[int(width) for width in members] for members in fields["classes"]]
        held = sorted(width for members in classes for width in members)
        if held != sorted(tables["target_ms"]):
            raise ValueError("the classes do not hold every measured width once")
        return cls(
            classes=classes,
            probe_ms=float(fields["probe_ms"]),
            probes_agree=bool(fields["probes_agree"]),
            trees_agree=bool(fields["trees_agree"]),
            **tables,
        )


def measure(target: Graph, drafter: Graph | None) -> Calibration:
    """Run both graphs at every decoding width over the same tokens."""
    logits, target_ms = _survey(target)
    classes: list[list[int]] = []
    for width in logits:
        for members in classes:
            if np.array_equal(logits[members[0]], logits[width]):
                members.append(width)
                break
        else:
            classes.append([width])
    drafter_ms = _survey(drafter)[1] if drafter is not None else {}
    found = Calibration(classes, {}, target_ms, drafter_ms, _probe_ms(target))
    reference = logits[found.exact_widths[0]]
    for width, values in logits.items():
        found.gaps[width] = float(np.abs(values - reference).max())
    return replace(
        found,
        probes_agree=_probes_agree(target, found.exact_widths),
        trees_agree=_trees_agree(target, found.exact_widths),
    )


def _survey(graph: Graph) -> tuple[dict[int, np.ndarray], dict[int, float]]:
    """Logits of the same rows, and the shortest pass time, by width.

    The widths take turns and the shortest time counts, since noise only adds: a busy
    second would otherwise bend the curve that the controller plans with.
    """
    capacity = graph.contract.capacity
    limit = graph.contract.max_width
    start, end = min(_START, capacity // 4, limit), min(_TOKENS, capacity - 1)
    widths = range(1, min(WIDEST, limit, end - start) + 1)
    random = np.random.default_rng(0)
    tokens = random.integers(0, graph.contract.vocab_size, capacity).tolist()
    graph.cache.rewind(0)
    graph.run(tokens[:start], last_only=True)
    graph.cache.advance(start)
    logits = {width: _cover(graph, tokens, start, end, width) for width in widths}
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(_TURNS):
        for width in widths:
            before = graph.seconds
            graph.run(tokens[start : start + width])
            seconds[width].append(graph.seconds - before)
    graph.cache.rewind(0)
    return logits, {width: 1e3 * min(times) for width, times in seconds.items()}


def _probe_ms(graph: Graph) -> float:
    """What each of two rows' probes adds to a pass."""
    streams, seconds = graph.contract.streams, []
    if not streams:
        return 0.0
    for probing in (Probing(), Probing(streams)):
        graph.probing = probing
        times = []
        for _ in range(_TURNS):
            before = graph.seconds
            graph.run([0, 0])
            times.append(graph.seconds - before)
        seconds.append(min(times))
    graph.probing = Probing()
    return 1e3 * max(seconds[1] - seconds[0], 0.0) / (2 * streams)


def _probes_agree(graph: Graph, widths: list[int]) -> bool:
    """Whether no probe of any exact pass changes a bit of the rows."""
    tokens = list(range(1, 1 + max(widths)))
    for width in widths if graph.contract.streams else ():
        graph.probing = Probing()
        alone = graph.run(tokens[:width]).logits.copy()
        for last_only in (False, True):
            graph.probing = Probing(graph.contract.streams, last_only)
            beside = graph.run(tokens[:width]).logits
            graph.probing = Probing()
            if not np.array_equal(alone, beside):
                return False
    return True


def _trees_agree(graph: Graph, widths: list[int]) -> bool:
    """Whether a chain's rows are the same bit by bit, run as a branching draft."""
    if not graph.contract.tree or graph.engines.chain is graph.engines.any:
        return True
    for width in widths:
        tokens = list(range(1, 1 + width))
        alone = graph.run(tokens).logits.copy()
        seen = [list(range(row)) for row in range(width)]
        if not np.array_equal(
            alone, graph.run_branches(tokens, range(width), seen).logits
        ):
            return False
    return True


def _cover(
    graph: Graph, tokens: list[int], start: int, end: int, width: int
) -> np.ndarray:
    """Logits of rows start..end in passes of one width; the cursor ends at `start`.

    The last pass overlaps the one before, so that every pass is that wide.
    """
    rows = np.zeros((end - start, graph.contract.vocab_size), np.float32)
    for at in [*range(start, end - width, width), end - width]:
        graph.cache.rewind(at)
        rows[at - start : at - start + width] = graph.run(
            tokens[at : at + width]
        ).logits
        graph.cache.advance(width)
    graph.cache.rewind(start)
    return rows


def load(file: Path, machine: dict[str, Any]) -> Calibration | None:
    """An earlier measurement, if it was made on this `machine`."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["machine"] == machine:
            return Calibration.from_json(stored["calibration"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # nothing worth keeping: it is measured again
    return None


def store(file: Path, machine: dict[str, Any], calibration: Calibration) -> None:
    """Keep a measurement beside the bundle, if the folder can be written."""
    fields = {"machine": machine, "calibration": calibration.to_json()}
    try:
        file.parent.mkdir(exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    except OSError:
        return  # a read-only bundle is measured at every load
