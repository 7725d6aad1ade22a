"""Proves widths of a target one by one, and times their passes on the way."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from threading import RLock

import numpy as np

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import WIDEST
from jetdraft.runtime.claim import StoppedError
from jetdraft.runtime.drafts.rows import NO_PROBING, Probing, Tokens
from jetdraft.runtime.measured.cost_model import Curve
from jetdraft.runtime.measured.widths import Profiles, Widths, prefill_widths
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.text.worker_process import MustEnd, never

FIRST_WIDTHS = (2, 4)  # The widths that the first generation waits for, if they agree.
NEXT_WIDTHS = (1, 8, 6, 3)  # The widths that come after these, before all others.
MIN_ROWS, MAX_ROWS = 8, 36  # Rows that are compared at each place.
# How long widths beyond `FIRST_WIDTHS` are compared before the first text, at most.
FIRST_MS = 1500.0
TURNS = 5  # How often a pass is timed; the shortest time counts.
_FIRST_PLACE = 12  # The first row of the earliest place in empty buffers.
_MIN_ROOM = 2 * MAX_ROWS  # Rows of room without which the committed rows are given up.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)
# The probes of a chain, and None or a branching pass's rows between root and chain.
PassMode = tuple[Probing, int | None]
PLAIN: PassMode = (NO_PROBING, None)
Part = tuple[slice, np.ndarray]  # The rows of a pass, and their logits.


class Survey:
    """What is known of a target's widths and pass times; `step` finds out more."""

    def __init__(
        self, target: Graph, drafter: Graph | None, profiles: Profiles | None = None
    ) -> None:
        self.target, self.drafter, self.profiles = target, drafter, profiles
        self.announce: Callable[[], object] = lambda: None
        self._must_stop: MustEnd = never
        self._lock = RLock()
        self._starts: list[int] = []
        stored = None if profiles is None else profiles.read_survey()
        self._widths: Widths | None = stored[0] if stored else None
        self._is_begun = stored is not None
        self._curve = stored[1] if stored else Curve({})
        self._gaps: dict[frozenset[int], float] = {}
        # A profile may be of a busy minute: its passes are timed once more.
        self._is_timed = stored is None

    @property
    def widths(self) -> Widths:
        """What is known of the widths; the first call measures."""
        if not self._is_begun:  # asked first: a step holds the lock for long
            self.begin()
        assert self._widths is not None
        return self._widths

    @property
    def curve(self) -> Curve:
        """The times of passes; the first call measures."""
        if not self._is_begun:
            self.begin()
        return self._curve

    @property
    def steps_left(self) -> int:
        compared = self.widths.prefills_agree is not None
        return len(self.widths.untried) + (not compared) + (not self._is_timed)

    def begin(self) -> None:
        """Compare and time the first widths, unless that was done before."""
        with self._lock:
            if self._widths is not None:
                return
            self.announce()
            start = time.perf_counter()
            self.target.prepare(exact=True)
            with randomized(self.target) as self._starts:
                widths = self._compare_first_widths()
                self._curve.probe = self._measure_probe_ms()
                self._curve.kept_row = self._measure_kept_row_ms()
                self._curve.expert = self._measure_expert_ms()
            self._time_drafter()
            self._widths = widths
            until, clock = 1e-3 * FIRST_MS + start, time.perf_counter
            while self.steps_left and clock() + self._step_seconds() <= until:
                self._do_next_step()
            self._save()
            # Until now no other thread may claim the buffers.
            self._is_begun = True

    def step(self, must_stop: MustEnd = never) -> bool:
        """Do one step; False when none is left, `StoppedError` once `must_stop()`."""
        with self._lock:
            if not self.steps_left:
                return False
            self._must_stop = must_stop
            try:
                self._do_next_step()
            finally:
                self._must_stop = never
            self._save()
            return True

    def finish(self) -> None:
        while self.step():
            pass

    def measure_again(self) -> None:
        """Measure everything again; the largest class becomes the exact class."""
        with self._lock:
            self._widths, self._curve, self._gaps = None, Curve({}), {}
            self._is_begun = False
            self.begin()
            self.finish()
            first_exact = self.widths.exact
            known = replace(self.widths, base=None)
            gaps = self._gaps_to_exact(known)
            classes = sorted(sorted(members) for members in known.classes)
            self._widths = replace(known, classes=classes, gaps=gaps)
            if self._widths.exact != first_exact:
                # What was compared for another exact class must be compared again.
                self.target.prepare(exact=True)
                with randomized(self.target) as self._starts:
                    known = self._with_modes(self.widths)
                    agree = all(self._compare_prefills())
                    self._widths = replace(known, prefills_agree=agree)
            self._save()

    def _save(self) -> None:
        if self.profiles is not None:
            self.profiles.write_survey(self.widths, self._curve)

    def _step_seconds(self) -> float:
        """An estimate of the seconds of the next step, by the curve so far."""
        known, curve, places = self.widths, self._curve, len(self._starts)
        widest = known.exact[-1]
        if known.untried:
            width = known.untried[0]
            rows = max(MIN_ROWS, width)
            pairs = [(width, -(-rows // width)), (widest, -(-rows // widest))]
        else:
            wide = prefill_widths(self.target.contract)
            pairs = [(w, 1) for w in wide] + [(widest, sum(wide) // widest)]
        return 1e-3 * places * sum(curve.pass_ms(w) * passes for w, passes in pairs)

    def _compare_first_widths(self) -> Widths:
        """Compare and time widths until two agree; returns what is known then."""
        widths = decoding_widths(self.target)
        order = sorted(widths, key=(*FIRST_WIDTHS, *NEXT_WIDTHS, *widths).index)
        known = Widths([], {}, untried=tuple(order))
        deque(self._passes(self._starts[0], order[0], order[0]), 0)  # to time it
        while known.untried and (not known.classes or len(known.exact) < 2):
            known = self._compare_next_width(known)
        known = replace(known, base=known.exact[0])
        return self._with_modes(replace(known, gaps=self._gaps_to_exact(known)))

    def _with_modes(self, known: Widths) -> Widths:
        """Return `known`, with the agreement of probes, trees and skips measured."""
        contract, exact = self.target.contract, known.exact
        skips = contract.tree and all(self._agrees(w, skip_modes(w)) for w in exact)
        probes = all(self._agrees(w, probe_modes(contract)) for w in exact)
        trees = skips or all(self._agrees(w, self._tree_modes) for w in exact)
        return replace(known, probes_agree=probes, trees_agree=trees, skips_agree=skips)

    def _do_next_step(self) -> None:
        """Compare the next width, or at last the passes that read prompts."""
        known = self.widths
        self.target.prepare(exact=True)  # a lossy generation may have left it otherwise
        with randomized(self.target) as self._starts:
            if known.untried:
                known = self._compare_next_width(known)
                self._widths = replace(known, gaps=self._gaps_to_exact(known))
            elif known.prefills_agree is not None:
                for width in [*self._curve.passes] * 2:  # the shortest times stay
                    tokens = random_tokens(self.target, width)
                    self._run_pass(self._starts[0], tokens, PLAIN)
                self._time_drafter()
                self._is_timed = True
            else:
                agree = all(self._compare_prefills())
                self._widths = replace(known, prefills_agree=agree)

    def _time_drafter(self) -> None:
        """Time a pass of the drafter behind its rows, which stay valid."""
        if self.drafter is None or not self.drafter.cache.room:
            return
        passes = self.drafter.passes
        known, ms = self._curve.drafter, _shortest_ms(self.drafter, [0])
        self._curve.drafter, self.drafter.passes = min(ms, known or ms), passes

    def _compare_next_width(self, known: Widths) -> Widths:
        """Compare the next width; returns `known` with the width in its class."""
        width, *untried = known.untried
        exact = known.exact if known.classes else []
        for members in sorted(known.classes, key=lambda m: sorted(m) != exact):
            gap = self._measure_gap(max(members), width)
            self._gaps[frozenset((members[0], width))] = gap
            if gap == 0.0 and self._may_join(known, members, width):
                joined = [[*m, width] if m is members else m for m in known.classes]
                break
        else:
            joined = [*known.classes, [width]]
        gaps = {**known.gaps, width: 0.0}
        return replace(known, classes=joined, gaps=gaps, untried=tuple(untried))

    def _may_join(self, known: Widths, members: list[int], width: int) -> bool:
        """Whether a width with a class's bits may join: probes and trees count too."""
        # In half precision one row may differ from wide passes (docs/log/exactness.md).
        alone = width == 1 or members == [1]
        if alone and self.target.contract.dtype != "float32":
            return False
        if known.base not in members:
            return True
        modes = probe_modes(self.target.contract) if known.probes_agree else []
        trees = self._tree_modes if known.trees_agree else []
        if known.skips_agree:
            trees = skip_modes(width)
        return self._agrees(width, [*modes, *trees])

    def _gaps_to_exact(self, known: Widths) -> dict[int, float]:
        """The largest logit difference between each width and the exact class."""
        exact = next(m for m in known.classes if sorted(m) == known.exact)
        gaps = dict.fromkeys(exact, 0.0)
        for members in known.classes:
            pair = frozenset((exact[0], members[0]))
            for width in members:
                gaps.setdefault(width, self._gaps.get(pair, known.gaps[members[0]]))
        return gaps

    def _measure_gap(self, one: int, other: int) -> float:
        """The largest difference between the logits of two widths; 0 for equal bits."""
        room = self.target.cache.capacity - 1 - self._starts[-1]
        rows = min(max(MIN_ROWS, one, other), MAX_ROWS, room)
        logits = np.zeros((rows, self.target.contract.vocab_size), np.float32)
        gap = 0.0
        for start in self._starts:
            for part, found in self._passes(start, rows, one):
                logits[part] = found
            for part, found in self._passes(start, rows, other):
                if not np.array_equal(logits[part], found):
                    # NaN and differences below the smallest number count too.
                    most = float(np.nanmax(np.abs(logits[part] - found)))
                    gap = min(max(gap, most, _SMALLEST), _LARGEST)  # JSON has no inf
        return gap

    def _passes(self, start: int, rows: int, width: int) -> Iterator[Part]:
        """Run `rows` rows in passes of a width; the next pass overwrites its logits."""
        tokens = random_tokens(self.target, rows)
        self.target.cache.set_states({})
        firsts = [*range(0, rows - width, width), rows - width]
        for first, following in pairwise([*firsts, rows]):
            part = slice(first, first + width)
            yield part, self._run_pass(start + first, tokens[part], PLAIN)
            self.target.cache.advance(following - first)

    def _run_pass(
        self, start: int, tokens: list[int], mode: PassMode, last_only: bool = False
    ) -> np.ndarray:
        """Run and time a pass at `start`; returns logits. Raises `StoppedError`."""
        if self._must_stop():
            raise StoppedError
        graph, (probing, skipped) = self.target, mode
        graph.cache.place(start)
        run = partial(graph.run, tokens, last_only, probing=probing)
        chain = [*range(len(tokens))]
        if skipped is not None:
            chain = [0, *chain[1 + skipped :]]
            depths = [0, *[1] * skipped, *range(1, len(chain))]
            below = (chain[:row] for row in range(1, len(chain)))
            above = [[], *[[0]] * skipped, *below]
            run = partial(graph.run_branches, tokens, depths, above, probing=probing)
        run_until_captured(graph, run)
        before = graph.seconds
        answer = run()
        ms, times = 1e3 * (graph.seconds - before), self._curve.passes
        if probing.streams:
            times = self._curve.ended if probing.last_only else self._curve.probed
        rows = len(tokens)
        if rows <= WIDEST and (probing.streams or skipped is None):
            times[rows] = min(ms, times.get(rows, ms))
            if times[rows] == ms and graph.contract.experts:
                self._curve.experts[rows] = answer.touched
        return answer.logits if skipped is None else answer.logits[chain]

    def _agrees(self, width: int, modes: list[PassMode]) -> bool:
        """Whether passes of all modes give the bits of a chain pass."""
        tokens = random_tokens(self.target, width)
        for start in self._starts if modes else []:
            chain = self._run_pass(start, tokens, PLAIN).copy()
            for mode in modes:
                kept = len(tokens) - (mode[1] or 0)
                rows = [tokens[0], *tokens[kept:], *tokens[1:kept]]
                if not np.array_equal(chain[:kept], self._run_pass(start, rows, mode)):
                    return False
        return True

    @property
    def _tree_modes(self) -> list[PassMode]:
        """The mode of tree passes; empty where one session runs chains and trees."""
        sessions = self.target.sessions
        return [] if sessions.chain is sessions.any else [(NO_PROBING, 0)]

    def _compare_prefills(self) -> Iterator[bool]:
        """Yield for each wide pass whether it leaves the KV rows of decoding."""
        graph, step = self.target, self.widths.exact[-1]
        for start in self._starts:
            for wide in prefill_widths(graph.contract):
                if wide >= graph.contract.capacity - start:
                    continue
                graph.cache.set_states({})
                self._run_pass(start, random_tokens(graph, wide), PLAIN, last_only=True)
                graph.cache.advance(wide)
                rows = self._rows_after(start, wide)
                deque(self._passes(start, wide, step), 0)
                yield all(map(np.array_equal, rows, self._rows_after(start, wide)))

    def _rows_after(self, start: int, rows: int) -> list[np.ndarray]:
        """Copies of KV rows [1, kv_heads, rows, head_dim], with states also logits."""
        buffers = self.target.cache.buffers.values()
        copies = [b.numpy()[:, :, start : start + rows].copy() for b in buffers]
        if self.target.contract.states:
            copies.append(self._run_pass(start + rows, [0], PLAIN).copy())
        return copies

    def _measure_probe_ms(self) -> float:
        """The milliseconds that a probe adds to a pass over two rows, or 0."""
        graph, streams = self.target, self.target.contract.streams
        if not streams:
            return 0.0
        graph.cache.place(self._starts[0])
        modes = NO_PROBING, Probing(streams)
        bare, probed = (_shortest_ms(graph, [0, 0], probing) for probing in modes)
        return max(probed - bare, 0.0) / (2 * streams)

    def _measure_expert_ms(self) -> float:
        """The milliseconds that an expert adds, by equal and by random rows; or 0."""
        graph = self.target
        if not graph.contract.experts:
            return 0.0
        tokens, measured = random_tokens(graph, decoding_widths(graph)[-1]), []
        for rows in (tokens[:1] * len(tokens), tokens):
            graph.cache.place(self._starts[0])
            shortest = _shortest_ms(graph, rows)
            measured.append((graph.run(rows).touched, shortest))
        (few, few_ms), (many, many_ms) = measured
        return max(many_ms - few_ms, 0.0) / (many - few) if many > few else 0.0

    def _measure_kept_row_ms(self) -> float:
        """What a committed row adds to the pass that takes it up; 0 without states."""
        graph, cache, shortest = self.target, self.target.cache, list[float]()
        if not graph.contract.states:
            return 0.0
        widest = decoding_widths(graph)[-1]
        for rows in (0, widest):
            times = []
            for _ in range(TURNS):
                cache.place(self._starts[0])
                graph.run([0] * widest)
                cache.advance(rows)
                times.append(_time_pass(graph, [0]))
            shortest.append(1e3 * min(times))
        return max(shortest[1] - shortest[0], 0.0) / widest


def _time_pass(graph: Graph, tokens: Tokens, probing: Probing = NO_PROBING) -> float:
    before = graph.seconds
    graph.run(tokens, probing=probing)
    return graph.seconds - before


def _shortest_ms(graph: Graph, tokens: Tokens, probing: Probing = NO_PROBING) -> float:
    return 1e3 * min(_time_pass(graph, tokens, probing) for _ in range(TURNS))


def probe_modes(contract: StepContract) -> list[PassMode]:
    """The modes with probes: of all rows or the last, in chain and tree passes."""
    if not contract.streams:
        return []
    modes = product((None, 0) if contract.tree else (None,), (False, True))
    return [(Probing(contract.streams, last), skipped) for skipped, last in modes]


def skip_modes(width: int) -> list[PassMode]:
    """The modes of branching passes in which a part of the chain skips rows."""
    return [(NO_PROBING, n) for n in sorted({1, width // 2}) if n < width]


def decoding_widths(graph: Graph) -> list[int]:
    """The widths that decoding may use, except widths that run with padding rows."""
    capacity = graph.contract.capacity
    rows = min(MAX_ROWS, capacity - 1 - min(_FIRST_PLACE, capacity // 4))
    widths = range(1, min(WIDEST, graph.contract.max_width, rows) + 1)
    return [w for w in widths if graph.sessions.width(w, capacity) == w]


def random_tokens(graph: Graph, count: int) -> list[int]:
    """Random token ids: always the first `count` of the same sequence."""
    random = np.random.default_rng(0)
    return list(map(int, random.integers(0, graph.contract.vocab_size, count)))


@contextmanager
def randomized(graph: Graph) -> Iterator[list[int]]:
    """Fill free rows with random numbers; yields early, middle and late cursors."""
    cache, passes = graph.cache, graph.passes
    length = cache.length if cache.room >= _MIN_ROOM else 0
    is_lost, states = length < cache.length, cache.copy_states()
    is_ahead = cache.is_ahead and not is_lost
    random, arrays = np.random.default_rng(1), dict[tuple[int, ...], np.ndarray]()
    for spec in graph.contract.buffers("past"):
        shape, buffer = spec.shape_for(), cache.buffers[spec.name]
        if shape not in arrays:
            numbers = random.standard_normal(shape, np.float32)
            integers = np.dtype(spec.dtype).kind in "iu"
            arrays[shape] = (numbers * 40 if integers else numbers).astype(spec.dtype)
        whole = arrays[shape]
        if length:
            whole = np.array(buffer.numpy())
            whole[:, :, length:] = arrays[shape][:, :, length:]
        buffer.update_inplace(whole)
    early = max(length, min(_FIRST_PLACE, cache.capacity // 4))
    late = max(early, cache.capacity - 1 - MAX_ROWS)
    try:
        yield sorted({early, (early + late) // 2, late})
    finally:
        graph.cache.place(length)
        cache.set_states({} if is_lost else states)
        cache.is_ahead = is_ahead
        if not is_lost:
            graph.passes = passes


def run_until_captured(graph: Graph, run: Callable[[], object]) -> None:
    """Run a pass twice where graphs are captured, since decoding replays captures."""
    if graph.captures is not None:
        run()
        run()


def pass_times(graph: Graph, widths: Sequence[int]) -> dict[int, float]:
    """The shortest milliseconds of a chain pass by width, measured in turns."""
    with randomized(graph) as starts:
        graph.cache.place(starts[0])
        tokens = random_tokens(graph, max(widths))
        for width in widths:
            run_until_captured(graph, partial(graph.run, tokens[:width]))
        turns = [[_time_pass(graph, tokens[:w]) for w in widths] for _ in range(TURNS)]
    return dict(zip(widths, (1e3 * np.min(turns, 0)).tolist(), strict=True))
