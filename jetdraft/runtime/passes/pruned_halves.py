"""A target in two halves that drops unlikely rows between them (2402.11131, 3.1.3)."""

# A row stays if its parent stays and p_early(row | parent) >= threshold. The walk then
# accepts a shorter path at most; verifiers that read draft probabilities get a bias.

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

from jetdraft.contracts.step_contract import SplitContract
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import NO_PROBES, NO_PROBING, Probes, Probing, Rows
from jetdraft.runtime.passes.answer import Answer, Ran
from jetdraft.runtime.passes.binding import PassBinding
from jetdraft.runtime.passes.buffers import Cache
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.halves import Halves, PlacedRows, Size, SplitSessions

THRESHOLD_CHOICES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


class Threshold:
    """Picks from `THRESHOLD_CHOICES` what would have committed most tokens per second.

    A round shows it for any higher threshold; every `REFRESH` rounds keeps all rows.
    """

    MEMORY = 0.97  # The factor of earlier rounds' tokens and times at each round.
    REFRESH = 16

    def __init__(self) -> None:
        self._tokens = [0.0] * len(THRESHOLD_CHOICES)
        self._ms = [1e-9] * len(THRESHOLD_CHOICES)
        self._rounds = 0

    def choose(self) -> float:
        """The threshold of the next round; every `REFRESH` rounds it is 0."""
        self._rounds += 1
        if self._rounds % self.REFRESH == 1:
            return THRESHOLD_CHOICES[0]
        values = [t / ms for t, ms in zip(self._tokens, self._ms, strict=True)]
        return THRESHOLD_CHOICES[values.index(max(values))]

    def observe(
        self, used: float, outcome: Callable[[float], tuple[float, float]]
    ) -> None:
        """Learn from a round at `used`; `outcome(threshold)` is (tokens, ms)."""
        for index, threshold in enumerate(THRESHOLD_CHOICES):
            if threshold >= used:
                tokens, ms = outcome(threshold)
                self._tokens[index] = self._tokens[index] * self.MEMORY + tokens
                self._ms[index] = self._ms[index] * self.MEMORY + ms


_TIMING_TURNS = 3  # How often each width of the upper half is timed.
Compactions = Sequence[ort.InferenceSession | None]


class _PairedCache(Cache):
    """The lower half's cache, in step with the `upper` half's."""

    def __init__(self, contract: SplitContract, compactions: Compactions) -> None:
        super().__init__(contract.lower, compactions[0])
        self.upper = Cache(contract.upper, compactions[1])

    def advance(self, rows: int) -> None:
        super().advance(rows)
        self.upper.advance(rows)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.upper.rewind(length)

    def commit_both(self, lower: Sequence[int], upper: Sequence[int]) -> int:
        """Commit rows whose places in the lower and in the upper buffers differ."""
        before = self.upper.seconds
        self.upper.commit(upper)
        self.upper.rewind(self.length)  # `advance` counts the rows of both
        self.seconds += self.upper.seconds - before
        return self.commit(lower)


