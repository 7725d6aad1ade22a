"""Drafting from which tokens follow which two (ADED, 2407.12021), no model."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.contract import WIDEST
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.history.search import TreeSearch
from jetdraft.runtime.history.trigrams import Trigrams
from jetdraft.runtime.proposers.proposer import ModelFree
from jetdraft.runtime.sampling.chooser import Chooser


class TrigramProposer(ModelFree):
    """Follows the likeliest successor, or searches for a tree when asked for one.

    What a generation teaches the table serves the next ones too.

        TrigramProposer(Trigrams(counts)).propose(context, budget=4)
    """

    name = "trigram"
    branches = True
    max_draft_tokens = WIDEST - 1

    def __init__(self, trigrams: Trigrams) -> None:
        self.trigrams = trigrams
        self._search = TreeSearch(trigrams.successors)

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Learn the whole prompt."""
        for end in range(3, len(prompt), 13):
            self.trigrams.learn(prompt[:end])

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """What the table says after the last two tokens."""
        root = context[-1]
        if len(context) < 2:
            return Rows.chain([root])
        self.trigrams.learn(context[-16:])
        if parents is not None:
            tokens, found = self._search.run(context[-2], root, budget)
            return Rows([root, *tokens], [-1, *found]).depth_first()
        chain = [context[-2], root]
        while len(chain) < budget + 2:
            after = self.trigrams.successors(chain[-2], chain[-1])
            if not after:
                break
            chain.append(max(after, key=lambda token: (after[token], -token)))
        return Rows.chain(chain[1:])
