"""Drafting with a small model of its own (Leviathan et al., 2211.17192), a chain."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.runtime.graph import Graph
from jetdraft.runtime.rows import Int64s, Rows
from jetdraft.runtime.sampling import Chooser, Sampling


class DraftProposer:
    """An independent drafter that chooses with the target's noise.

    Its cache holds a prefix of the public sequence plus the rows of its last draft;
    whatever the target did not confirm is rewound.

        DraftProposer(graph).propose(np.array([5, 8, 9]), budget=3)
    """

    name = "draft"

    def __init__(self, graph: Graph, ms_per_token: float = 0.0) -> None:
        self.graph = graph
        self.ms_per_token = ms_per_token
        self.max_draft_tokens = graph.contract.max_width - 1
        self._chooser = Chooser(Sampling())
        self._base = 0
        self._drafted: list[int] = []

    @property
    def session_seconds(self) -> float:
        """Seconds inside the drafter's `session.run`."""
        return self.graph.seconds

    def begin(self, prompt: Int64s, chooser: Chooser) -> None:
        """Forget the last sequence."""
        self.graph.cache.rewind(0)
        self._chooser = chooser

    def propose(self, context: Int64s, budget: int) -> Rows:
        """Catch up with the context, then draft token by token."""
        cache = self.graph.cache
        token = self._catch_up(context)
        tokens = [int(context[-1]), token]
        self._base = cache.length
        while len(tokens) <= budget:
            token = self._step([token], cache.length + 1)
            tokens.append(token)
        self._drafted = tokens[1:]
        return Rows.chain(tokens)

    def _catch_up(self, context: Int64s) -> int:
        """Feed what the cache lacks: the root, and what others committed before it."""
        token, cache = -1, self.graph.cache
        while cache.length < len(context):
            end = min(len(context), cache.length + self.graph.contract.max_width)
            token = self._step(context[cache.length : end], end)
        return token

    def _step(self, tokens: Sequence[int] | Int64s, position: int) -> int:
        """Feed a chain; the token chosen for `position`, right after it."""
        answer = self.graph.run(tokens, last_only=True)
        self.graph.cache.advance(len(tokens))
        return int(self._chooser.choose(answer, [position])[0])

    def observe(self, committed: Sequence[int]) -> None:
        """Keep the cached rows of confirmed drafts; the last draft has none."""
        cached = self.graph.cache.length - self._base
        right = 0
        for drafted, token in zip(self._drafted[:cached], committed, strict=False):
            if drafted != token:
                break
            right += 1
        self.graph.cache.rewind(self._base + right)
