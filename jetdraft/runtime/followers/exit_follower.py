"""An adapter's graph that keeps up with the states in the middle of its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jetdraft.contracts.constants import WIDEST
from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.followers.fed import Fed
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.prefix import common_length
from jetdraft.runtime.passes.split.halves import Placed
from jetdraft.runtime.passes.split.leading_half import LeadingHalf

_NONE = np.zeros((0, 0), np.float32)


class ExitFollower:
    """Keeps an adapter's cache in step with the states that leave the lower half.

    Row t of the adapter reads the state of row t and answers for token t + 1. Rows that
    the target has run come with their states; for tokens after them the lower half runs
    ahead. So a drafted row has the state that the target itself goes on with, and stays
    in the cache if its token was right. `leading` opens the halves on demand.

        follower.observe(0, [5, 8, 9], answer.features)    # float [3, w]
        follower.follow([5, 8, 9, 3])    # for what comes after 3
    """

    def __init__(self, graph: Graph, leading: Callable[[], LeadingHalf]) -> None:
        self.graph, self._fed, self._leading = graph, Fed(graph), leading
        self._seen: list[int] = []
        """The tokens that the target has run; those fed are equal as far as both go."""
        self._states = _NONE
        """The states of the tokens that are seen and not fed, [seen - fed, w]."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new sequence; the rows that the last sequence shares stay."""
        fed, before = self._fed.shared(prompt), len(self._fed.tokens)
        seen = common_length(self._seen, prompt)
        if fed < before:  # the states of rows that were fed are gone
            seen, self._states = fed, _NONE
        self._fed.cut(fed)
        self._seen = list(prompt[: max(seen, fed)])
        self._states = self._states[: len(self._seen) - fed]

    def keep(self, kept: int) -> int:
        """How many of the first `kept` tokens need not be observed again."""
        return min(kept, len(self._seen))

    def waiting(self, tokens: Sequence[int]) -> Float32s | None:
        """No states wait, since each row reads its own."""
        return None

    def restore(self, tokens: Sequence[int], waiting: Float32s | None = None) -> None:
        """Somebody else has put the rows of these tokens into the cache."""
        self._fed.restore(tokens)
        self._seen, self._states = list(tokens), _NONE

    def forget(self) -> None:
        """Keep nothing."""
        self._fed.cut(0)
        self._seen, self._states = [], _NONE

    def observe(
        self, first: int, tokens: Sequence[int], features: Float32s | None
    ) -> None:
        """Take the states of tokens, which replace all from position `first` on.

        Rows of these tokens that are fed already stay.
        """
        if features is None or first > len(self._seen):
            return  # what it missed is read again with the next prompt
        fed = len(self._fed.tokens)
        waiting = self._states[: max(first - fed, 0)]
        self._seen[first:] = tokens
        self._fed.cut(first + common_length(self._fed.tokens[first:], tokens))
        new = features[max(len(self._fed.tokens) - first, 0) :]
        self._states = np.concatenate([waiting, new]) if len(waiting) else new.copy()
        widest = self.graph.contract.max_width
        while len(self._states) > widest:
            self._feed_seen(widest)

    def catch_up(self, context: Sequence[int]) -> None:
        """Feed most of the states that wait, if they are many."""
        self._fed.cut(self._fed.agreement(context))
        if len(self._states) > WIDEST:
            self._feed_seen(len(self._states) - 1)

    def follow(self, context: Sequence[int]) -> Answer | None:
        """The answer for the last row of `context`; None if rows before it are missing.

        The lower half runs the tokens that the target has not run yet.
        """
        self._fed.cut(self._fed.agreement(context))
        answer, widest = None, self.graph.contract.max_width
        while count := min(len(self._states), widest):
            answer = self._feed_seen(count)
        fed, leading = len(self._fed.tokens), self._leading()
        if fed == len(context):
            return answer
        if fed < leading.cache.length:
            return None
        return self._feed_led(context)

    def step(self, token: int) -> Answer | None:
        """The answer for a drafted token; None at the end of the buffers."""
        return self._feed_led([*self._fed.tokens, token])

    def branch(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        ancestors: Sequence[Sequence[int]],
        filled: int,
    ) -> Answer:
        """The answers for rows of a tree; see `Graph.run_branches`."""
        states = self._leading().branch(Placed(tokens, depths, ancestors, filled))
        answer = self.graph.run_branches(
            tokens, depths, ancestors, filled, features=states
        )
        self._fed.own_pass()
        return answer

    def _feed_seen(self, count: int) -> Answer:
        """Run the next rows that the target has run; answers for the last of them."""
        start = len(self._fed.tokens)
        states, self._states = np.split(self._states, [count])
        return self._feed(self._seen[start : start + count], states)

    def _feed_led(self, text: Sequence[int]) -> Answer | None:
        """Run the rows of a text that were not fed; answers for the last of them."""
        states = self._leading().lead(text)
        if states is None:
            return None
        tokens = text[len(self._fed.tokens) :]
        return self._feed(tokens, states[len(states) - len(tokens) :])

    def _feed(self, tokens: Sequence[int], states: Float32s) -> Answer:
        answer = self.graph.run(tokens, last_only=True, features=states)
        self._fed.add(tokens)
        return answer
