"""A drafter with a cheaper drafter of its own (Cascade Drafting, 2312.11462).

Vertical cascade: the drafter reviews the tokens of a cheaper proposer, many in one
pass, so that it seldom runs a pass for a single token. Horizontal cascade: the first
tokens, which matter most, come from the drafter, the tokens behind them from the
cheaper proposer alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.followers.follower import Follower
from jetdraft.runtime.proposers.draft import DraftProposer, drafter_of, lacks_drafter
from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Tokens
from jetdraft.runtime.sampling.chooser import Chooser

NAME = "cascade"

REVIEWED = 5
"""Tokens of a draft that come from the drafter; it does not review the rest."""


class CascadeProposer(DraftProposer):
    """An independent drafter that reviews the tokens of `below`.

    The drafted tokens are those that it would draft by itself; `below` saves passes.

        CascadeProposer(follower, LookupProposer()).propose(context, budget=8)
    """

    def __init__(
        self, follower: Follower, below: LookupProposer, ms_per_token: float = 0.0
    ) -> None:
        super().__init__(follower, ms_per_token, name=NAME)
        self._drafter, self.below = follower, below

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence."""
        super().begin(prompt, chooser)
        self.below.begin(prompt, chooser)

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """The drafter's own tokens, then the tokens of the proposer below."""
        drafted, reviewed = list[int](), min(budget, REVIEWED)
        while len(drafted) < reviewed:
            guess = self._below(context, drafted, reviewed - len(drafted))
            drafted += self._review([*context, *drafted], guess)
        if len(drafted) < budget:
            drafted += self._below(context, drafted, budget - len(drafted))
        return Rows.chain([context[-1], *drafted[:budget]], self.traits.kind)

    def _below(
        self, context: Sequence[int], drafted: list[int], count: int
    ) -> list[int]:
        """What the cheaper proposer drafts after a context and `drafted` tokens."""
        if drafted:
            return self.below.after(drafted, count)
        return self.below.propose(context, count).tokens[1:]

    def _review(self, context: list[int], guess: list[int]) -> list[int]:
        """The drafter's choices after a context, up to the first that differs."""
        answer = self._drafter.review(context, guess)
        positions = range(len(context), len(context) + 1 + len(guess))
        chosen = self._chooser.choose(answer, positions)
        right = 0
        while right < len(guess) and guess[right] == chosen[right]:
            right += 1
        return chosen[: right + 1]


def _make(parts: Parts, options: MethodOptions) -> Proposer:
    below = LookupProposer(store=parts.store_of(options.user))
    return CascadeProposer(drafter_of(parts, NAME), below, parts.curve.drafter)


METHOD = Method(
    NAME,
    "the drafter, which only reviews what lookup proposes",
    _make,
    lacks=lacks_drafter,
    # It would compete with `draft`, which runs the same drafter.
    in_auto=lambda options: False,
)
