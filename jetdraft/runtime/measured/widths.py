"""Measuring a target on this machine: which widths agree bit by bit, and their times.

Kernels differ by width, and so may the last bit of a row's logits. Widths whose rows
are identical form a *class*; an exact generation stays inside one, so that its text
cannot depend on how rows were grouped into passes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.contract import WIDEST, StepContract
from jetdraft.files import replacing
from jetdraft.runtime.drafts.probes import Probing
from jetdraft.runtime.passes.graph import Graph

_ROWS = 36
_START = 12
_TURNS = 5


@dataclass(frozen=True)
class Calibration:
    """What was measured: `classes` of widths, milliseconds per pass by width.

    `gaps[w]` is the largest logit difference between width w and the exact class,
    `probe_ms` what a probe adds to a pass, and `probes_agree` says whether the rows of
    the exact class are the same bit by bit with probes beside them, `trees_agree` the
    same of passes that branch, which may run in a session of their own, and
    `prefills_agree` of the wide passes that prompts are read in.

        measure(target, drafter).exact_widths    # [2, 3, ..., 16]
    """

    classes: list[list[int]]
    gaps: dict[int, float]
    target_ms: dict[int, float]
    drafter_ms: dict[int, float]
    probe_ms: float = 0.0
    probes_agree: bool = True
    trees_agree: bool = True
    prefills_agree: bool = False

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
            prefills_agree=bool(fields["prefills_agree"]),
            **tables,
        )


def measure(target: Graph, drafter: Graph | None) -> Calibration:
    """Run both graphs at every decoding width over the same tokens."""
    logits, target_ms = _survey(target)
    classes: list[list[int]] = []
    # Rounded to half precision, what one row's own kernels compute is often the same as
    # for several rows, and then is not: 6 rows of 318 (docs/log.md).
    halves = target.contract.dtype != "float32"
    for width in logits:
        for members in classes:
            alone = halves and members == [1]
            if not alone and np.array_equal(logits[members[0]], logits[width]):
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
        prefills_agree=_prefills_agree(target, found.exact_widths),
    )


def _survey(graph: Graph) -> tuple[dict[int, np.ndarray], dict[int, float]]:
    """Logits of the same rows, and the shortest pass time, by width.

    The widths take turns and the shortest time counts, since noise only adds: a busy
    second would otherwise bend the curve that the controller plans with.
    """
    limit, room = graph.contract.max_width, graph.contract.capacity
    starts = _fill(graph)
    rows = min(_ROWS, room - 1 - starts[0])
    tokens = _tokens(graph, rows)
    widest = min(WIDEST, limit, rows)
    # A pass that would be filled up is one of the width that it is filled up to.
    widths = [w for w in range(1, widest + 1) if graph.engines.width(w, room) == w]
    for width in widths:
        _settle(graph, partial(graph.run, tokens[:width]))
    logits = {width: _cover(graph, tokens, starts, width) for width in widths}
    _place(graph, starts[0])
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(_TURNS):
        for width in widths:
            before = graph.seconds
            graph.run(tokens[:width])
            seconds[width].append(graph.seconds - before)
    graph.cache.rewind(0)
    return logits, {width: 1e3 * min(times) for width, times in seconds.items()}


def _tokens(graph: Graph, count: int) -> list[int]:
    random = np.random.default_rng(0)
    found: list[int] = random.integers(0, graph.contract.vocab_size, count).tolist()
    return found


def _fill(graph: Graph) -> list[int]:
    """Random numbers in all buffers, and where to measure: early, midway and late.

    Kernels split long contexts, and add up the parts in an order of their own. Running
    tokens until the buffers are full would take as long as a long prompt.
    """
    random = np.random.default_rng(1)
    made: dict[tuple[int, ...], np.ndarray] = {}
    for spec in graph.contract.buffers("past"):
        shape = spec.sized()
        if shape not in made:
            numbers = random.standard_normal(shape, np.float32)
            integers = np.dtype(spec.dtype).kind in "iu"
            made[shape] = (numbers * 40 if integers else numbers).astype(spec.dtype)
        graph.cache.buffers[spec.name].update_inplace(made[shape])
    capacity = graph.contract.capacity
    early = min(_START, capacity // 4)
    late = max(early, capacity - 1 - _ROWS)
    return sorted({early, (early + late) // 2, late})


def _place(graph: Graph, start: int) -> None:
    """Count so many rows as committed."""
    graph.cache.rewind(0)
    graph.cache.advance(start)


def _settle(graph: Graph, run: Callable[[], object]) -> None:
    """Have a pass captured, so that what is measured is what will be replayed."""
    if graph.captures is not None:
        run()
        run()


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
    if not graph.contract.streams:
        return True
    ways = [
        (Probing(graph.contract.streams, last_only), branching)
        for branching in ((False, True) if graph.contract.tree else (False,))
        for last_only in (False, True)
    ]
    return _agree(graph, widths, ways)


def _trees_agree(graph: Graph, widths: list[int]) -> bool:
    """Whether a chain's rows are the same bit by bit, run as a branching draft."""
    if not graph.contract.tree or graph.engines.chain is graph.engines.any:
        return True
    return _agree(graph, widths, [(Probing(), True)])


