"""Measures this machine's curve with care: more widths, more turns, all proposers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jetdraft.devices.providers import PROVIDERS
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.measured.cost_model import Curve
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.buffers import Cache
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.session import threads_of_pair
from jetdraft.runtime.proposers.proposer import Proposer, Seen
from jetdraft.runtime.sampling.chooser import Chooser, Sampling

Tick = Callable[[], None]

WIDEST_MEASURED = 32
TURNS = 7
DRAFTED = 4
"""Tokens per draft when proposers are timed."""


def tune(model: Model, tick: Tick = lambda: None) -> Curve:
    """Measure this machine with care, let the model plan with the curve, and keep it.

    `tick` is called `steps(model)` times.
    """
    with model.parts.held():
        return _tune(model, tick)


def _tune(model: Model, tick: Tick) -> Curve:
    parts = model.parts
    while parts.survey.step():
        tick()
    parts.target.prepare(exact=True)
    drafter_threads = _best_drafter_threads(model)
    curve = _measure(parts.target, model.planner.proposers(), tick)
    model.forget()  # the measurement ran random tokens
    parts.profiles.keep(
        parts.profiles.tuning_file,
        versions={"onnxruntime": ort.__version__, "numpy": np.__version__},
        curve=curve.to_json(),
        drafter_threads=drafter_threads,
    )
    parts.curve.take(curve)
    return curve


def steps(model: Model) -> int:
    """The number of calls of `tick` in `tune`."""
    return model.parts.survey.left + TURNS + len(model.planner.proposers())


def _measure(target: Graph, proposers: Mapping[str, Proposer], tick: Tick) -> Curve:
    """Measure passes by width and the drafts of each proposer, by method.

    The widths take turns and the shortest time counts, since noise only adds.
    """
    context = _context(target)
    widths = _widths(target)
    start = min(len(context) // 2, target.contract.capacity - widths[-1] - 1)
    target.cache.rewind(0)
    for first in range(0, start, target.contract.max_width):
        part = context[first : min(start, first + target.contract.max_width)]
        target.run(part, last_only=True)
        target.cache.advance(len(part))
    tree = target.contract.tree
    passes, trees = dict[int, float](), dict[int, float]()
    for _ in range(TURNS):
        for width in widths:
            tokens = context[:width]
            ms = _ms(partial(target.run, tokens), target)
            passes[width] = min(ms, passes.get(width, ms))
            if tree and width > 1:
                # All rows are children of the root, so no row sees another.
                depths, ancestors = [0] + [1] * (width - 1), [[], *[[0]] * (width - 1)]
                run_tree = partial(target.run_branches, tokens, depths, ancestors)
                ms = _ms(run_tree, target)
                trees[width] = min(ms, trees.get(width, ms))
        tick()
    compaction = _compaction(target) if tree else 0.0
    drafts = {}
    for name, proposer in proposers.items():
        drafts[name] = _draft_ms(proposer, context, target)
        tick()
    target.cache.rewind(0)
    return Curve(passes, trees, compaction, drafts=drafts)


def _best_drafter_threads(model: Model) -> int:
    """One thread or all for the drafter: what makes a round of this pair shorter.

    Opens the pair a second time. A new number counts from the next load on.
    """
    parts, bundle = model.parts, model.bundle
    own, entry = parts.drafter_threads, bundle.drafter
    both_on_cpu = parts.profiles.machine["provider"] == "cpu"
    if parts.drafter is None or entry is None or not both_on_cpu or parts.threads == 1:
        return own
    model.forget()
    parts.target.cache.rewind(0)
    other = parts.threads if own == 1 else 1
    openers = [
        Opener(bundle, PROVIDERS["cpu"], threads)
        for threads in threads_of_pair(parts.threads, other)
    ]
    target, drafter = (
        opener.graph(graph)
        for opener, graph in zip(openers, (bundle.target, entry), strict=True)
    )
    pairs = {own: (parts.target, parts.drafter), other: (target, drafter)}
    seconds: dict[int, float] = {}
    for _ in range(TURNS):
        for number, pair in pairs.items():
            _round_seconds(*pair)  # the threads of the other pair go to sleep
            round_seconds = min(_round_seconds(*pair) for _ in range(3))
            seconds[number] = min(round_seconds, seconds.get(number, round_seconds))
    return min(seconds, key=lambda number: seconds[number])


def _round_seconds(target: Graph, drafter: Graph) -> float:
    """The seconds of a round with a draft of `DRAFTED` tokens."""
    start = time.perf_counter()
    for _ in range(1 if drafter.contract.guesses else DRAFTED):
        drafter.run([0])
    target.run([0] * (1 + DRAFTED))
    return time.perf_counter() - start


def _widths(target: Graph) -> range:
    most = min(target.contract.max_width, target.contract.capacity // 4)
    return range(1, min(WIDEST_MEASURED, most) + 1)


def _context(target: Graph) -> list[int]:
    """Tokens that repeat themselves, so that every proposer has a guess."""
    random = np.random.default_rng(0)
    size = min(64, target.contract.capacity // 4)
    tokens: list[int] = random.integers(0, target.contract.vocab_size, size).tolist()
    return tokens * 2


def _ms(run: Callable[[], Any], timed: Graph | Cache) -> float:
    """The milliseconds that a call spends inside sessions.

    A controller learns the same time from each round.
    """
    seconds_before = timed.seconds
    run()
    return 1e3 * (timed.seconds - seconds_before)


def _compaction(target: Graph) -> float:
    """The milliseconds to move one row."""
    length = target.cache.length

    def move() -> None:
        target.cache.compact([0, 2])
        target.cache.rewind(length)

    return min(_ms(move, target.cache) for _ in range(TURNS))


def _show(proposer: Proposer, context: Sequence[int], target: Graph) -> None:
    """Let a proposer observe the target's passes over a context, as a head must."""
    target.cache.rewind(0)
    while rest := context[target.cache.length :]:
        part = list(rest[: target.contract.max_width])
        answer = target.run(part, last_only=True)
        target.cache.advance(len(part))
        length = target.cache.length + 1
        proposer.observe(Seen(length, Rows.chain(part), range(len(part)), answer))


def _draft_ms(proposer: Proposer, context: Sequence[int], target: Graph) -> float:
    """The median milliseconds of a drafted token, in short drafts.

    Each draft comes after one more token of the context.
    """
    middle = len(context) // 2
    proposer.begin(context[:middle], Chooser(Sampling()))
    if target.contract.feature_size:
        _show(proposer, context, target)
    seconds, drafted = [], 0
    for end in range(middle + 1, len(context) - DRAFTED):
        start = time.perf_counter()
        count = proposer.propose(context[:end], DRAFTED).drafted
        if count:
            seconds.append((time.perf_counter() - start) / count)
            drafted += count
    return 1e3 * float(np.median(seconds)) if drafted else 0.0
