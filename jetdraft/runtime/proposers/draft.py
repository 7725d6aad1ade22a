"""Drafting with a small model of its own (Leviathan et al., 2211.17192), a chain."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.graph import Answer
from jetdraft.runtime.proposers.draft_stops import Stopping
from jetdraft.runtime.proposers.follower import Follower
from jetdraft.runtime.sampling.chooser import Chooser, Sampling


class DraftProposer:
    """An independent drafter that chooses with the target's noise.

    With `stopping` a draft ends early where that doubts it.

    Several proposers may share the drafter through one follower.

    DraftProposer(Follower(graph)).propose([5, 8, 9], budget=3)
    """

    name = "draft"
    kind = Kind.COUPLED
    streams = 0
    branches = False

    def __init__(
        self,
        follower: Follower,
        ms_per_token: float = 0.0,
        stopping: Stopping | None = None,
    ) -> None:
        self.graph = follower.graph
        self.ms_per_token = ms_per_token
        self.max_draft_tokens = self.graph.contract.max_width - 1
        self._follower = follower
        self._chooser = Chooser(Sampling())
        self.stopping = stopping

    @property
    def session_seconds(self) -> float:
        """Seconds inside the drafter's `session.run`."""
        return self.graph.seconds

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence, but for what this one begins with."""
        self._follower.begin(prompt)
        self._chooser = chooser

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """Catch up with the context, then draft token by token."""
        tokens = [context[-1]]
        answer = self._follower.follow(context)
        if self.stopping is not None:
            self.stopping.begin()
        for position in range(len(context), len(context) + budget):
            if len(tokens) > 1:
                if self.stopping is not None and self.stopping.stop(answer):
                    break
                answer = self._follower.feed(tokens[-1:])
            tokens.append(self._choose(answer, position))
        return Rows.chain(tokens, self.kind)

    def _choose(self, answer: Answer, position: int) -> int:
        return self._chooser.choose(answer, [position])[0]

    def observe(self, length: int, answer: Answer, row: int) -> None:
        """Nothing to learn: the next context shows what was right."""
