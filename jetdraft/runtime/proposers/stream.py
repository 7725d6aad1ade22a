"""Drafting by the target itself, in the pass that verifies (2402.11131)."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.graph import Answer, Graph
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.trees import Shape, Static, Tree


class StreamProposer:
    """Drafts what the streams of the last accepted row said, at no cost of its own.

    Stream j says how the context goes on j places after its last token, which is the
    row's own choice. Without a `shape` the draft is a chain.

        StreamProposer(model.target).propose(context, budget=4)
    """

    name = "stream"
    session_seconds = 0.0
    ms_per_token = 0.0

    def __init__(
        self, graph: Graph, shape: Shape | None = None, kind: Kind = Kind.COUPLED
    ) -> None:
        self.shape = shape
        self.kind = kind
        self.streams = graph.contract.streams
        self.branches = graph.contract.tree and shape is None
        widest = graph.contract.max_width - 1
        chain = shape is None and not self.branches
        self.max_draft_tokens = self.streams if chain else widest
        self._chooser = Chooser(Sampling())
        self._ready: tuple[int, Answer] | None = None

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence."""
        self._chooser = chooser
        self._ready = None

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """The streams' tokens after the context's last, if the last pass had any."""
        root = context[-1]
        if self._ready is None or self._ready[0] != len(context):
            return Rows.chain([root], self.kind)
        streams = self._ready[1]
        shape = self.shape if parents is None else Static(parents)
        if shape is not None:
            tree = Tree(self.kind, self._chooser.sampling, len(context), budget, [root])
            return self._grow(tree, shape, streams)
        said = streams.first(min(budget, len(streams.candidates)))
        positions = range(len(context), len(context) + len(said.candidates))
        return Rows.chain([root, *self._chooser.choose(said, positions)], self.kind)

    def _grow(self, tree: Tree, shape: Shape, streams: Answer) -> Rows:
        """All rows of one depth have the same distribution: that of their stream."""
        levels = [
            self._chooser.draft_distribution(streams.rows(slice(i, i + 1)))
            for i in range(len(streams.candidates))
        ]
        asked = [0]
        while asked:
            found = {
                row: levels[tree.depths[row]]
                for row in asked
                if tree.depths[row] < len(levels)
            }
            asked = shape.grow(tree, found) if found else []
        return shape.finish(tree).depth_first()

    def observe(self, length: int, answer: Answer, row: int) -> None:
        """Keep what the last accepted row's streams said."""
        streams = answer.streams.get(row)
        self._ready = None if streams is None else (length, streams)
