"""Drafts from one row's guesses of the tokens after it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Tokens, Traits
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.trees.fixed import Static
from jetdraft.runtime.trees.shape import Shape, Tree


class GuessProposer(Proposer):
    """Drafts a chain of the guesses, or a tree whose rows of a depth share a guess.

    Without a `shape` the draft is a chain, or a tree if a controller asks for a tree.
    A subclass says what is guessed.

        class Same(GuessProposer):
            def guesses(self, context):
                return self.answer
    """

    def __init__(self, traits: Traits, shape: Shape | None = None) -> None:
        self.traits, self.shape = traits, shape
        self._chooser = Chooser(Sampling())

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Start a new sequence."""
        self._chooser = chooser

    @abstractmethod
    def guesses(self, context: Tokens) -> Answer | None:
        """The answers for the tokens after a context; None without a guess."""

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """The tokens that were guessed, below the context's last token."""
        root, kind = context[-1], self.traits.kind
        guesses = self.guesses(context)
        if guesses is None:
            return Rows.chain([root], kind)
        shape = self.shape if parents is None else Static(parents)
        if shape is not None:
            tree = Tree(kind, self._chooser.sampling, len(context), budget, [root])
            return self._grow(tree, shape, guesses)
        return Rows.chain([root, *self.chain(context, guesses, budget)], kind)

    def chain(self, context: Tokens, guesses: Answer, budget: int) -> list[int]:
        """The tokens of a chain of the guesses."""
        count, place = min(budget, len(guesses.candidates)), len(context)
        return self._chooser.choose(guesses.first(count), range(place, place + count))

    def _grow(self, tree: Tree, shape: Shape, guesses: Answer) -> Rows:
        """Grow a tree in which all rows of a depth draw from the same guess."""
        levels = [
            self._chooser.draft_distribution(guesses.rows(slice(i, i + 1)))
            for i in range(len(guesses.candidates))
        ]
        rows = [0]
        while rows:
            answers = {
                row: levels[tree.depths[row]]
                for row in rows
                if tree.depths[row] < len(levels)
            }
            rows = shape.grow(tree, answers) if answers else []
        return shape.finish(tree).depth_first()
