"""What rounds show: the cost of a generation, how drafts fared, rates of guesses."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple


class Round(NamedTuple):
    """What one round did: propose, verify and commit.

    `ranks` has a pair for each drafted token that was compared with a chosen token, the
    accepted tokens and the first wrong token: the rank of the right sibling, and the
    number of siblings, which is the rank too if all were wrong. `probes` drafted for
    the next round. `off` says why this had no draft. `asked` maps each method that was
    asked to its offered rows and seconds, `late` to the seconds in which it read rows
    of earlier rounds. `evidence` is the proposer's for this draft.
    `seconds` is the time of the whole round without `late`, 0 if it was not taken.
    `draft_seconds` is the time until the draft was there, or given up, without `late`
    too, `commit_seconds` of moving accepted rows together.
    `experts` counts the experts of all layers that the pass touched.
    """

    method: str
    width: int
    drafted: int
    ranks: list[tuple[int, int]]
    target_seconds: float
    draft_seconds: float
    probes: int = 0
    off: str = ""
    asked: Mapping[str, tuple[int, float]] = MappingProxyType({})
    late: Mapping[str, float] = MappingProxyType({})
    evidence: int = 0
    seconds: float = 0.0
    commit_seconds: float = 0.0
    experts: int = 0

    @property
    def evaluated(self) -> int:
        """How many drafted tokens were compared with a chosen token."""
        return len(self.ranks)

    @property
    def accepted(self) -> int:
        """How many drafted tokens were right."""
        return sum(rank < count for rank, count in self.ranks)


def _add(one: object, other: object, names: Iterable[str]) -> None:
    for name in names:
        setattr(one, name, getattr(one, name) + getattr(other, name))


@dataclass
class MethodStats:
    """What one method did; "none" stands for rounds without a draft.

    `saved_ms` is the time of its tokens one by one, less the time of its rounds.
    """

    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    new_tokens: int = 0
    saved_ms: float = 0.0
    evaluated_tokens: int = 0

    def merge(self, other: "MethodStats") -> None:
        """Add what the method did in another generation."""
        _add(self, other, vars(other))


@dataclass
class Stats:
    """Sums over the rounds of one generation.

    `waited_seconds` is the caller's time between pieces; no metric counts it.
    `plain_ms` is the time of a pass without a draft on this machine. `off` counts the
    rounds without a draft by their reason. `reused_tokens` of the prompt were in the
    buffers already. `lossy` names the options that may change the distribution of the
    text. `seed` is the seed of a sampled text, also where it was drawn at random. A
    pass read `select_kv` of the committed KV rows; None for all. `thought_tokens` of
    the `new_tokens` were a thought. `picture_tokens` of the prompt are rows of images,
    and a drafter without eyes had the image's token in place of `unseen_tokens`.
    """

    method: str
    exact: bool
    prompt_tokens: int
    seed: int | None = None
    lossy: str = ""
    select_kv: int | None = None
    reused_tokens: int = 0
    picture_tokens: int = 0
    unseen_tokens: int = 0
    generations: int = 0
    new_tokens: int = 0
    thought_tokens: int = 0
    target_passes: int = 0
    drafted_tokens: int = 0
    evaluated_by_position: list[int] = field(default_factory=list)
    accepted_counts: list[int] = field(default_factory=list)
    rounds_by_choice: Counter[str] = field(default_factory=Counter)
    time_to_first_token: float = 0.0
    first_tokens: int = 0
    decode_seconds: float = 0.0
    waited_seconds: float = 0.0
    session_seconds: float = 0.0
    finish_reason: str = ""
    plain_ms: float = 0.0
    by_method: dict[str, MethodStats] = field(default_factory=dict)
    off: Counter[str] = field(default_factory=Counter)

    def add(self, round_: Round, committed: int) -> None:
        """Count a round; the text took `committed` of its tokens."""
        self.target_passes += 1
        self.new_tokens += committed
        self.drafted_tokens += round_.drafted
        grow = round_.evaluated - len(self.evaluated_by_position)
        self.evaluated_by_position += [0] * grow
        self.accepted_counts += [0] * grow
        for position in range(round_.evaluated):
            self.evaluated_by_position[position] += 1
            self.accepted_counts[position] += position < round_.accepted
        choice = f"{round_.method}:{round_.drafted}" if round_.drafted else "none"
        self.rounds_by_choice[choice] += 1
        spent = round_.target_seconds + round_.draft_seconds + round_.commit_seconds
        counts = round_.drafted, round_.accepted, committed
        saved_ms = committed * self.plain_ms - 1e3 * spent
        share = MethodStats(1, *counts, saved_ms, round_.evaluated)
        self.by_method.setdefault(round_.method, MethodStats()).merge(share)
        if round_.off:
            self.off[round_.off] += 1

    def time_round(self, elapsed: float, tokens: int, session_seconds: float) -> None:
        """Set the times after a round that committed `tokens` tokens.

        `elapsed` seconds count from the start of the generation, `session_seconds`
        inside `session.run` from the first round.
        """
        if self.target_passes == 1:
            # Prefill and the first round are not decoding.
            self.time_to_first_token, self.first_tokens = elapsed, tokens
            self.generations = 1
        self.session_seconds = session_seconds
        self.decode_seconds = elapsed - self.time_to_first_token

    def merge(self, other: "Stats") -> None:
        """Add another generation's sums to these."""
        _add(self, other, _SUM_NAMES)
        for name in ("evaluated_by_position", "accepted_counts"):
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [a + b for a, b in pairs])
        for method, share in other.by_method.items():
            self.by_method.setdefault(method, MethodStats()).merge(share)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were right, also past a limit that ended the text."""
        return sum(self.accepted_counts)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / evaluated drafted tokens; None if none was evaluated."""
        evaluated = sum(self.evaluated_by_position)
        return self.accepted_tokens / evaluated if evaluated else None

    @property
    def accepted_by_position(self) -> list[float]:
        """The acceptance rate at each draft position, the first position first."""
        pairs = zip(self.accepted_counts, self.evaluated_by_position, strict=True)
        return [accepted / evaluated for accepted, evaluated in pairs]

    @property
    def tokens_per_pass(self) -> float | None:
        """Committed tokens / target passes of decoding, the new token included."""
        return self.new_tokens / self.target_passes if self.target_passes else None

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of decoding: tokens after the first round / seconds after it."""
        tokens = self.new_tokens - self.first_tokens
        return tokens / self.decode_seconds if tokens and self.decode_seconds else None

    @property
    def outside_ms_per_round(self) -> float | None:
        """Milliseconds of a decoding round outside `session.run`; None if unknown."""
        rounds = self.target_passes - self.generations
        outside = self.decode_seconds - self.session_seconds
        return 1e3 * outside / rounds if rounds > 0 else None

    def to_json(self) -> dict[str, Any]:
        """All metrics, under the names of the documentation."""
        shares = {name: vars(share) for name, share in self.by_method.items()}
        return {name: getattr(self, name) for name in _METRICS} | {"by_method": shares}


_SUM_NAMES = (
    *("generations", "prompt_tokens", "reused_tokens", "new_tokens", "first_tokens"),
    *("target_passes", "drafted_tokens", "decode_seconds", "session_seconds"),
    *("rounds_by_choice", "off", "thought_tokens", "picture_tokens", "unseen_tokens"),
)
_METRICS = (
    *("method", "exact", "lossy", "select_kv", "seed", "finish_reason"),
    *("prompt_tokens", "reused_tokens", "picture_tokens", "unseen_tokens"),
    *("new_tokens", "thought_tokens"),
    *("target_passes", "drafted_tokens", "accepted_tokens"),
    *("acceptance_rate", "accepted_by_position", "tokens_per_pass"),
    *("tokens_per_second", "time_to_first_token", "outside_ms_per_round"),
    *("rounds_by_choice", "by_method", "off"),
)

RankRates = Sequence[Sequence[float]]  # By depth: of the best guess, the second, ...


class PositionRates:
    """Success rates by position, weighted to new events; `RUN` failures erase them."""

    WEIGHT = 1.0  # How many trials the prior counts for.
    MEMORY, FADING = 0.95, 0.99  # Factors: at an event, after a round without.
    RUN = 12

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.successes: list[float] = []
        self.trials: list[float] = []
        self._failures_in_a_row: list[int] = []
        self._rounds_without = 0

    def fade(self) -> None:
        """Note a round without such events; the counts fade when they are needed."""
        self._rounds_without += 1

    def _apply_fading(self) -> None:
        """Multiply the counts by `FADING` for each round without events so far."""
        if self._rounds_without:
            left = self.FADING**self._rounds_without
            self.successes = [x * left for x in self.successes]
            self.trials = [x * left for x in self.trials]
            self._rounds_without = 0

    def observe(self, outcomes: Sequence[bool]) -> None:
        """Count the outcomes of one series of events, from position 0 on."""
        self._apply_fading()
        grow = len(outcomes) - len(self.trials)
        self.successes += [0.0] * grow
        self.trials += [0.0] * grow
        self._failures_in_a_row += [0] * grow
        if outcomes and all(outcomes):  # places behind them were not tried
            behind = slice(len(outcomes), None)
            for counts in (self.successes, self.trials):
                counts[behind] = [x * self.MEMORY for x in counts[behind]]
        for place, success in enumerate(outcomes):
            failures = 0 if success else self._failures_in_a_row[place] + 1
            self._failures_in_a_row[place] = failures
            if failures >= self.RUN:
                self.successes[place] = 0.0
                self.trials[place] = float(failures)
                continue
            self.successes[place] = self.successes[place] * self.MEMORY + success
            self.trials[place] = self.trials[place] * self.MEMORY + 1

    def rates(self, length: int) -> list[float]:
        """The rate at each position below `length`, given successes before it."""
        self._apply_fading()
        rates, rate = [], self.prior
        counts = [*zip(self.successes, self.trials, strict=True)]
        counts += [(0.0, 0.0)] * (length - len(counts))
        for successes, trials in counts[:length]:
            rate = (successes + self.WEIGHT * rate) / (trials + self.WEIGHT)
            rates.append(rate)
        return rates


class Acceptance:
    """Running acceptance of a proposer's drafts, by position, sibling and evidence."""

    PRIOR = 0.9
    SIBLING_PRIOR = 0.3

    def __init__(self) -> None:
        self.places = PositionRates(self.PRIOR)
        self.by_evidence: dict[int, PositionRates] = {}
        # A success is a wrong sibling: the series of siblings ends with the right one.
        self.siblings = PositionRates(1.0 - self.SIBLING_PRIOR)

    def fade(self) -> None:
        """Let the rates fade after a round without a draft of this proposer."""
        for streak in (self.places, self.siblings, *self.by_evidence.values()):
            streak.fade()

    def observe(self, round_: Round) -> None:
        """Count what a round accepted of its draft, by depth, evidence and sibling."""
        outcomes = [rank == 0 for rank, _ in round_.ranks]
        self.places.observe(outcomes)
        if round_.evidence:
            self._evidence_rates(round_.evidence).observe(outcomes)
        for rank, count in round_.ranks:
            if rank and count > 1:
                right_sibling = [False] if rank < count else []
                self.siblings.observe([True] * (rank - 1) + right_sibling)

    def rates(self, length: int, evidence: int | None = 0) -> list[float]:
        """The rates of first siblings at depths 1..length, given right ancestors.

        None as evidence is for a draft that is not made yet: it may be the best.
        """
        if evidence:
            return self._evidence_rates(evidence).rates(length)
        if evidence is None and self.by_evidence:
            return [1.0] * length
        return self.places.rates(length)

    def _evidence_rates(self, evidence: int) -> PositionRates:
        return self.by_evidence.setdefault(evidence, PositionRates(prior_of(evidence)))

    def sibling_shares(self, count: int) -> list[float]:
        """How often sibling 2, 3, ... is right where the first sibling is wrong."""
        all_wrong, shares = 1.0, []
        for wrong in self.siblings.rates(count):
            shares.append(all_wrong * (1.0 - wrong))
            all_wrong *= wrong
        return shares


