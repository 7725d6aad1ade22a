"""Which widths of a target agree bit by bit on this machine, and how long they take.

Kernels differ by width, and so may the last bit of a row's logits. Widths whose rows
are identical form a *class*; an exact generation stays inside one, so that its text
cannot depend on how rows were grouped into passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from jetdraft.contract import WIDEST, StepContract
from jetdraft.runtime.drafts.probes import NO_PROBING, Probing
from jetdraft.runtime.measured.curve import Curve
from jetdraft.runtime.passes.graph import Graph

_ROWS = 36
"""The most rows whose logits are compared."""

_START = 12
"""The first row of the earliest place that is compared."""

_TURNS = 5
"""How often each width is timed."""


@dataclass(frozen=True)
class Widths:
    """Which passes of a target agree bit by bit on this machine.

    classes         lists of widths whose rows are bit for bit the same
    gaps[w]         the largest logit difference between width w and the exact class
    probes_agree    probes change no bit of the rows of an exact pass
    trees_agree     a branching pass gives a chain's rows the same bits
    prefills_agree  the wide passes that read a prompt give the bits of decoding

        measure(target)[0].exact    # [2, 3, ..., 16]
    """

    classes: list[list[int]]
    gaps: dict[int, float]
    probes_agree: bool = True
    trees_agree: bool = True
    prefills_agree: bool = False

    @property
    def exact(self) -> list[int]:
        """The largest class; among equals, the class with the narrowest width."""
        return max(self.classes, key=lambda widths: (len(widths), -widths[0]))

    def allowed(self, exact: bool) -> list[int]:
        """The widths that a generation may use, ascending."""
        return self.exact if exact else sorted(self.gaps)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Widths:
        """Read `to_json`'s object; JSON turned the widths into text."""
        gaps = {int(width): float(gap) for width, gap in fields["gaps"].items()}
        classes = [[int(width) for width in members] for members in fields["classes"]]
        if sorted(width for members in classes for width in members) != sorted(gaps):
            raise ValueError("the classes do not hold every measured width once")
        return cls(
            classes,
            gaps,
            bool(fields["probes_agree"]),
            bool(fields["trees_agree"]),
            bool(fields["prefills_agree"]),
        )


def measure(target: Graph, drafter: Graph | None = None) -> tuple[Widths, Curve]:
    """Run the target at every decoding width over the same tokens.

    Gives the classes of its widths and the times of its passes; of the `drafter` only
    a pass over one row is timed.
    """
    logits, passes = _survey(target)
    classes: list[list[int]] = []
    # In half precision a pass over one row often gives the bits of wider passes, but
    # not always: 6 rows of 318 differed (docs/log/exactness.md). So it stays alone.
    half_precision = target.contract.dtype != "float32"
    for width in logits:
        for members in classes:
            stays_alone = half_precision and members == [1]
            if not stays_alone and np.array_equal(logits[members[0]], logits[width]):
                members.append(width)
                break
        else:
            classes.append([width])
    exact = Widths(classes, {}).exact
    # One session runs chains and trees alike, so their rows have the same bits.
    two_sessions = target.sessions.chain is not target.sessions.any
    widths = Widths(
        classes,
        {w: float(np.abs(rows - logits[exact[0]]).max()) for w, rows in logits.items()},
        probes_agree=_agree(target, exact, _probe_ways(target.contract)),
        trees_agree=_agree(target, exact, [(NO_PROBING, True)] if two_sessions else []),
        prefills_agree=_prefills_agree(target, exact),
    )
    drafter_ms = 0.0 if drafter is None else pass_times(drafter, [1])[1]
    return widths, Curve(passes, probe=_probe_ms(target), drafter=drafter_ms)


def pass_times(graph: Graph, widths: Sequence[int]) -> dict[int, float]:
    """The shortest time in milliseconds of a chain pass, by width.

    The widths take turns, since a busy second would otherwise slow the passes of one
    width only. The shortest time counts, since noise only makes a pass longer.
    """
    _place(graph, _fill(graph)[0])
    tokens = _tokens(graph, max(widths))
    for width in widths:
        _settle(graph, partial(graph.run, tokens[:width]))
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(_TURNS):
        for width in widths:
            before = graph.seconds
            graph.run(tokens[:width])
            seconds[width].append(graph.seconds - before)
    graph.cache.rewind(0)
    return {width: 1e3 * min(times) for width, times in seconds.items()}


def decoding_widths(graph: Graph) -> list[int]:
    """The widths that decoding may use, without those that run with padding rows."""
    limit, room = graph.contract.max_width, graph.contract.capacity
    rows = min(_ROWS, room - 1 - _starts(graph)[0])
    widest = min(WIDEST, limit, rows)
    return [w for w in range(1, widest + 1) if graph.sessions.width(w, room) == w]


def _survey(graph: Graph) -> tuple[dict[int, np.ndarray], dict[int, float]]:
    """The logits of the same tokens, and the pass times, both by width."""
    starts = _fill(graph)
    rows = min(_ROWS, graph.contract.capacity - 1 - starts[0])
    tokens, widths = _tokens(graph, rows), decoding_widths(graph)
    times = pass_times(graph, widths)
    _fill(graph)
    return {width: _cover(graph, tokens, starts, width) for width in widths}, times


