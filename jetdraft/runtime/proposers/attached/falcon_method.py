"""Drafting with a head that drafts k tokens in a pass (Falcon, 2412.12639).

A pass over a block of k rows answers for the k tokens behind it, and predicts their
features. So a chain of n tokens takes n / k passes, and a tree a pass for k levels: its
rows of a level share a guess with all rows that have the same block before them.
"""

from __future__ import annotations

from jetdraft.bundle import Bundle
from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.followers.falcon_follower import Block, FalconFollower
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.draft import (
    SAMPLES,
    DraftOptions,
    DraftProposer,
    GrowingProposer,
    check_trees,
    needs_drafter,
)
from jetdraft.runtime.proposers.draft_stops import draft_stop
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer
from jetdraft.runtime.trees.shape import Tree

NAME = "falcon"


class FalconTree(GrowingProposer):
    """Drafts trees; one pass of the drafter gives the distributions of k levels.

    FalconTree(follower, Best(), Kind.COUPLED).propose(context, budget=8)
    """

    _follower: FalconFollower

    def _first(self, answer: Answer) -> Distribution:
        """The guess behind the root; the block's other guesses wait."""
        assert self._follower.block is not None
        self._filled = 0
        self._guesses = {0: self._kept(self._follower.block)}
        return self._guesses[0][1][len(self._follower.drafted)]

    def _kept(self, block: Block) -> tuple[Block, list[Distribution]]:
        """A block with the distributions of its levels, which no pass overwrites."""
        return block, [
            self._chooser.draft_distribution(level) for level in block.levels
        ]

    def _room(self) -> int:
        """How many rows can be asked about; each may need a block."""
        graph, rows = self.graph, self._follower.rows
        room = graph.draft_room(self._filled)
        return min(graph.contract.max_width, room) // rows

    def _ask(self, tree: Tree, rows: list[int]) -> dict[int, Distribution]:
        """The distributions after rows: a pass runs the blocks that rows complete."""
        size = self._follower.size
        places: dict[int, tuple[int, int]] = {}
        ends: dict[int, tuple[Block, list[int]]] = {}
        for row in rows:
            path = tree.path(row)
            drafted = [tree.tokens[above] for above in reversed(path[:-1])]
            text = [*self._follower.drafted, *drafted]
            # The row whose block guesses what follows, or the root.
            owner = path[min(len(text) % size or size, len(drafted))]
            places[row] = owner, len(text) % size
            if not places[row][1]:
                ends[row] = self._guesses[owner][0], text[-size:]
                places[row] = row, 0
        if ends:
            blocks = self._follower.branch(list(ends.values()), self._filled)
            self._filled += len(ends) * self._follower.rows
            self._guesses.update(zip(ends, map(self._kept, blocks), strict=True))
        return {r: self._guesses[owner][1][p] for r, (owner, p) in places.items()}


def _lacks(bundle: Bundle) -> str:
    entry = bundle.drafter
    is_falcon = entry is not None and entry.contract.ahead
    return "" if is_falcon else "export with --head, and a Falcon drafter"


def _make(parts: Parts, options: DraftOptions) -> Proposer:
    follower = parts.follower
    if not isinstance(follower, FalconFollower):
        raise needs_drafter(NAME, "a Falcon drafter", "--head")
    check_trees(follower.graph)
    ms = parts.curve.drafter / follower.size
    if not options.branched:
        stopping = draft_stop(options.stopping, options.stop_threshold, parts)
        return DraftProposer(follower, ms, stopping, NAME)
    check_trees(parts.target)
    return FalconTree(follower, options.shape, options.kind, ms, NAME)


METHOD = Method(
    NAME,
    "a head that drafts several tokens in a pass",
    _make,
    DraftOptions,
    lacks=_lacks,
    trees=True,
    cost="drafter",
    samples=SAMPLES,
    alone={},
)
