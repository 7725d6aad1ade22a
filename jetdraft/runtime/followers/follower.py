"""A drafter's graph that keeps up with the public sequence."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.contracts.constants import WIDEST
from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.followers.fed import Fed
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph


class Follower:
    """Keeps the drafter's cache in step with a sequence whose drafts may be wrong.

    `follow` drops the tokens that differ from a sequence and feeds the rest of it;
    `step` feeds a drafted token, which stays until a sequence differs from it.

        answer = Follower(graph).follow([5, 8, 9])   # for what comes after 9
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self._fed = graph, Fed(graph)

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new sequence; the beginning that the last sequence shares stays."""
        self._fed.cut(self._fed.shared(prompt))

    def waiting(self, tokens: Sequence[int]) -> Float32s | None:
        """No features of the target wait for a pass of a drafter."""
        return None

    def restore(self, tokens: Sequence[int], waiting: Float32s | None = None) -> None:
        """Somebody else has put the rows of these tokens into the cache."""
        self._fed.restore(tokens)

    def forget(self) -> None:
        """Keep nothing."""
        self._fed.cut(0)

    def observe(
        self, first: int, tokens: Sequence[int], features: Float32s | None
    ) -> None:
        """The target's own features mean nothing to a drafter."""

    def keep(self, kept: int) -> int:
        """How many of the first `kept` tokens need not be observed again: all."""
        return kept

    def catch_up(self, context: Sequence[int]) -> None:
        """Feed most of a context that is long ahead of the drafter."""
        self._keep(context)
        while (missed := len(context) - len(self._fed.tokens)) > WIDEST:
            fed, most = len(self._fed.tokens), self.graph.contract.max_width
            self._feed(context[fed : fed + min(missed - 1, most)])

    def follow(self, context: Sequence[int]) -> Answer:
        """The answer for the last row of `context`."""
        self._keep(context)
        widest = self.graph.contract.max_width
        while True:
            fed = len(self._fed.tokens)
            answer = self._feed(context[fed : fed + widest])
            if len(self._fed.tokens) == len(context):
                return answer

    def review(self, context: Sequence[int], guess: Sequence[int]) -> Answer:
        """The answers for the last row of `context` and for each row of a guess below.

        The rows of the guess stay in the cache until a context differs from them.
        """
        self._keep(context)
        # A prompt is read without the logits of all its rows.
        widest = min(WIDEST, self.graph.contract.max_width)
        if len(context) + len(guess) - len(self._fed.tokens) > widest:
            self.follow(context[:-1])
        rest = context[len(self._fed.tokens) :]
        answer = self._feed([*rest, *guess], last_only=False)
        return answer.rows(slice(len(rest) - 1, None))

    def step(self, token: int) -> Answer:
        """The answer for a drafted token after those that were followed."""
        return self._feed([token])

    def refine(self, known: Sequence[int]) -> Answer:
        """The guesses after the first tokens of a block, which are `known` now.

        It runs the last row that was followed again, with its block.
        """
        answer = self._fed.again(lambda last: self.graph.run([last], block=known))
        return answer.rows(slice(len(known), None))

    def branch(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        ancestors: Sequence[Sequence[int]],
        filled: int,
    ) -> Answer:
        """The answers for rows of a tree; see `Graph.run_branches`."""
        return self.graph.run_branches(tokens, depths, ancestors, filled)

    def _feed(self, tokens: Sequence[int], last_only: bool = True) -> Answer:
        """Run tokens after those in the cache; answers for the last row, or for all."""
        answer = self.graph.run(tokens, last_only)
        self._fed.add(tokens)
        return answer

    def _keep(self, context: Sequence[int]) -> None:
        """Drop the tokens that differ from a context."""
        self._fed.cut(self._fed.agreement(context))
