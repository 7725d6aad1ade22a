"""A drafter's graph that keeps up with the public sequence."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.contract import WIDEST
from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.prefix import common_length


class Follower:
    """Keeps the drafter's cache in step with a sequence whose drafts may be wrong.

    `feed` runs tokens and remembers them; `follow` drops the tokens that differ from a
    sequence and feeds the rest of it.

        answer = Follower(graph).follow([5, 8, 9])   # for what comes after 9
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._fed: list[int] = []
        self._passes = -1

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new sequence; the beginning that the last sequence shares stays."""
        if self.graph.passes != self._passes:
            self.forget()  # somebody else has used the buffers
            return
        kept = common_length(self._fed, prompt)
        del self._fed[kept:]
        self.graph.cache.rewind(kept)

    def restore(self, tokens: Sequence[int]) -> None:
        """Somebody else has put the rows of these tokens into the cache."""
        self._fed = list(tokens)
        self._passes = self.graph.passes

    def forget(self) -> None:
        """Keep nothing."""
        self.graph.cache.rewind(0)
        self._fed.clear()

    def observe(
        self, first: int, tokens: Sequence[int], features: Float32s | None
    ) -> None:
        """The target has run these tokens, from position `first` on.

        Its features float [n, w] are valid until its next pass.
        """

    def keep(self, kept: int) -> int:
        """How many of the first `kept` tokens need not be observed again."""
        return kept

    def follow(self, context: Sequence[int]) -> Answer | None:
        """The answer for the last row of `context`; None if it cannot be known."""
        self._keep(context)
        widest = self.graph.contract.max_width
        while True:
            rest = context[len(self._fed) : len(self._fed) + widest]
            answer = self.feed(rest)
            if len(self._fed) == len(context):
                return answer

    def review(self, context: Sequence[int], guess: Sequence[int]) -> Answer:
        """The answers for the last row of `context` and for each row of a guess below.

        The rows of the guess stay in the cache until a context differs from them.
        """
        self._keep(context)
        # A prompt is read without the logits of all its rows.
        widest = min(WIDEST, self.graph.contract.max_width)
        if len(context) + len(guess) - len(self._fed) > widest:
            self.follow(context[:-1])
        fresh = len(context) - len(self._fed)
        answer = self.feed([*context[len(self._fed) :], *guess], last_only=False)
        return answer.rows(slice(fresh - 1, None))

    def step(self, token: int) -> Answer:
        """The answer for a drafted token after those that were followed."""
        return self.feed([token])

    def branch(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        ancestors: Sequence[Sequence[int]],
        filled: int,
    ) -> Answer:
        """The answers for rows of a tree; see `Graph.run_branches`."""
        return self.graph.run_branches(tokens, depths, ancestors, filled)

    def feed(self, tokens: Sequence[int], last_only: bool = True) -> Answer:
        """Run tokens after those in the cache; answers for the last row, or for all."""
        answer = self._run(tokens, last_only)
        self.graph.cache.advance(len(tokens))
        self._fed += tokens
        self._passes = self.graph.passes
        return answer

    def _run(self, tokens: Sequence[int], last_only: bool) -> Answer:
        return self.graph.run(tokens, last_only)

    def _keep(self, context: Sequence[int]) -> None:
        """Drop the tokens that differ from a context."""
        kept = self._agreement(context)
        del self._fed[kept:]
        self.graph.cache.rewind(kept)

    def _agreement(self, context: Sequence[int]) -> int:
        """How many tokens may stay; at least the last of `context` is fed again.

        Only the tokens of the last two passes can differ, so tokens before them are not
        compared.
        """
        end = min(len(self._fed), len(context) - 1)
        start = max(0, end - 2 * self.graph.contract.max_width)
        for index, token in enumerate(context[start:end], start):
            if self._fed[index] != token:
                return index
        return end
