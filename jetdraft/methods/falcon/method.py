"""Drafting with a head that drafts k tokens in a pass (Falcon, 2412.12639)."""

from functools import partial

from jetdraft.runtime.drafters.ahead_cache import AheadCache, Block
from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.drafts.noise import Distribution
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.drafter_methods import token_drafter, token_proposer
from jetdraft.runtime.proposers.model_proposer import distributions
from jetdraft.runtime.trees.shapes import Shape, Tree


def grow_blocks(shape: Shape, cache: DraftCache, answer: Answer, tree: Tree) -> Rows:
    """Grow a tree; one pass fills the blocks of k levels that follow a level's rows."""
    assert isinstance(cache, AheadCache)
    assert cache.block is not None
    size, filled, chooser = cache.size, 0, tree.chooser
    levels = [distributions(level, chooser)[0] for level in cache.block.levels]
    # For the root and the last row of each block: what its block guesses.
    guesses = {0: (cache.block, levels)}
    answers: dict[int, Distribution] = {0: levels[len(cache.drafted)]}
    while rows := shape.grow(tree, answers):
        graph = cache.graph
        room = min(graph.contract.max_width, graph.draft_room(filled))
        rows = rows[: room // cache.rows]  # each may need a block
        if not rows:
            break
        places: dict[int, tuple[int, int]] = {}
        ends: dict[int, tuple[Block, list[int]]] = {}
        for row in rows:
            path = tree.path(row)
            drafted = [tree.tokens[above] for above in reversed(path[:-1])]
            text = [*cache.drafted, *drafted]
            owner = path[min(len(text) % size or size, len(drafted))]
            places[row] = owner, len(text) % size
            if not places[row][1]:
                ends[row] = guesses[owner][0], text[-size:]
                places[row] = row, 0
        if ends:
            found = cache.branch_blocks(list(ends.values()), filled)
            filled += len(ends) * cache.rows
            for row, block in zip(ends, found, strict=True):
                of = [distributions(level, chooser)[0] for level in block.levels]
                guesses[row] = block, of
        answers = {row: guesses[owner][1][n] for row, (owner, n) in places.items()}
    return shape.rows_to_verify(tree).depth_first()


METHOD = token_drafter(
    "falcon",
    "a head that drafts several tokens in a pass",
    "a Falcon drafter",
    lambda contract, target: contract.ahead,
    make=partial(token_proposer, grow=grow_blocks),
    module=("jetdraft.methods.falcon.module:Falcon",),
    task="jetdraft.methods.falcon.task:FalconTask",
)
