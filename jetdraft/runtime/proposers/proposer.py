"""The interface of proposers and observers; a generation knows nothing else of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jetdraft.contracts.tensors import WIDEST
from jetdraft.runtime.drafts.rows import Kind, Rows, Tokens
from jetdraft.runtime.measured.stats import Round, Stats
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.text.constraint import Matcher

Parents = Sequence[int] | None  # The parents of rows 1, 2, ...; row 0 is the root.


@dataclass(frozen=True)
class Traits:
    """What controllers and verifiers know of a proposer.

    name              the method's name
    max_draft_tokens  the longest draft that it makes
    kind              how it picks the children of a row, see `Kind`
    ms_per_token      a first guess of the time of a drafted token
    probes            how many probes of the target a row can carry for it, or 0
    branches          whether it drafts a tree when a controller asks for one
    stops             whether its chains end by its own doubt, see `Proposer.least`
    blind             whether it drafts with a model that reads no images

        Traits("repeat", max_draft_tokens=15, kind=Kind.COUPLED, ms_per_token=1.2)
    """

    name: str
    max_draft_tokens: int
    kind: Kind = Kind.DETERMINISTIC
    ms_per_token: float = 0.0
    probes: int = 0
    branches: bool = False
    stops: bool = False
    blind: bool = False


@dataclass(frozen=True)
class Seen:
    """What one pass of the target showed, in a round or while it reads a prompt.

    `rows` were run, and `path` are the accepted rows, row 0 first. `answer` is valid
    until the next pass; of a prompt it has the last row only. `length` counts the
    tokens of the sequence with the newly chosen token.
    """

    length: int
    rows: Rows
    path: Sequence[int]
    answer: Answer


class Observer:
    """Watches generations, whoever proposes in them; here all methods do nothing."""

    def begin(self, prompt: Tokens, chooser: Chooser) -> None:
        """Start a new generation, whose tokens `chooser` picks; forget the last."""

    def observe(self, seen: Seen) -> None:
        """Take a pass of the target, whoever proposed its rows."""

    def learn_times(self, round_: Round) -> None:
        """Learn from the times of a round, after `observe` has seen its pass."""

    def end(self, prompt: Tokens, response: Tokens, user: str, stats: Stats) -> None:
        """End a generation that was neither closed early nor failed."""


class Proposer(Observer, ABC):
    """Guesses how a sequence continues. A wrong guess costs time, never text."""

    traits: Traits

    evidence: int = 0
    """What the last draft rests on: drafts with the same number are right alike. 0 if
    the proposer knows no difference. It is known after `propose` only, so a proposer
    that has it is asked in every round: its drafts must cost next to nothing."""

    least: float = 0.0
    """A chain that `stops` ends when its probabilities multiply to less than this."""

    @property
    def session_seconds(self) -> float:
        """The seconds that it spent inside `session.run` so far; here 0."""
        return 0.0

    def keep(self, kept: int) -> int:
        """How many of the first `kept` rows of a prompt it need not observe: all."""
        return kept

    def catch_up(self, context: Tokens) -> None:
        """Run what is missing of `context` before `propose`, which is timed."""

    @abstractmethod
    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """At most `budget` >= 1 rows below the root, `context[-1]`; or the root alone.

        The last tokens of `context` may not be proven yet and can be withdrawn.
        `parents`, the parent of rows 1, 2, ... as in `Static`, asks a proposer that
        `branches` for a tree; it may give another shape.
        """

    def forget(self) -> None:
        """Reset what was learned, see `Model.forget`; here nothing."""


class ForcedProposer(Proposer):
    """Drafts the tokens that a constraint forces."""

    traits = Traits("forced", max_draft_tokens=WIDEST - 1)

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """A chain of the tokens that must come next; the root alone without any."""
        return Rows.chain([context[-1], *self._matcher.forced(context, budget)])


class ConstrainedProposer(Proposer):
    """Drafts forced tokens first, then rows of `inner` that the constraint allows."""

    def __init__(self, inner: Proposer, matcher: Matcher) -> None:
        self._inner, self._matcher, self.traits = inner, matcher, inner.traits

    @property
    def session_seconds(self) -> float:
        return self._inner.session_seconds

    def keep(self, kept: int) -> int:
        return self._inner.keep(kept)

    def catch_up(self, context: Tokens) -> None:
        self._inner.catch_up(context)

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """The forced tokens, and below them the allowed rows of the inner draft."""
        self.evidence, self._inner.least = 0, self.least
        forced = self._matcher.forced(context, budget)
        if len(forced) == budget:
            return Rows.chain([context[-1], *forced], self.traits.kind)
        if forced:
            rows = self._inner.propose([*context, *forced], budget - len(forced))
            rows = rows.under([context[-1], *forced[:-1]])
        else:
            rows = self._inner.propose(context, budget, parents)
            self.evidence = self._inner.evidence
        return self._matcher.allowed(rows, context)


def constrain(proposers: Sequence[Proposer], matcher: Matcher) -> list[Proposer]:
    """Wrap the proposers so that they draft what `matcher` allows."""
    wrapped = [ConstrainedProposer(inner, matcher) for inner in proposers]
    return [*wrapped, ForcedProposer(matcher)] if wrapped else []