def _tokens(graph: Graph, count: int) -> list[int]:
    """Random tokens: always the first `count` tokens of the same row of tokens."""
    random = np.random.default_rng(0)
    tokens: list[int] = random.integers(0, graph.contract.vocab_size, count).tolist()
    return tokens


def _fill(graph: Graph) -> list[int]:
    """Put random numbers into all buffers; gives `_starts`.

    To fill the buffers by running tokens would take as long as a long prompt.
    """
    random = np.random.default_rng(1)
    arrays: dict[tuple[int, ...], np.ndarray] = {}
    for spec in graph.contract.buffers("past"):
        shape = spec.sized()
        if shape not in arrays:
            numbers = random.standard_normal(shape, np.float32)
            integers = np.dtype(spec.dtype).kind in "iu"
            arrays[shape] = (numbers * 40 if integers else numbers).astype(spec.dtype)
        graph.cache.buffers[spec.name].update_inplace(arrays[shape])
    return _starts(graph)


def _starts(graph: Graph) -> list[int]:
    """The cursors to measure at: early, midway and late in the buffers.

    Kernels split a long context and add up its parts, so widths that agree early in the
    buffers may differ late in them.
    """
    capacity = graph.contract.capacity
    early = min(_START, capacity // 4)
    late = max(early, capacity - 1 - _ROWS)
    return sorted({early, (early + late) // 2, late})


def _place(graph: Graph, start: int) -> None:
    """Set the cursor to `start` committed rows."""
    graph.cache.rewind(0)
    graph.cache.advance(start)


def _settle(graph: Graph, run: Callable[[], object]) -> None:
    """Run a pass until it is captured, since decoding will replay the capture."""
    if graph.captures is not None:
        run()
        run()


def _probe_ms(graph: Graph) -> float:
    """The milliseconds that one probe adds to a pass of two rows."""
    streams, shortest = graph.contract.streams, []
    if not streams:
        return 0.0
    for probing in (NO_PROBING, Probing(streams)):
        times = []
        for _ in range(_TURNS):
            before = graph.seconds
            graph.run([0, 0], probing=probing)
            times.append(graph.seconds - before)
        shortest.append(min(times))
    return 1e3 * max(shortest[1] - shortest[0], 0.0) / (2 * streams)


Ways = list[tuple[Probing, bool]]
"""Ways to run a chain: the probes of its rows, and whether the pass is one for trees.
"""


def _probe_ways(contract: StepContract) -> Ways:
    """Probes of every row or of the last row only, in passes for chains and trees."""
    if not contract.streams:
        return []
    return [
        (Probing(contract.streams, last_only), branching)
        for branching in ((False, True) if contract.tree else (False,))
        for last_only in (False, True)
    ]


def _prefills_agree(graph: Graph, widths: list[int]) -> bool:
    """Whether the passes that read a prompt give the bits of decoding passes."""
    agree, step = True, widths[-1]
    for start in _fill(graph):
        for wide in prefill_widths(graph.contract):
            if wide > graph.contract.capacity - start:
                continue
            tokens = _tokens(graph, wide)
            _place(graph, start)
            whole = graph.run(tokens).logits.copy()
            # The last part is as wide as the others, so it may overlap the part before.
            for first in [*range(0, wide - step, step), wide - step]:
                _place(graph, start + first)
                part = graph.run(tokens[first : first + step]).logits
                agree = agree and np.array_equal(whole[first : first + step], part)
    graph.cache.rewind(0)
    return agree


def prefill_widths(contract: StepContract) -> list[int]:
    """The widths of the passes that read a prompt, widest first.

    All are multiples of the widest decoding pass, since kernels take rows in twos or
    fours.
    """
    wide, widths = contract.max_width, []
    while wide >= 2 * WIDEST:
        widths.append(wide - wide % WIDEST)
        wide //= 2
    return widths


def _agree(graph: Graph, widths: list[int], ways: Ways) -> bool:
    """Whether rows that run in other `ways` have the bits of a chain pass."""
    agree = True
    for start in _fill(graph) if ways else []:
        _place(graph, start)
        for width in widths:
            tokens = _tokens(graph, width)
            chain = _rows(graph, tokens, NO_PROBING, False)
            for probing, branching in ways:
                other = _rows(graph, tokens, probing, branching)
                agree = agree and np.array_equal(chain, other)
    graph.cache.rewind(0)
    return agree


def _rows(
    graph: Graph, tokens: list[int], probing: Probing, branching: bool
) -> np.ndarray:
    """The logits of a chain, run in a chain pass or in a branching pass."""
    depths = range(len(tokens))
    ancestors = [list(range(row)) for row in depths]
    run = partial(graph.run, tokens, probing=probing)
    if branching:
        run = partial(graph.run_branches, tokens, depths, ancestors, probing=probing)
    _settle(graph, run)
    return run().logits.copy()


def _cover(
    graph: Graph, tokens: list[int], starts: list[int], width: int
) -> np.ndarray:
    """Logits of the tokens after each start, in passes of one width.

    The last pass may overlap the pass before, so that every pass has that width.
    """
    shape = len(starts), len(tokens), graph.contract.vocab_size
    logits = np.zeros(shape, np.float32)
    for place, start in enumerate(starts):
        ends = [*range(width, len(tokens), width), len(tokens)]
        for end in ends:
            _place(graph, start + end - width)
            answer = graph.run(tokens[end - width : end])
            logits[place, end - width : end] = answer.logits
    return logits
