"""What passes, drafts and probes cost on this machine: measured, then learned."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from jetdraft.contracts.tensors import WIDEST
from jetdraft.parsing import Size, read_record
from jetdraft.runtime.measured.stats import Round

PassMs = Callable[[int, int], float]  # The ms of a pass by rows and probes.
MIN_MS = 1e-3  # A lower bound: `_blend_estimate` could never raise an estimate of 0.
MAX_MS = 1e6  # A quarter of an hour; a file with a longer time is refused.
ROUND_WEIGHT = 0.05  # The weight of one round in an estimate; one stall says little.
IDLE_FADING = 0.995  # The factor of a draft's price in a round without drafts.
# A time that this many rounds did not take is scaled like the times that they took.
IDLE_ROUNDS = 32
# A new generation may need another median at once, and two stalls change it little.
RECENT_ROUNDS = 5


@dataclass
class Curve:
    """Milliseconds on this machine; empty or 0 where nothing was measured.

    passes[w]       a pass of the target over a chain of w rows
    trees[w]        a pass of the target over w rows that branch
    compaction      moving the rows of an accepted branch together
    kept_row        what a committed row of recurrent states adds to the next pass
    probe           what one probe adds to a pass
    probed[w]       a pass over w rows that all carry all their probes
    ended[w]        a pass over w rows of which the last one carries its probes
    drafter         a pass of the drafter over one row
    drafts[method]  one drafted token
    experts[w]      how many experts the pass over w rows touched when it was measured
    expert          what one more expert adds to a pass

    `touched` has the experts that w rows of the text that is written would touch: a
    pass is priced by them, since text may choose fewer than the survey's random rows,
    or others in each row.

        Curve({1: 20.0, 4: 26.0}).pass_ms(2)    # 22.0
    """

    passes: dict[Size, float]
    trees: dict[Size, float] = field(default_factory=dict)
    compaction: float = 0.0
    probe: float = 0.0
    drafter: float = 0.0
    drafts: dict[str, float] = field(default_factory=dict)
    probed: dict[Size, float] = field(default_factory=dict)
    ended: dict[Size, float] = field(default_factory=dict)
    kept_row: float = 0.0
    experts: dict[Size, float] = field(default_factory=dict)
    expert: float = 0.0

    def __post_init__(self) -> None:
        self.touched: dict[int, int] = {}
        self._recent: dict[str, deque[float]] = {}
        self._rounds = 0
        self._last_used: dict[int | str, int] = {}  # a round, by width or method

    def pass_ms(self, width: int) -> float:
        """The milliseconds of a chain pass, on a line through the nearest widths."""
        more_ms = self._more_experts_ms(width, self.touched.get(width, 0))
        return max(_ms_between(self.passes, width) + more_ms, MIN_MS)

    def _more_experts_ms(self, width: int, touched: int) -> float:
        """What a pass takes more since it touched `touched` experts; 0 if unknown."""
        if not (self.expert and self.experts and touched):
            return 0.0
        return self.expert * (touched - _ms_between(self.experts, width))

    def probed_ms(self, width: int, probes: int, streams: int) -> float:
        """The milliseconds of a branching pass whose rows carry `probes` probes in all.

        On the line from one row to all rows with `streams`: the first probe costs more.
        """
        bare = self.tree_ms(width, ends_at_gap=True)
        if not probes:
            return bare
        if not (self.ended and self.probed):
            return bare + probes * self.probe
        few, many = (_ms_between(x, width) for x in (self.ended, self.probed))
        each = (many - few) / (streams * max(1, width - 1))
        return max(bare, few + (probes - streams) * max(0.0, each))

    def tree_ms(self, width: int, ends_at_gap: bool) -> float:
        """The milliseconds of a branching pass; a commit across gaps moves rows."""
        ms = max(self.trees.get(width, 0.0), self.pass_ms(width))
        return ms if ends_at_gap else ms + self.compaction

    def adopt(self, tuned: "Curve") -> None:
        """Replace the times by the times that `jetdraft tune` measured."""
        self.passes |= {w: ms for w, ms in tuned.passes.items() if w <= WIDEST}
        self.drafts |= tuned.drafts
        self._recent.clear()
        self.trees, self.compaction = dict(tuned.trees), tuned.compaction

    def learn(self, round_: Round) -> None:
        """Move the estimates a little towards the times of a round.

        What no recent round took moves as the widths in use do on average. The price of
        a token falls too while nothing is drafted, until a draft shows the true price.
        """
        self._rounds += 1
        slowness = 1.0  # of the pass of this round, against its estimate
        if round_.probes:
            added = round_.target_seconds * 1e3 - self.pass_ms(round_.width)
            per_probe = max(added / round_.probes, MIN_MS)
            self.probe = _blend_estimate(max(self.probe, MIN_MS), per_probe)
        elif round_.width in self.passes:
            before = self.passes[round_.width]
            more_ms = self._more_experts_ms(round_.width, round_.experts)
            ms = max(round_.target_seconds * 1e3 - more_ms, MIN_MS)
            after, slowness = _blend_estimate(before, ms), ms / before
            self._last_used[round_.width] = self._rounds
            # Not by the product of the moves of all widths in use: it would drift.
            idle = [*filter(self._is_idle, self.passes)]
            scale = (after / before) ** (1 / (len(self.passes) - len(idle)))
            self.passes |= {width: self.passes[width] * scale for width in idle}
            self.passes[round_.width] = after
            for method in filter(self._is_idle, [*self.drafts]):
                self.drafts[method] *= IDLE_FADING * scale
        for method, (drafted, seconds) in round_.asked.items():
            if not drafted or method not in self.drafts:
                continue
            recent = self._recent.setdefault(method, deque(maxlen=RECENT_ROUNDS))
            if self._is_idle(method):
                recent.clear()
            # Nobody measured a price of 0, or a price that fell.
            if method not in self._last_used and self.drafts[method]:
                recent.append(self.drafts[method])
            self._last_used[method] = self._rounds
            recent.append(seconds * 1e3 / drafted / slowness)
            self.drafts[method] = median_low(recent)

    def _is_idle(self, key: int | str) -> bool:
        return self._rounds - self._last_used.get(key, -IDLE_ROUNDS) >= IDLE_ROUNDS

    @classmethod
    def from_json(cls, fields: Any) -> "Curve":
        """Read its fields from JSON; raises `ValueError` where they are malformed."""
        curve: Curve = read_record(cls, fields)
        by_width = (curve.passes, curve.trees, curve.probed, curve.ended)
        others = [curve.compaction, curve.probe, curve.drafter, *curve.drafts.values()]
        others += [curve.kept_row, curve.expert, *curve.experts.values()]
        plausible = [0 < ms < MAX_MS for times in by_width for ms in times.values()]
        plausible += [0 <= ms < MAX_MS for ms in others]
        if not curve.passes or not all(plausible):
            raise ValueError("its times are missing or out of range")
        return curve


def _ms_between(times: Mapping[int, float], width: float) -> float:
    """The milliseconds of a width, on a line through the nearest measured widths."""
    if width in times:
        return times[int(width)]
    if len(times) == 1:
        return next(iter(times.values()))
    widths = sorted(times)
    # Outside of the measured widths the nearest line continues.
    at = min(max(bisect_left(widths, width), 1), len(widths) - 1)
    low, high = widths[at - 1 : at + 1]
    slope = (times[high] - times[low]) / (high - low)
    return times[low] + slope * (width - low)


def _blend_estimate(estimate: float, ms: float) -> float:
    """An estimate after one more measurement, cut to 1.5 times the estimate."""
    return estimate + ROUND_WEIGHT * (min(ms, 1.5 * estimate) - estimate)


class LinearFit:
    """The line a + b * x of least squares, 0 <= a, b; later points count more."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.count = self._x = self._xx = self._y = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a point; the weight of earlier points falls by `memory`."""
        self.count = self.memory * self.count + 1.0
        self._x = self.memory * self._x + x
        self._xx = self.memory * self._xx + x * x
        self._y = self.memory * self._y + y
        self._xy = self.memory * self._xy + x * y

    @property
    def mean_per_unit(self) -> float:
        """The sum of y over the sum of 1 + x; 0 without points."""
        return self._y / (self.count + self._x) if self.count else 0.0

    def at(self, x: float) -> float:
        """The y of the line at `x`; 0 without points."""
        if not self.count:
            return 0.0
        mean_x, mean_y = self._x / self.count, self._y / self.count
        spread = self._xx / self.count - mean_x**2
        if spread < 1e-6 * (1.0 + mean_x**2):
            return mean_y * (1.0 + x * mean_x) / (1.0 + mean_x**2)
        slope = (self._xy / self.count - mean_x * mean_y) / spread
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y + slope * (x - mean_x)