class PrunedHalves:
    """A `Target` that drops rows below the `threshold` between its halves."""

    def __init__(
        self, sessions: SplitSessions, compactions: Compactions, whole: Graph
    ) -> None:
        self.contract = sessions.contract.whole
        self.cache = _PairedCache(sessions.contract, compactions)
        buffers = self.cache.buffers, self.cache.upper.buffers
        self.halves = Halves(sessions, buffers, whole)
        self.threshold = 0.0
        self.widths: Sequence[int] = ()
        self.adaptive: Threshold | None = None
        self._kept: list[int] = []
        # The last draft: rows, early log probabilities, the lower half's ms, probes.
        self._draft: tuple[Rows, list[float], float, Probing]
        self._upper_times: dict[int, float] = {}
        self._probe_ms: float | None = None

    @property
    def seconds(self) -> float:
        return self.halves.seconds

    @property
    def passes(self) -> int:
        return self.halves.passes

    def prepare(self, threshold: float | None, widths: Sequence[int]) -> None:
        """Set the allowed widths and the threshold; with None the threshold adapts.

        Then it times the upper half at each width, and a probe, and rewinds to row 0.
        """
        self.widths = sorted(widths)
        self.adaptive = Threshold() if threshold is None else None
        self.threshold = threshold or 0.0
        if threshold is not None:
            return
        self.cache.rewind(0)
        times, narrow = self._upper_times, self.widths[0]
        for width in self.widths:
            if width not in times:
                times[width] = self._upper_ms(width, NO_PROBES)
        if self._probe_ms is None:
            probes = Probing(self.contract.streams).of(narrow)
            added_ms = self._upper_ms(narrow, probes) - times[narrow]
            self._probe_ms = max(added_ms, 0.0) / max(probes.total, 1)

    def _upper_ms(self, width: int, probes: Probes) -> float:
        rows, times = Rows.chain([0] * width), []
        below = self._run_lower(rows, width)
        for _ in range(_TIMING_TURNS):
            seconds_before = self.seconds
            self._run_upper(rows, below, list(range(width)), (width, width, probes))
            times.append(self.seconds - seconds_before)
        return 1e3 * min(times)

    def run(
        self, tokens: Sequence[int], last_only: bool = False, width: int = 0
    ) -> Answer:
        """Run one pass over a chain of tokens, without pruning and without probes."""
        rows, width = Rows.chain(list(tokens)), max(width, len(tokens))
        below = self._run_lower(rows, width)
        all_rows, answers = list(range(len(rows))), 1 if last_only else width
        answer = self._run_upper(rows, below, all_rows, (width, answers, NO_PROBES))
        return answer if last_only else answer.first(len(rows))

    def verify(self, rows: Rows, width: int, probing: Probing = NO_PROBING) -> Ran:
        """Run a draft; returns the rows that were kept, and their answer."""
        rows.check()
        if self.adaptive is not None:
            self.threshold = self.adaptive.choose()
        start = self.seconds
        below = self._run_lower(rows, width)
        scores = below.arrays["scores"][0].tolist()
        self._draft = rows, scores, 1e3 * (self.seconds - start), probing
        self._kept = self._prune(rows, scores, self.threshold)
        kept_rows = rows.only(self._kept)
        width = self.widths[bisect_left(self.widths, len(kept_rows))]
        probes = probing.of(len(kept_rows))
        if width + probes.total > self.cache.room:
            probes = NO_PROBES
        answer = self._run_upper(kept_rows, below, self._kept, (width, width, probes))
        return kept_rows, answer.first(len(kept_rows))

    def commit(self, path: Sequence[int], ends_at_gap: bool) -> int:
        """Commit the rows of a path; a row's places in the two buffers differ."""
        lower = [self._kept[row] for row in path]
        if self.adaptive is not None:
            self.adaptive.observe(self.threshold, lambda t: self._outcome_at(lower, t))
        if ends_at_gap:
            return self.cache.commit(lower, ends_at_gap)
        return self.cache.commit_both(lower, path)

    def _outcome_at(self, path: list[int], threshold: float) -> tuple[float, float]:
        """Tokens and milliseconds of the last round, had it had this threshold.

        `path` has the accepted rows, numbered as in the whole draft.
        """
        rows, scores, lower_ms, probing = self._draft
        kept = self._prune(rows, scores, threshold)
        width = self.widths[bisect_left(self.widths, len(kept))]
        probes = probing.of(len(kept)).total
        upper_ms = self._upper_times[width] + probes * (self._probe_ms or 0.0)
        return sum(row in kept for row in path), lower_ms + upper_ms

    @staticmethod
    def _prune(rows: Rows, scores: Sequence[float], threshold: float) -> list[int]:
        """The rows that stay: the root, and likely rows whose parents stay."""
        least = math.log(threshold) if threshold else -math.inf
        kept = [0]
        for row in range(1, len(rows)):
            if rows.parents[row] in kept and scores[row] >= least:
                kept.append(row)
        return kept

    def _run_lower(self, rows: Rows, width: int) -> PassBinding:
        placed, parents = PlacedRows.of(rows), [0, *rows.parents[1:]]
        return self.halves.run_lower(placed, width, self.cache.length, parents)

    def _run_upper(
        self, rows: Rows, below: PassBinding, kept: list[int], size: Size
    ) -> Answer:
        states, placed = below.arrays["hidden"][0][kept], PlacedRows.of(rows)
        return self.halves.run_upper(placed, states, size, self.cache.length)
