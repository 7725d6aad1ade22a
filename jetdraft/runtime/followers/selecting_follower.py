"""The target as its own drafter, which reads selected rows of the same buffers."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.contracts.selection import Reading
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.cache import Cache
from jetdraft.runtime.passes.graph import Graph


class SelectingFollower:
    """Drafts over the target's own buffers, with the selected rows only.

    It writes drafted rows past the committed rows, and the pass that verifies a draft
    overwrites them. So this follower never lags behind the target.

        follower = SelectingFollower(target.beside())
        follower.follow(context)
        follower.end()    # before the target verifies
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._committed = 0

    @property
    def _cache(self) -> Cache:
        return self.graph.cache

    def begin(self) -> None:
        """Start a new sequence, whose rows are selected anew."""
        self.graph.prepare(exact=False, reading=Reading.SELECTED)

    def follow(self, context: Sequence[int]) -> Answer:
        """The answer for the last row of `context`, over the committed rows."""
        self._committed = self._cache.length
        return self._run(context[self._committed :])

    def step(self, token: int) -> Answer | None:
        """The answer for a drafted token; None at the end of the buffers."""
        return self._run([token]) if self._cache.room else None

    def end(self) -> None:
        """Take the drafted rows back."""
        self._cache.rewind(self._committed)

    def _run(self, tokens: Sequence[int]) -> Answer:
        answer = self.graph.run(tokens, last_only=True)
        self._cache.advance(len(tokens))
        return answer