class RoundCosts:
    """Predicts the milliseconds of a round with one method and its options.

    pass     `pass_ms`, times how much longer the passes of the last rounds took
    outside  a + b * drafted rows, the line through the last rounds
    """

    MEMORY = 0.98
    # A round counts as at most this many times what was expected of it.
    MAX_STALL = 3.0

    def __init__(self, pass_ms: PassMs) -> None:
        self._pass_ms = pass_ms
        self.forget()

    def forget(self) -> None:
        """Drop what rounds have shown: only the times of passes are left."""
        self._expected = self._actual = 0.0
        self._outside = LinearFit(self.MEMORY)

    def learn(self, round_: Round) -> None:
        if not round_.seconds:
            return
        drafted = round_.drafted
        expected = self._pass_ms(1 + drafted, round_.probes)
        actual = 1e3 * round_.target_seconds
        outside = 1e3 * (round_.seconds - round_.target_seconds)
        if self._expected:
            actual = min(actual, self.MAX_STALL * self._slowdown * expected)
            # The line may be open, so that it says little of a draft of another size.
            most = self.MAX_STALL * self._outside.mean_per_unit * (1 + drafted)
            outside = min(outside, most)
        self._expected = self.MEMORY * self._expected + expected
        self._actual = self.MEMORY * self._actual + actual
        self._outside.add(drafted, outside)

    def round_ms(self, rows: int, probes: int) -> float:
        """The milliseconds of a round whose pass has `rows` rows and `probes`."""
        return self._slowdown * self._pass_ms(rows, probes) + self._outside.at(rows - 1)

    @property
    def _slowdown(self) -> float:
        """How many times `pass_ms` the passes of the last rounds took."""
        return self._actual / self._expected if self._expected else 1.0


