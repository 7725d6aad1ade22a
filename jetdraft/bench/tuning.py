"""Measures pass times on this machine: more widths than at load, all proposers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from jetdraft.devices.providers import PROVIDERS
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import Rows, Tokens
from jetdraft.runtime.measured.cost_model import Curve
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.buffers import Cache
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.session import threads_of_pair
from jetdraft.runtime.proposers.proposer import Proposer, Seen
from jetdraft.runtime.sampling.chooser import Chooser, Sampling

Tick = Callable[[], None]
WIDEST_MEASURED = 32  # The largest width that is measured.
TURNS = 7  # How often each width is measured; the shortest time counts.
DRAFT_TOKENS = 4  # Tokens per draft when proposers are timed.


def tune(model: Model, tick: Tick = lambda: None) -> Curve:
    """Measure pass and draft times, keep them in the bundle, and plan with them."""
    parts = model.parts
    with parts.held():
        while parts.survey.step():
            tick()
        parts.target.prepare(exact=True)
        drafter_threads = _best_drafter_threads(model)
        curve = _time_curve(parts.target, model.planner.proposers(), tick)
        model.forget()  # the measurement ran random tokens
        parts.profiles.keep(
            parts.profiles.tuning_file,
            versions={"onnxruntime": ort.__version__, "numpy": np.__version__},
            curve=asdict(curve),
            drafter_threads=drafter_threads,
        )
        parts.curve.adopt(curve)
    return curve


def count_steps(model: Model) -> int:
    """The number of calls of `tick` in `tune`."""
    return model.parts.survey.steps_left + TURNS + len(model.planner.proposers())


def _time_curve(target: Graph, proposers: Mapping[str, Proposer], tick: Tick) -> Curve:
    """Measure passes in turns by width; the shortest counts, since noise only adds."""
    contract, cache = target.contract, target.cache
    # Tokens that repeat themselves, so that every proposer has a guess.
    size = min(64, contract.capacity // 4)
    context = np.random.default_rng(0).integers(0, contract.vocab_size, size).tolist()
    context *= 2
    widest = min(contract.max_width, contract.capacity // 4, WIDEST_MEASURED)
    start = min(len(context) // 2, contract.capacity - widest - 1)
    _run_target(target, context[:start])
    passes, trees = dict[int, float](), dict[int, float]()
    for _ in range(TURNS):
        for width in range(1, widest + 1):
            tokens = context[:width]
            ms = _ms(partial(target.run, tokens), target)
            passes[width] = min(ms, passes.get(width, ms))
            if contract.tree and width > 1:
                # All rows are children of the root, so no row sees another.
                depths, ancestors = [0] + [1] * (width - 1), [[], *[[0]] * (width - 1)]
                run_tree = partial(target.run_branches, tokens, depths, ancestors)
                ms = _ms(run_tree, target)
                trees[width] = min(ms, trees.get(width, ms))
        tick()

    def move() -> None:
        cache.commit([0, 2])
        cache.rewind(start)

    moves = TURNS if contract.tree else 0
    compaction = min((_ms(move, cache) for _ in range(moves)), default=0.0)
    drafts = {}
    for name, proposer in proposers.items():
        drafts[name] = _draft_ms(proposer, context, target)
        tick()
    cache.rewind(0)
    return Curve(passes, trees, compaction, drafts=drafts)


def _best_drafter_threads(model: Model) -> int:
    """Return the drafter's threads, one or all, that give shorter rounds."""
    parts, bundle = model.parts, model.bundle
    own, entry = parts.drafter_threads, bundle.drafter
    both_on_cpu = parts.profiles.machine["provider"] == "cpu"
    if parts.drafter is None or entry is None or not both_on_cpu or parts.threads == 1:
        return own
    model.forget()
    parts.target.cache.rewind(0)
    other = parts.threads if own == 1 else 1
    threads = threads_of_pair(parts.threads, other)
    openers = (Opener(bundle, PROVIDERS["cpu"], own_threads) for own_threads in threads)
    pairs_to_open = zip(openers, (bundle.target, entry), strict=True)
    target, drafter = (opener.graph(graph) for opener, graph in pairs_to_open)
    pairs = {own: (parts.target, parts.drafter), other: (target, drafter)}
    seconds: dict[int, float] = {}
    for _ in range(TURNS):
        for number, pair in pairs.items():
            _round_seconds(*pair)  # the threads of the other pair go to sleep
            round_seconds = min(_round_seconds(*pair) for _ in range(3))
            seconds[number] = min(round_seconds, seconds.get(number, round_seconds))
    return min(seconds, key=lambda number: seconds[number])


def _round_seconds(target: Graph, drafter: Graph) -> float:
    """Time a round with `DRAFT_TOKENS` drafted tokens, without commit, in seconds."""
    start = time.perf_counter()
    for _ in range(1 if drafter.contract.guesses else DRAFT_TOKENS):
        drafter.run([0])
    target.run([0] * (1 + DRAFT_TOKENS))
    return time.perf_counter() - start


def _ms(run: Callable[[], Any], timed: Graph | Cache) -> float:
    seconds_before = timed.seconds
    run()
    return 1e3 * (timed.seconds - seconds_before)


def _run_target(target: Graph, text: Tokens, proposer: Proposer | None = None) -> None:
    target.cache.rewind(0)
    while rest := text[target.cache.length :]:
        part = list(rest[: target.contract.max_width])
        answer = target.run(part, last_only=True)
        target.cache.advance(len(part))
        if proposer is not None:
            seen = Rows.chain(part), range(len(part)), answer
            proposer.observe(Seen(target.cache.length + 1, *seen))


def _draft_ms(proposer: Proposer, context: Sequence[int], target: Graph) -> float:
    """Time drafts: the median ms of a drafted token; 0.0 if nothing was drafted."""
    middle = len(context) // 2
    proposer.begin(context[:middle], Chooser(Sampling()))
    if target.contract.feature_size:
        _run_target(target, context, proposer)
    proposer.least, seconds = 0.0, []
    for end in range(middle + 1, len(context) - DRAFT_TOKENS):
        start = time.perf_counter()
        count = proposer.propose(context[:end], DRAFT_TOKENS).drafted
        if count:
            seconds.append((time.perf_counter() - start) / count)
    return 1e3 * float(np.median(seconds)) if seconds else 0.0
