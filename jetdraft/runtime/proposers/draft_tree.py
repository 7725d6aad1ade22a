"""Drafting a tree with a small model, a level or a row at a time."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.proposers.draft import DraftProposer
from jetdraft.runtime.proposers.follower import Follower
from jetdraft.runtime.trees import Shape, Tree


class TreeProposer(DraftProposer):
    """An independent drafter whose draft has a `shape` and siblings of a `kind`.

    The drafter's rows of a tree are never committed: what was right is fed again with
    the next context, one pass for all of it.

        TreeProposer(follower, Best(), Kind.COUPLED).propose(context, budget=8)
    """

    def __init__(
        self, follower: Follower, shape: Shape, kind: Kind, ms_per_token: float = 0.0
    ) -> None:
        super().__init__(follower, ms_per_token)
        self.shape = shape
        self.kind = kind

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """Grow a tree below the context's last token."""
        root = context[-1]
        tree = Tree(self.kind, self._chooser.sampling, len(context), budget, [root])
        answer = self._follower.follow(context)
        found = {0: self._chooser.draft_distribution(answer)}
        # Where the drafter's cache holds a row of the tree; the root is committed.
        slots: dict[int, int] = {}
        while asked := self.shape.grow(tree, found):
            # A wide level is cut, and a full buffer ends the draft.
            room = self.graph.cache.room - len(slots)
            asked = asked[: min(self.graph.contract.max_width, room)]
            if not asked:
                break
            found = self._ask(tree, asked, slots)
        return self.shape.finish(tree).depth_first()

    def _ask(
        self, tree: Tree, asked: list[int], slots: dict[int, int]
    ) -> dict[int, Distribution]:
        """The drafter's distributions after the `asked` rows."""
        filled = len(slots)
        ancestors = [[slots[row] for row in tree.path(r)[1:-1]] for r in asked]
        answer = self.graph.run_branches(
            [tree.tokens[row] for row in asked],
            [tree.depths[row] - 1 for row in asked],
            ancestors,
            filled,
        )
        slots.update((row, filled + i) for i, row in enumerate(asked))
        return {
            row: self._chooser.draft_distribution(answer.rows(slice(i, i + 1)))
            for i, row in enumerate(asked)
        }
