"""A head without buffers, which guesses several tokens from one row of features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph


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