def prior_of(evidence: int) -> float:
    """The acceptance rate to expect of drafts with this evidence: 0.5, 0.75, ..."""
    return float(1.0 - 0.5**evidence)


class GuessRates:
    """How often guesses, drafted or not, are right; the rates begin at `priors`."""

    WEIGHT = 40.0  # How many guesses the priors count for.
    MEMORY = 0.995

    def __init__(self, priors: RankRates) -> None:
        self._priors = [list(rates) for rates in priors]
        self.forget()

    def forget(self) -> None:
        self.settled = 0
        """How many guesses were compared with the text."""
        self._trials = [self.WEIGHT] * len(self._priors)
        self._hits = [[self.WEIGHT * r for r in rates] for rates in self._priors]
        self._waiting: dict[int, list[tuple[int, list[int]]]] = {}

    def begin(self) -> None:
        """Start another text: drop the guesses not compared yet, keep the rates."""
        self._waiting = {}

    def add_guesses(self, guesses: Mapping[int, Sequence[int]]) -> None:
        """Add guesses by position in the text, best first; the first has depth 0."""
        for depth, (place, tokens) in enumerate(guesses.items()):
            self._waiting.setdefault(place, []).append((depth, list(tokens)))

    def compare(self, first: int, tokens: Sequence[int]) -> None:
        """Compare guesses with the text's `tokens`, from position `first` on."""
        for place, token in enumerate(tokens, first):
            for depth, guessed in self._waiting.pop(place, []):
                rank = guessed.index(token) if token in guessed else -1
                self.settled += 1
                self._trials[depth] = self._trials[depth] * self.MEMORY + 1
                hits = enumerate(self._hits[depth])
                self._hits[depth] = [n * self.MEMORY + (i == rank) for i, n in hits]

    @property
    def ranks(self) -> list[list[float]]:
        """The rate of each rank at each depth, best guess first."""
        pairs = zip(self._hits, self._trials, strict=True)
        return [[hits / trials for hits in of_ranks] for of_ranks, trials in pairs]