def _prefills_agree(graph: Graph, widths: list[int]) -> bool:
    """Whether the rows of all prefill passes are those of decoding ones."""
    agree, step = True, widths[-1]
    for start in _fill(graph):
        for wide in prefill_widths(graph.contract):
            if wide > graph.contract.capacity - start:
                continue
            tokens = _tokens(graph, wide)
            _place(graph, start)
            whole = graph.run(tokens).logits.copy()
            # The last part overlaps the one before: the last rows are the odd ones.
            for at in [*range(0, wide - step, step), wide - step]:
                _place(graph, start + at)
                part = graph.run(tokens[at : at + step]).logits
                agree = agree and np.array_equal(whole[at : at + step], part)
    graph.cache.rewind(0)
    return agree


def prefill_widths(contract: StepContract) -> list[int]:
    """The passes that prompts are read in, widest first, above those of decoding.

    Multiples of the widest of those, since kernels take rows in twos or fours.
    """
    wide, found = contract.max_width, []
    while wide >= 2 * WIDEST:
        found.append(wide - wide % WIDEST)
        wide //= 2
    return found


def _agree(graph: Graph, widths: list[int], ways: list[tuple[Probing, bool]]) -> bool:
    """Whether rows run in other ways are those of a chain, early and late."""
    agree = True
    for start in _fill(graph):
        _place(graph, start)
        for width in widths:
            tokens = _tokens(graph, width)
            chain = _rows(graph, tokens, Probing(), False)
            for probing, branching in ways:
                other = _rows(graph, tokens, probing, branching)
                agree = agree and np.array_equal(chain, other)
    graph.cache.rewind(0)
    return agree


def _rows(
    graph: Graph, tokens: list[int], probing: Probing, branching: bool
) -> np.ndarray:
    """The logits of a chain, run as such or as a branching draft."""
    depths = range(len(tokens))
    seen = [list(range(row)) for row in depths]
    run = partial(graph.run, tokens)
    if branching:
        run = partial(graph.run_branches, tokens, depths, seen)
    graph.probing = probing
    _settle(graph, run)
    logits = run().logits.copy()
    graph.probing = Probing()
    return logits


def _cover(
    graph: Graph, tokens: list[int], starts: list[int], width: int
) -> np.ndarray:
    """Logits of the tokens after each start, in passes of one width.

    The last pass overlaps the one before, so that every pass is that wide.
    """
    rows = np.zeros((len(starts), len(tokens), graph.contract.vocab_size), np.float32)
    for place, start in enumerate(starts):
        ends = [*range(width, len(tokens), width), len(tokens)]
        for at in (end - width for end in ends):
            _place(graph, start + at)
            answer = graph.run(tokens[at : at + width])
            rows[place, at : at + width] = answer.logits
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
