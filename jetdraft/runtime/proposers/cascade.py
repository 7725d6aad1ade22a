"""A drafter with a cheaper drafter of its own (Cascade Drafting, 2312.11462).

Vertical cascade: the drafter reviews the tokens of a cheaper proposer, many in one
pass, so that it seldom runs a pass for a single token. Horizontal cascade: the first
tokens, which matter most, come from the drafter, the tokens behind them from the
cheaper proposer alone.

The paper lets a drafter be lenient with the tokens that it reviews. Here a token is
taken without a review where tokens like it have been right more often than the
drafter's own: a copied name after a long match, which a small drafter cannot know.

A head cannot review several tokens in a pass, since each of its rows reads what the row
before carries. So its cascade is horizontal only.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.bundle import Bundle
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.followers.follower import Follower
from jetdraft.runtime.followers.head_follower import HeadFollower
from jetdraft.runtime.measured.trust import Trial, Trust
from jetdraft.runtime.passes.prefix import common_length
from jetdraft.runtime.proposers.draft import DraftProposer, drafter_of, lacks_drafter
from jetdraft.runtime.proposers.head_method import head_of, lacks_head
from jetdraft.runtime.proposers.lookup import Guess, LookupProposer
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Tokens
from jetdraft.runtime.sampling.chooser import Chooser

NAME = "cascade"

REVIEWED = 5
"""Tokens of a draft that the drafter chooses or trusts; it never sees the rest."""


class CascadeProposer(DraftProposer):
    """A drafter that reviews the tokens of `below`, or a head before them.

    A token is that of `below` where its like was right more often, else what the
    drafter would draft by itself.

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
            tokens = self._trusted(guess)
            own = not tokens
            if own:
                tokens = self._own(context, drafted, guess, reviewed - len(drafted))
            if not tokens:
                break
            trials += _trials(tokens, guess, own)
            drafted += tokens
        self.trust.drafted(context, trials)
        if drafted and len(drafted) < budget:
            drafted += self.below.after(drafted, budget - len(drafted)).tokens
        return Rows.chain([context[-1], *drafted[:budget]], self.traits.kind)

    def _trusted(self, guess: Guess) -> list[int]:
        """The first tokens of a guess that need no review."""
        places = range(len(guess.tokens))
        is_trusted = [self.trust.prefers(guess.evidence(place)) for place in places]
        return guess.tokens[: [*is_trusted, False].index(False)]

    def _own(
        self, context: Tokens, drafted: list[int], guess: Guess, count: int
    ) -> list[int]:
        """What the drafter itself drafts: its choices up to the first that differs.

        A head drafts all the rest, and nothing after tokens that it did not draft.
        """
        if not isinstance(self._follower, Follower):
            return [] if drafted else super().propose(context, count).tokens[1:]
        before = [*context, *drafted]
        answer = self._follower.review(before, guess.tokens)
        positions = range(len(before), len(before) + 1 + len(guess.tokens))
        chosen = self._chooser.choose(answer, positions)
        return chosen[: 1 + common_length(chosen, guess.tokens)]


def _trials(tokens: list[int], guess: Guess, own: bool) -> list[Trial]:
    """Drafted tokens beside a guess, which says nothing after its first difference."""
    told = guess.tokens[: 1 + common_length(tokens, guess.tokens)]
    return [
        Trial(token, told[place], guess.evidence(place), own)
        if place < len(told)
        else Trial(token, None, 0, own)
        for place, token in enumerate(tokens)
    ]


def _lacks(bundle: Bundle) -> str:
    return lacks_drafter(bundle) and lacks_head(bundle) and "export with --drafter"


def _make(parts: Parts, options: MethodOptions) -> Proposer:
    store = parts.store_of(options.user)
    below = LookupProposer(store=store, source=lambda: parts.source)
    has_head = not lacks_head(parts.bundle)
    follower = head_of(parts, NAME) if has_head else drafter_of(parts, NAME)
    return CascadeProposer(follower, below, parts.curve.drafter)


METHOD = Method(
    NAME,
    "the drafter, or lookup where lookup is right more often",
    _make,
    lacks=_lacks,
    # It would compete with `draft`, which runs the same drafter.
    in_auto=lambda options: False,
)
