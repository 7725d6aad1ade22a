"""A drafter with a cheaper drafter of its own (Cascade Drafting, 2312.11462).

Vertical cascade: the drafter reviews the tokens of a cheaper proposer, many in one
pass, so that it seldom runs a pass for a single token. Horizontal cascade: the first
tokens, which matter most, come from the drafter, the tokens behind them from the
cheaper proposer alone.

A head cannot review several tokens in a pass, since each of its rows reads what the row
before carries. So its cascade is horizontal only.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.bundle import Bundle
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.followers.follower import Follower
from jetdraft.runtime.followers.head_follower import HeadFollower
from jetdraft.runtime.proposers.draft import DraftProposer, drafter_of, lacks_drafter
from jetdraft.runtime.proposers.head_method import head_of, lacks_head
from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Tokens
from jetdraft.runtime.sampling.chooser import Chooser

NAME = "cascade"

REVIEWED = 5
"""Tokens of a draft that come from the drafter; it does not review the rest."""


class CascadeProposer(DraftProposer):
    """A drafter that reviews the tokens of `below`, or a head before them.

    The first tokens are those that it would draft by itself; `below` saves passes.

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

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence."""
        super().begin(prompt, chooser)
        self.below.begin(prompt, chooser)

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """The drafter's own tokens, then the tokens of the proposer below."""
        drafted, reviewed = list[int](), min(budget, REVIEWED)
        if isinstance(self._follower, Follower):
            while len(drafted) < reviewed:
                guess = self._below(context, drafted, reviewed - len(drafted))
                drafted += self._review(self._follower, [*context, *drafted], guess)
        else:
            self._below(context, drafted, 0)  # it must know the context
            drafted += super().propose(context, reviewed).tokens[1:]
        if drafted and len(drafted) < budget:
            drafted += self._below(context, drafted, budget - len(drafted))
        return Rows.chain([context[-1], *drafted[:budget]], self.traits.kind)

    def _below(
        self, context: Sequence[int], drafted: list[int], count: int
    ) -> list[int]:
        """What the cheaper proposer drafts after a context and `drafted` tokens."""
        if drafted:
            return self.below.after(drafted, count)
        return self.below.propose(context, count).tokens[1:]

    def _review(
        self, drafter: Follower, context: list[int], guess: list[int]
    ) -> list[int]:
        """The drafter's choices after a context, up to the first that differs."""
        answer = drafter.review(context, guess)
        positions = range(len(context), len(context) + 1 + len(guess))
        chosen = self._chooser.choose(answer, positions)
        right = 0
        while right < len(guess) and guess[right] == chosen[right]:
            right += 1
        return chosen[: right + 1]


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
    "the drafter, which only reviews what lookup proposes",
    _make,
    lacks=_lacks,
    # It would compete with `draft`, which runs the same drafter.
    in_auto=lambda options: False,
)
