"""A drafter that is drafted for (Cascade Speculative Drafting, 2312.11462).

Vertical: what a cheaper proposer says is reviewed by the drafter, many tokens in one of
its passes, so that it seldom runs for a single one. Horizontal: the first tokens, which
matter most, come from the drafter, those behind them from the cheaper proposer alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.proposers.draft import DraftProposer
from jetdraft.runtime.proposers.follower import Follower
from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.sampling.chooser import Chooser

REVIEWED = 5
"""Drafted tokens that come from the drafter; those behind them are not reviewed."""


class CascadeProposer(DraftProposer):
    """An independent drafter that verifies what `below` proposes.

    The drafter's tokens are those that it would have drafted by itself: `below` only
    saves passes.

        CascadeProposer(follower, LookupProposer()).propose(context, budget=8)
    """

    name = "cascade"

    def __init__(
        self, follower: Follower, below: LookupProposer, ms_per_token: float = 0.0
    ) -> None:
        super().__init__(follower, ms_per_token)
        self.below = below

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence."""
        super().begin(prompt, chooser)
        self.below.begin(prompt, chooser)

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """The drafter's own tokens, then what the proposer below makes of them."""
        drafted, reviewed = list[int](), min(budget, REVIEWED)
        while len(drafted) < reviewed:
            guess = self._below(context, drafted, reviewed - len(drafted))
            drafted += self._review([*context, *drafted], guess)
        if len(drafted) < budget:
            drafted += self._below(context, drafted, budget - len(drafted))
        return Rows.chain([context[-1], *drafted[:budget]], self.kind)

    def _below(
        self, context: Sequence[int], drafted: list[int], count: int
    ) -> list[int]:
        if drafted:
            return self.below.after(drafted, count)
        return self.below.propose(context, count).tokens[1:]

    def _review(self, context: list[int], guess: list[int]) -> list[int]:
        """The drafter's choices after a context, as far as the guess holds."""
        answer = self._follower.review(context, guess)
        positions = range(len(context), len(context) + 1 + len(guess))
        chosen = self._chooser.choose(answer, positions)
        right = 0
        while right < len(guess) and guess[right] == chosen[right]:
            right += 1
        return chosen[: right + 1]
