"""A drafter that reviews a cheaper drafter's tokens (Cascade Drafting, 2312.11462).

A token needs no review where tokens like it were right more often than the drafter's
own. A head, whose rows read what the row before carries, cannot review several tokens
in a pass: it drafts what follows the trusted tokens.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.drafts.rows import Kind, Rows, Tokens
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.measured.stats import Acceptance, PositionRates, prior_of
from jetdraft.runtime.passes.prefix import common_length
from jetdraft.runtime.proposers.drafter_methods import drafter_method
from jetdraft.runtime.proposers.lookup import Guess, LookupProposer
from jetdraft.runtime.proposers.method import MethodOptions
from jetdraft.runtime.proposers.model_proposer import ModelProposer, choose
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Traits
from jetdraft.runtime.sampling.chooser import Chooser


class Trial(NamedTuple):
    """A drafted token, and the token that was guessed in its place, taken or not.

    `evidence` is what the guess rests on, see `Proposer.evidence`.
    """

    token: int
    guess: int | None
    evidence: int
    by_drafter: bool


class Trust:
    """How often guesses, and the drafter's tokens in their places, are right."""

    def __init__(self) -> None:
        self._rates: dict[int, tuple[PositionRates, PositionRates]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin another sequence; the rates stay."""
        self._context, self._trials = list[int](), list[Trial]()

    def prefers(self, evidence: int) -> bool:
        """Whether guesses with this evidence are right more often than the drafter."""
        own, guess = self._rates_of(evidence)
        return guess.rates(1)[0] > own.rates(1)[0]

    def keep_draft(self, context: Sequence[int], trials: Sequence[Trial]) -> None:
        """Keep a draft and its context until `learn` sees what the target chose."""
        self._context, self._trials = list(context), list(trials)

    def learn(self, context: Sequence[int]) -> None:
        """Compare the last draft with what came, up to its first wrong token."""
        start, trials = len(self._context), self._trials
        self._trials = []
        if list(context[:start]) != self._context:
            return  # tokens were withdrawn, and the draft continued them
        for trial, token in zip(trials, context[start:], strict=False):
            if trial.guess is not None:
                own, guess = self._rates_of(trial.evidence)
                guess.observe([trial.guess == token])
                if trial.by_drafter:
                    own.observe([trial.token == token])
                else:
                    own.fade()
            if trial.token != token:
                break

    def _rates_of(self, evidence: int) -> tuple[PositionRates, PositionRates]:
        new = PositionRates(Acceptance.PRIOR), PositionRates(prior_of(evidence))
        return self._rates.setdefault(evidence, new)


# After this many tokens, the drafter's own or trusted, lookup drafts alone.
REVIEWED = 5


class CascadeProposer(ModelProposer):
    """Drafts the tokens of `below` where it trusts them, else its drafter's."""

    def __init__(
        self, cache: DraftCache, below: LookupProposer, ms_per_token: float = 0.0
    ) -> None:
        widest = cache.graph.contract.max_width - 1
        traits = Traits("cascade", widest, Kind.COUPLED, ms_per_token=ms_per_token)
        super().__init__(cache, traits)
        self.below, self.trust = below, Trust()

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        super().begin(prompt, chooser)
        self.below.begin(prompt, chooser)
        self.trust.begin()

    def forget(self) -> None:
        self.trust = Trust()

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """Draft trusted guesses or the drafter's tokens, then lookup's alone."""
        self.trust.learn(context)
        self.below.read(context)
        trials, reviewed = list[Trial](), min(budget, REVIEWED)
        drafted = list[int]()
        while len(drafted) < reviewed:
            guess = self.below.guess_after(drafted, reviewed - len(drafted))
            places = range(len(guess.tokens))
            trusted = [self.trust.prefers(guess.evidence(place)) for place in places]
            by_drafter = not any(trusted[:1])
            before = [*context, *drafted]
            if not by_drafter:
                tokens = guess.tokens[: [*trusted, False].index(False)]
            elif self.cache.carry:
                tokens = super().propose(before, reviewed - len(drafted)).tokens[1:]
            else:
                # Only what comes before the first trusted token is reviewed.
                own = guess.tokens[: trusted.index(True) - 1 if any(trusted) else None]
                answer = self.cache.review(before, own)
                tokens = choose(answer, len(before), self.chooser, guess=own)[0]
            if not tokens:
                break
            trials += _as_trials(tokens, guess, by_drafter)
            drafted += tokens
        self.trust.keep_draft(context, trials)
        if drafted and len(drafted) < budget:
            drafted += self.below.guess_after(drafted, budget - len(drafted)).tokens
        return Rows.chain([context[-1], *drafted[:budget]], self.traits.kind)


def _as_trials(tokens: list[int], guess: Guess, by_drafter: bool) -> list[Trial]:
    compared = min(len(tokens), 1 + common_length(tokens, guess.tokens))
    pairs = enumerate(zip_longest(tokens, guess.tokens[:compared]))
    return [Trial(*pair, guess.evidence(place), by_drafter) for place, pair in pairs]


def _make_proposer(
    name: str, loaded: LoadedBundle, cache: DraftCache, options: MethodOptions
) -> Proposer:
    store = loaded.store_of(options.user)
    end = loaded.picture_token
    below = LookupProposer(store=store, source=lambda: loaded.source, end=end)
    return CascadeProposer(cache, below, loaded.curve.drafter)


METHOD = drafter_method(
    "cascade",
    "the drafter, or lookup where lookup is right more often",
    "a drafter",
    lambda contract, target: (
        contract.stands_alone or (contract.carried_size and not contract.recent)
    ),
    make=_make_proposer,
    options=MethodOptions,
    flag="--drafter",
    in_auto=False,  # it would compete with `draft`, which runs the same drafter
    trees=False,
    samples=(),
)
