"""What rounds of one way to draft take by the clock, inside sessions and outside."""

from __future__ import annotations

from collections.abc import Callable

from jetdraft.runtime.measured.stats import Round

PassMs = Callable[[int, int], float]
"""The milliseconds of a pass, from its rows and its probes."""


class Line:
    """The line a + b * x of least squares through points, of which the last count most.

    Neither a nor b is negative. Points of one x leave the line open: then it is the
    shortest pair (a, b) that fits them.

        line = Line(memory=0.98)
        line.add(2.0, 0.5)
        line.at(7.0)
    """

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.count = self._x = self._xx = self._y = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """One more point."""
        self.count = self.memory * self.count + 1.0
        self._x = self.memory * self._x + x
        self._xx = self.memory * self._xx + x * x
        self._y = self.memory * self._y + y
        self._xy = self.memory * self._xy + x * y

    @property
    def share(self) -> float:
        """The mean y for each of 1 + x; 0 without points."""
        return self._y / (self.count + self._x) if self.count else 0.0

    def at(self, x: float) -> float:
        """The line's y; 0 without points."""
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
    """The milliseconds of a round, from those of its pass and from the rounds so far.

    Passes in a round take longer than passes that a survey runs one after another, and
    a round takes time outside them too, more with each drafted row, and more where
    tokens are drawn:

        pass     `pass_ms`, times how much longer the passes of the last rounds took
        outside  a + b * drafted rows, the line through the last rounds

        costs = RoundCosts(pass_ms)
        costs.learn(round_)
        costs.ms(rows=8, probes=16)
    """

    MEMORY = 0.98

    STALL = 3.0
    """A round counts as at most this many times what was expected of it."""

    def __init__(self, pass_ms: PassMs) -> None:
        self._pass_ms = pass_ms
        self.forget()

    def forget(self) -> None:
        """Return to the times of passes alone."""
        self._expected = self._taken = 0.0
        self._outside = Line(self.MEMORY)

    def learn(self, round_: Round) -> None:
        """Learn from the times of a round."""
        if not round_.seconds:
            return
        drafted = round_.drafted
        expected = self._pass_ms(1 + drafted, round_.probes)
        taken = 1e3 * round_.target_seconds
        outside = 1e3 * (round_.seconds - round_.target_seconds)
        if self._expected:
            taken = min(taken, self.STALL * self._longer * expected)
            # The line may be open, so that it says little of a draft of another size.
            most = self.STALL * self._outside.share * (1 + drafted)
            outside = min(outside, most)
        self._expected = self.MEMORY * self._expected + expected
        self._taken = self.MEMORY * self._taken + taken
        self._outside.add(drafted, outside)

    def ms(self, rows: int, probes: int) -> float:
        """The milliseconds of a round whose pass has `rows` rows, and `probes` too."""
        pass_ms = self._longer * self._pass_ms(rows, probes)
        return pass_ms + self._outside.at(rows - 1)

    @property
    def _longer(self) -> float:
        return self._taken / self._expected if self._expected else 1.0
