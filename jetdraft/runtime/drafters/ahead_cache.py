"""The rows of a graph that drafts k tokens in a pass (Falcon, 2412.12639)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jetdraft.contracts.tensors import Float32s
from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.drafts.rows import Tokens
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.prefix import common_length

_MAX_NEW_ROWS = 16  # In a pass with the copies of a block.


@dataclass(frozen=True)
class Block:
    """The guesses of one pass for the k tokens after a text.

    `levels` are their answers, views that the next pass overwrites. `features` [k - 1 +
    k, w] belong to the k - 1 rows before the block, whose tokens are the `tail`, and to
    the block. It begins `depth` positions past the cursor, and sees the `slots`.
    """

    levels: Sequence[Answer]
    features: Float32s
    tail: tuple[int, ...]
    slots: tuple[int, ...] = ()
    depth: int = 0


class AheadCache(DraftCache):
    """Keeps a graph that drafts k tokens in a pass in step with its target's features.

    Row t reads, of the last k rows, the features of each and the token after each, and
    answers for token t + k + 1. A pass has a copy of each row of a block but the last;
    a copy sees all other rows of the block. Only rows whose block is whole are kept:
    the last k - 1 are run again with the next block (2412.12639).
    """

    _first_read = 1  # Row t reads token t + 1.

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.size = graph.contract.ahead  # the tokens of a block, k
        # The block behind what was followed, or behind a chain's last block, and its
        # first tokens, which are known.
        self.block: Block | None = None
        self.drafted: list[int] = []

    @property
    def rows(self) -> int:
        """The rows of a pass for each block, copies included."""
        return 2 * self.size - 1

    def begin(self, prompt: Tokens) -> None:
        super().begin(prompt)
        if len(self.seen) - len(self._features) > self._first_needed:
            self._forget_needed()

    def restore(self, tokens: Tokens, waiting: Float32s | None = None) -> None:
        super().restore(tokens)
        self._forget_needed()

    def observe(self, first: int, tokens: Tokens, features: Float32s | None) -> None:
        """Replace what follows `first`; do nothing without features or at a gap."""
        if features is None or first > len(self.seen):
            return  # what it missed is read again with the next prompt
        self._truncate(self._count_kept_rows(first, tokens), first)
        self.seen += tokens
        self._features += list(features)
        self._run_rows(self.seen, len(self.seen) - 1, self.graph.contract.max_width)
        start = len(self.seen) - len(self._features)
        del self._features[: max(self._first_needed - start, 0)]

    def catch_up(self, context: Tokens) -> None:
        """Run rows of `context` until a single pass can run the others."""
        self._rewind(len(self.tokens))
        self._run_rows(context, min(len(self.seen), len(context) - 1), self._most_rows)

    def follow(self, context: Tokens) -> Answer | None:
        """The answer for the token after `context`; None without features for it."""
        rows = min(len(self.seen), len(context) - 1)
        # The rows of the last block, and of the last draft, are run again.
        self._rewind(max(0, min(len(self.tokens), rows - self.size)))
        self.block, self.drafted = None, []
        if rows < self.size:
            return None
        self._run_rows(context, rows, self._most_rows)
        first = len(self.tokens)
        tokens = context[first + 1 : rows + 1]
        features = self._target_features(first, len(tokens))
        known = Block((), features, self._window_at(context, first + 1))
        self.block = self._run_block(known, tokens)
        if self.block is None:
            return None
        self._append_rows(tokens)
        answer: Answer | None = self.block.levels[0]
        for token in context[rows + 1 :]:
            answer = self.step(token)
        return answer

    def step(self, token: int) -> Answer | None:
        """Append a drafted token; the answer for the next token, None without room."""
        if self.block is None:
            return None
        self.drafted.append(token)
        if len(self.drafted) == self.size:
            self.block = self._run_block(self.block, self.drafted)
            if self.block is None:
                return None
            self.graph.cache.advance(self.size)
            self.drafted = []
        return self.block.levels[len(self.drafted)]

    def branch_blocks(
        self, blocks: Sequence[tuple[Block, Sequence[int]]], filled: int
    ) -> list[Block]:
        """Run pairs of a block and tokens after it; return the blocks behind."""
        size, all_slots = self.size, list[range]()
        tokens, depths, ancestors = list[int](), list[int](), list[list[int]]()
        features, recent = list[Float32s](), list[Sequence[int]]()
        for start, added in blocks:
            first, count = filled + len(tokens), len(added)
            slots, text = range(first, first + count), [*start.tail, *added]
            rows = [(row, list(slots[:row])) for row in range(count)]
            copied = range(count - size, count - 1)
            rows += [(row, [s for s in slots if s != slots[row]]) for row in copied]
            for row, seen in rows:
                tokens.append(added[row])
                depths.append(start.depth + row)
                ancestors.append([*start.slots, *seen])
                features.append(start.features[row : row + size].reshape(-1))
                recent.append(text[row : row + size - 1])
            all_slots.append(slots)
        given = tokens, depths, ancestors, filled
        read = np.stack(features), np.array(recent, np.int64)
        answer = self.graph.run_branches(*given, features=read[0], recent=read[1])
        self._passes = self.graph.passes
        assert answer.carried is not None
        behind = []
        for (block, added), slots in zip(blocks, all_slots, strict=True):
            end = slots.stop - filled
            # The copies follow the last row, whose answer is the last level's.
            order = [*range(end, end + size - 1), end - 1]
            behind.append(
                Block(
                    [answer.rows(slice(row, row + 1)) for row in order],
                    np.concatenate([block.features[1 - size :], answer.carried[order]]),
                    (*block.tail, *added)[1 - size :],
                    (*block.slots, *slots),
                    block.depth + len(added),
                )
            )
        return behind

    def _run_block(self, start: Block, tokens: Tokens) -> Block | None:
        """Run `tokens` after `start`; the block after them, or None without room."""
        rows = len(tokens) + self.size - 1
        if rows > min(self.graph.draft_room(0), self.graph.contract.max_width):
            return None
        [block] = self.branch_blocks([(start, tokens)], 0)
        return replace(block, slots=(), depth=0)

    def _run_rows(self, text: Tokens, rows: int, left: int) -> None:
        """Run a text's rows in wide passes until at most `left` of `rows` are left."""
        widest = self.graph.contract.max_width
        while (missing := rows - len(self.tokens)) > left:
            first = len(self.tokens)
            count = min(widest, missing - self.size)
            tokens = text[first + 1 : first + 1 + count]
            recent = self._windows(text, first + 1, count)
            features = self._target_features(first, count)
            windows = sliding_window_view(features, self.size, axis=0)
            features = windows.swapaxes(1, 2).reshape(count, -1)
            self.graph.run(tokens, True, features=features, recent=recent)
            self._append_rows(tokens)

    def _target_features(self, row: int, count: int) -> Float32s:
        """The target's features [k - 1 + count, w] from `row` - (k - 1) on."""
        start = len(self.seen) - len(self._features)
        width = self.graph.contract.feature_input
        places = range(row + 1 - self.size - start, row + count - start)
        rows = [self._features[at] if at >= 0 else np.zeros(width) for at in places]
        return np.array(rows, np.float32)

    @property
    def _most_rows(self) -> int:
        return min(_MAX_NEW_ROWS, self.graph.contract.max_width + 1 - self.size)

    @property
    def _first_needed(self) -> int:
        """The first row whose features the next block may read."""
        return max(0, len(self.tokens) - 2 * self.size + 1)

    def _forget_needed(self) -> None:
        """Forget the tokens whose features are needed; the target runs them again."""
        del self.seen[self._first_needed :]
        self._features = []

    def _count_kept_rows(self, first: int, tokens: Tokens) -> int:
        """How many rows come before the first row that read another token."""
        start, fed = max(first - 1, 0), self.tokens
        read = tokens[start + 1 - first :]
        agreed = common_length(fed[start:], read)
        return start + agreed if agreed < len(read) else len(fed)

    def _truncate(self, fed: int, seen: int) -> None:
        self._rewind(fed)
        start = len(self.seen) - len(self._features)
        del self.seen[seen:]
        del self._features[max(len(self.seen) - start, 0) :]