class Profit:
    """The milliseconds that a planned round gains on average, negative if it loses.

    With p the time of a round without a draft, which commits one token:

        gain = tokens * p - the time of the round
        rest = -average / (SHARE * p) rounds, if the average is negative

    So planning that gains nothing takes `SHARE` of the time. What a method takes to
    read the text, and to draft in vain, is its debt; its gains and `PAID` of the time
    pay it back. With a debt of more than `CREDIT` rounds it is not asked to read more.
    """

    WEIGHT = 0.1  # The weight of one planned round.
    SHARE = 0.01  # The share of the time that vain planning may take.
    PAID = 0.002  # The share of the time that pays debts.
    CREDIT = 64.0  # The rounds that a method may lose before it waits.
    MAX_PLANNED = 96  # The most rounds with a draft before a plain round is timed.
    MAX_REST = 128  # The most rounds without a plan in a row.

    def __init__(self) -> None:
        self.average_ms = 0.0
        self._prepared_ms = 0.0  # what the probes of the last round cost
        self._plain_ms: deque[float] = deque(maxlen=RECENT_ROUNDS)
        self._usual_ms = 0.0  # of the last plain round, in any text
        self._rounds = self._measured = 0  # all, and those up to the last plain one
        self._spent_ms = 0.0  # the time of all rounds
        self._asked: dict[str, int] = {}  # a method's last round in this text
        self._debts: dict[str, float] = {}  # of methods that read, with what time paid

    def begin(self, pass_ms: float) -> None:
        """Start a generation; `pass_ms` stands for a plain round until there is one."""
        self._usual_ms = self._usual_ms or pass_ms
        self._asked.clear()
        self._plain_ms.clear()
        self._prepared_ms = 0.0

    def may_ask(self, method: str) -> bool:
        """Whether a method has few rows to read, or owes little."""
        if self._rounds - self._asked.get(method, -WIDEST) < WIDEST:
            return True
        owed = self._debts.get(method, 0.0) - self.PAID * self._spent_ms
        return owed <= self.CREDIT * self._usual_ms

    def add_plain(self, round_: Round) -> None:
        """Add the time of a round without a draft, less its `draft_seconds`."""
        self._rounds += 1
        self._spent_ms += 1e3 * round_.seconds
        if round_.seconds:
            self._measured = self._rounds
            self._usual_ms = 1e3 * (round_.seconds - round_.draft_seconds)
            self._plain_ms.append(self._usual_ms)

    def add_planned(self, round_: Round) -> int:
        """Learn from a planned round; returns for how many rounds not to plan."""
        is_vain = not round_.drafted and not round_.probes
        if is_vain:
            self.add_plain(round_)
        else:
            self._rounds += 1
            self._spent_ms += 1e3 * round_.seconds
        for method, (_, seconds) in round_.asked.items():
            self._asked[method] = self._rounds
            late_ms = 1e3 * round_.late.get(method, 0.0)
            if method in self._debts or late_ms > self.SHARE * self._usual_ms:
                own_ms = 0.0 if method == round_.method else 1e3 * seconds
                self._owe(method, own_ms + late_ms)
        if not round_.seconds:
            return 0
        if self._rounds - self._measured >= self.MAX_PLANNED:
            return 1
        plain_ms = median_low(self._plain_ms or [self._usual_ms])
        spent_ms = min(1e3 * round_.seconds, 2 * plain_ms * (1 + round_.drafted))
        gain_ms = (1 + round_.accepted) * plain_ms - spent_ms - self._prepared_ms
        if round_.probes and not round_.drafted and not self._prepared_ms:
            self._prepared_ms = -gain_ms  # the next round drafts with its probes
            return 0
        self._prepared_ms = 0.0
        if is_vain:
            gain_ms = -1e3 * round_.draft_seconds
        elif round_.drafted and round_.method in self._debts:
            self._owe(round_.method, -gain_ms)
        if not self._plain_ms:
            return 0  # rounds of the text before may have taken another time
        self.average_ms += self.WEIGHT * (gain_ms - self.average_ms)
        rest = max(0.0, -self.average_ms) / (self.SHARE * plain_ms)
        return min(self.MAX_REST, int(rest))

    def _owe(self, method: str, ms: float) -> None:
        paid = self.PAID * self._spent_ms
        self._debts[method] = max(self._debts.get(method, paid) + ms, paid)
