"""A drafter with a cheaper drafter of its own (Cascade Drafting, 2312.11462).

Vertical cascade: the drafter reviews the tokens of a cheaper proposer, many in one
pass, so that it seldom runs a pass for a single token. Horizontal cascade: the drafter
works on the first tokens, which matter most; those behind them come from the cheaper
proposer alone.

The paper lets a drafter be lenient with the tokens that it reviews. Here a token is
taken without a review where tokens like it have been right more often than the
drafter's own: a copied name after a long match, which a small drafter cannot know.

A head cannot review several tokens in a pass, since each of its rows reads what the row
before carries. So it drafts what follows the trusted tokens, in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile, zip_longest

from jetdraft.bundle import Bundle
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.followers.follower import Follower
from jetdraft.runtime.followers.head_follower import HeadFollower
from jetdraft.runtime.measured.trust import Trial, Trust
from jetdraft.runtime.proposers.draft import DraftProposer, drafter_of, lacks_drafter
from jetdraft.runtime.proposers.head_method import EAGLE, follower_for
from jetdraft.runtime.proposers.lookup import Guess, LookupProposer
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Tokens
from jetdraft.runtime.sampling.chooser import Chooser

NAME = "cascade"

REVIEWED = 5
"""Behind this many tokens, the drafter's own or trusted, lookup drafts alone."""


class CascadeProposer(DraftProposer):
    """Drafts the tokens of `below` where it trusts them, else those of a drafter.

    The drafter reviews what `below` proposes, and drafts what it would without it.

        CascadeProposer(follower, LookupProposer()).propose(context, budget=8)
    """

    def __init__(
        self,
        follower: Follower | HeadFollower,
        below: LookupProposer,
        ms_per_token: float = 0.0,
    ) -> None:
        super().__init__(follower, ms_per_token, name=NAME)
        self.below = below
        self.trust = Trust()

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence."""
        super().begin(prompt, chooser)
        self.below.begin(prompt, chooser)
        self.trust.begin()

    def forget(self) -> None:
        """Unlearn when to trust."""
        self.trust = Trust()

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """The drafter's own tokens and trusted ones, then those of `below`."""
        self.trust.learn(context)
        self.below.read(context)
        trials, reviewed = list[Trial](), min(budget, REVIEWED)
        drafted = list[int]()
        while len(drafted) < reviewed:
            guess = self.below.after(drafted, reviewed - len(drafted))
            places = range(len(guess.tokens))
            trusted = [self.trust.prefers(guess.evidence(place)) for place in places]
            own = not any(trusted[:1])
            if own:
                # Only what comes before the first trusted token is reviewed.
                told = guess.tokens[: trusted.index(True) - 1 if any(trusted) else None]
                before, count = [*context, *drafted], reviewed - len(drafted)
                tokens = self._own(before, told, count)
            else:
                tokens = guess.tokens[: [*trusted, False].index(False)]
            if not tokens:
                break
            trials += _trials(tokens, guess, own)
            drafted += tokens
        self.trust.drafted(context, trials)
        if drafted and len(drafted) < budget:
            drafted += self.below.after(drafted, budget - len(drafted)).tokens
        return Rows.chain([context[-1], *drafted[:budget]], self.traits.kind)

    def _own(self, context: list[int], told: list[int], count: int) -> list[int]:
        """What the drafter itself drafts: its choices up to the first that differs.

        A head drafts `count` tokens, and none if it is asked again in the round.
        """
        if not isinstance(self._follower, Follower):
            return super().propose(context, count).tokens[1:]
        answer = self._follower.review(context, told)
        positions = range(len(context), len(context) + 1 + len(told))
        chosen = self._chooser.choose(answer, positions)
        return chosen[: 1 + _agreement(chosen, told)]


def _trials(tokens: list[int], guess: Guess, own: bool) -> list[Trial]:
    """Drafted tokens beside a guess, which says nothing after its first difference."""
    compared = min(len(tokens), 1 + _agreement(tokens, guess.tokens))
    pairs = enumerate(zip_longest(tokens, guess.tokens[:compared]))
    return [Trial(*pair, guess.evidence(place), own) for place, pair in pairs]


def _agreement(tokens: list[int], others: list[int]) -> int:
    """How many first tokens are equal; the lists are too short for numpy."""
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _lacks(bundle: Bundle) -> str:
    return lacks_drafter(bundle) and EAGLE.lacks(bundle) and "export with --drafter"


def _make(parts: Parts, options: MethodOptions) -> Proposer:
    store = parts.store_of(options.user)
    below = LookupProposer(store=store, source=lambda: parts.source)
    if EAGLE.lacks(parts.bundle):
        return CascadeProposer(drafter_of(parts, NAME), below, parts.curve.drafter)
    follower = follower_for(parts, NAME, "a head", "")
    assert isinstance(follower, HeadFollower)
    return CascadeProposer(follower, below, parts.curve.drafter)


METHOD = Method(
    NAME,
    "the drafter, or lookup where lookup is right more often",
    _make,
    lacks=_lacks,
    # It would compete with `draft`, which runs the same drafter.
    in_auto=lambda options: False,
)
