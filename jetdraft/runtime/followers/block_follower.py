"""Heads that guess several tokens from the features of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.followers.exit_follower import ExitFollower
from jetdraft.runtime.followers.falcon_follower import FalconFollower
from jetdraft.runtime.followers.follower import Follower
from jetdraft.runtime.followers.head_follower import HeadFollower
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.split.leading_half import LeadingHalf


class GuessFollower:
    """Keeps the features of the last row that the target has run.

    Guess i of the answer is for the token 1 + i places after the context.

        follower.observe(0, [5, 8, 9], answer.features)    # float [3, w]
        follower.follow([5, 8, 9, 3])    # for what comes after 3, and after that
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._seen = 0
        self._features = np.zeros((0, graph.contract.feature_input), np.float32)

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new sequence."""
        self.forget()

    def waiting(self, tokens: Sequence[int]) -> Float32s | None:
        """No features are worth keeping: every sequence begins without them."""
        return None

    def restore(self, tokens: Sequence[int], waiting: Float32s | None = None) -> None:
        """Somebody else has run these tokens, and their features are not known."""
        self.forget()

    def forget(self) -> None:
        """Keep nothing."""
        self._seen = 0

    def observe(
        self, first: int, tokens: Sequence[int], features: Float32s | None
    ) -> None:
        """Take the features of the last of some tokens, from position `first` on."""
        if features is not None:
            self._seen = first + len(tokens)
            self._features = features[-1:].copy()

    def keep(self, kept: int) -> int:
        """How many of the first `kept` tokens need not be observed again: all."""
        return kept

    def catch_up(self, context: Sequence[int]) -> None:
        """It can miss nothing: it keeps the features of one row."""

    def follow(self, context: Sequence[int]) -> Answer | None:
        """The guesses after `context`; None unless all but its last token were seen."""
        if not self._seen or self._seen + 1 != len(context):
            return None
        return self.graph.run(context[-1:], features=self._features)


class BlockFollower(HeadFollower):
    """Keeps a block head's cache in step with the features that the target gives.

    Row t is the context of all tokens after t. The token after the last row begins the
    block, and the guesses are for the tokens after it.

        follower.observe(0, [5, 8, 9], answer.features)    # float [3, w]
        follower.follow([5, 8, 9, 3])    # for what comes after 3, and after that
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._ahead: Sequence[int] = ()
        """Tokens that the target has not run yet: the beginning of the block."""

    def follow(self, context: Sequence[int]) -> Answer | None:
        """The guesses after `context`; None without features, or beyond the block."""
        self._fed.cut(len(self._fed.tokens))
        answer = None
        while tokens := self._ready(context):
            answer = self._feed(tokens)
        self._ahead = context[len(self._seen) + 1 :]
        if answer is None or not self._ahead:
            return answer
        fits = len(self._ahead) < self.graph.contract.block
        return self.refine(()) if fits else None

    def refine(self, known: Sequence[int]) -> Answer:
        """The guesses after the first tokens of a block, which are `known` now."""
        block = [*self._ahead, *known]
        answer = self._fed.again(
            lambda last: self.graph.run([last], features=self._last, block=block)
        )
        return answer.rows(slice(len(block), None))

    def _feed(self, tokens: Sequence[int]) -> Answer:
        self._last = self._features[len(tokens) - 1][None]
        return super()._feed(tokens)


Refining = Follower | BlockFollower
"""The followers of graphs that fill a block."""

AnyFollower = Follower | HeadFollower | GuessFollower | ExitFollower | FalconFollower


def follower_of(graph: Graph, leading: Callable[[], LeadingHalf]) -> AnyFollower:
    """What feeds a drafter's graph: a head is fed with features too.

    `leading` gives the target whose lower half runs ahead, to those that need it.
    """
    contract = graph.contract
    if not contract.feature_input:
        return Follower(graph)
    if contract.block:
        return BlockFollower(graph)
    if contract.guesses:
        return GuessFollower(graph)
    if contract.ahead:
        return FalconFollower(graph)
    return (
        HeadFollower(graph) if contract.carried_size else ExitFollower(graph, leading)
    )
