"""What planning drafts has gained, by the clock.

To look for a draft takes time in every round, also where none is found or none pays:
beside a pass of half a millisecond a tenth of it.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

from jetdraft.runtime.measured.stats import Round

WEIGHT = 0.1
"""The weight of one planned round."""

SHARE = 0.01
"""The share of the time that vain planning may take."""

LONGEST = 64
"""The most rounds without a plan in a row."""

RECENT = 5
"""Rounds whose median is the time of a round without a plan; one may have stalled."""


class Profit:
    """The milliseconds that a planned round gains on average, negative if it loses.

    With p the time of a round without a draft, which commits one token:

        gain = tokens * p - the time of the round
        rest = -average / (SHARE * p) rounds, if the average is negative

    So planning that gains nothing takes `SHARE` of the time, and planning that gains
    goes on round after round.

        profit = Profit()
        profit.plain(round_)
        profit.planned(round_)    # 0: plan the next round too
    """

    def __init__(self) -> None:
        self.average_ms = 0.0
        self._plain_ms: deque[float] = deque(maxlen=RECENT)

    def begin(self) -> None:
        """A new generation, which may choose its tokens in another way."""
        self._plain_ms.clear()

    def plain(self, round_: Round) -> None:
        """Take the time of a round without a plan, or the rest of a vain round."""
        if round_.seconds:
            self._plain_ms.append(1e3 * (round_.seconds - round_.draft_seconds))

    def planned(self, round_: Round) -> int:
        """Learn from a planned round; how many rounds should go without a plan."""
        if not round_.drafted and not round_.probes:
            self.plain(round_)
        if not self._plain_ms or not round_.seconds:
            return 0
        plain_ms = median_low(self._plain_ms)
        # A stall says nothing of the plan.
        spent_ms = min(1e3 * round_.seconds, 2 * plain_ms * (1 + round_.drafted))
        gain_ms = (1 + round_.accepted) * plain_ms - spent_ms
        if not round_.drafted and not round_.probes:
            gain_ms = -1e3 * round_.draft_seconds
        self.average_ms += WEIGHT * (gain_ms - self.average_ms)
        return min(LONGEST, int(max(0.0, -self.average_ms) / (SHARE * plain_ms)))
