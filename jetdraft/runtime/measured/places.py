"""The places in a target's buffers where passes are compared and timed.

Kernels split a long context and add up its parts, so widths that agree early in the
buffers may differ late in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from jetdraft.contracts.constants import WIDEST
from jetdraft.runtime.passes.graph import Graph

ROWS = 36
"""The most rows whose logits are compared at a place."""

_START = 12
"""The first row of the earliest place in empty buffers."""

_LEAST_ROOM = 2 * ROWS
"""Rows of room without which the committed rows are given up."""

_TURNS = 5
"""How often each width is timed."""


def decoding_widths(graph: Graph) -> list[int]:
    """The widths that decoding may use, without those that run with padding rows."""
    capacity = graph.contract.capacity
    rows = min(ROWS, capacity - 1 - min(_START, capacity // 4))
    widest = min(WIDEST, graph.contract.max_width, rows)
    widths = range(1, widest + 1)
    return [w for w in widths if graph.sessions.width(w, capacity) == w]


def tokens_of(graph: Graph, count: int) -> list[int]:
    """Random tokens: always the first `count` tokens of the same row of tokens."""
    random = np.random.default_rng(0)
    tokens: list[int] = random.integers(0, graph.contract.vocab_size, count).tolist()
    return tokens


@contextmanager
def filled(graph: Graph) -> Iterator[list[int]]:
    """Fill the buffers with random numbers; gives the cursors to measure at.

    They lie early, midway and late after the committed rows, which stay valid: neither
    the cursor nor the count of passes moves for anybody else. Where the committed rows
    leave no room they are lost. To fill the buffers by running tokens would take as
    long as a long prompt.
    """
    cache, passes = graph.cache, graph.passes
    length = cache.length if cache.room >= _LEAST_ROOM else 0
    is_lost = length < cache.length
    _fill(graph, length)
    early = max(length, min(_START, cache.capacity // 4))
    late = max(early, cache.capacity - 1 - ROWS)
    try:
        yield sorted({early, (early + late) // 2, late})
    finally:
        place(graph, length)
        if not is_lost:
            graph.passes = passes


def room(graph: Graph, starts: Sequence[int]) -> int:
    """How many rows can be compared at each place."""
    return min(ROWS, graph.cache.capacity - 1 - starts[-1])


def _fill(graph: Graph, length: int) -> None:
    random = np.random.default_rng(1)
    arrays: dict[tuple[int, ...], np.ndarray] = {}
    for spec in graph.contract.buffers("past"):
        shape, buffer = spec.sized(), graph.cache.buffers[spec.name]
        if shape not in arrays:
            numbers = random.standard_normal(shape, np.float32)
            integers = np.dtype(spec.dtype).kind in "iu"
            arrays[shape] = (numbers * 40 if integers else numbers).astype(spec.dtype)
        if length:
            whole = np.array(buffer.numpy())
            whole[:, :, length:] = arrays[shape][:, :, length:]
            buffer.update_inplace(whole)
        else:
            buffer.update_inplace(arrays[shape])


def place(graph: Graph, start: int) -> None:
    """Set the cursor to `start` rows."""
    graph.cache.rewind(0)
    graph.cache.advance(start)


def settle(graph: Graph, run: Callable[[], object]) -> None:
    """Run a pass until it is captured, since decoding will replay the capture."""
    if graph.captures is not None:
        run()
        run()


def pass_times(
    graph: Graph, widths: Sequence[int], turns: int = _TURNS
) -> dict[int, float]:
    """The shortest time in milliseconds of a chain pass, by width.

    The widths take turns, since a busy second would otherwise slow the passes of one
    width only. The shortest time counts, since noise only makes a pass longer.
    """
    with filled(graph) as starts:
        place(graph, starts[0])
        tokens = tokens_of(graph, max(widths))
        for width in widths:
            settle(graph, partial(graph.run, tokens[:width]))
        seconds: dict[int, list[float]] = {width: [] for width in widths}
        for _ in range(turns):
            for width in widths:
                before = graph.seconds
                graph.run(tokens[:width])
                seconds[width].append(graph.seconds - before)
    return {width: 1e3 * min(times) for width, times in seconds.items()}
