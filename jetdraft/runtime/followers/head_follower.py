"""A head's graph that keeps up with the states of its target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jetdraft.contracts.constants import WIDEST
from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.followers.fed import Fed
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.prefix import common_length

Tail = tuple[int, ...]
"""The last tokens of a text."""


class Recent:
    """The tokens before its rows that a graph reads: `contract.recent` for each row.

    Where that is 0 a tail is empty, and the graph is given nothing.

        recent = Recent(graph)
        tail = recent.tail([5, 8, 9], 1)    # (0, 5)
        recent.before(tail, [8, 9])         # [[0, 5], [5, 8]]
        recent.after(tail, 8)               # (5, 8)
    """

    def __init__(self, graph: Graph) -> None:
        self.count = graph.contract.recent

    def tail(self, text: Sequence[int], end: int) -> Tail:
        """The last of the first `end` tokens of a text; token 0 stands before it."""
        last = text[max(end - self.count, 0) : end]
        return (*[0] * (self.count - len(last)), *last)

    def after(self, tail: Tail, token: int) -> Tail:
        """The tail behind one more token."""
        return (*tail, token)[1:] if self.count else tail

    def rows(self, tails: Sequence[Tail]) -> Int64s | None:
        """What the graph reads with rows behind these tails, int64 [n, q]."""
        return np.array(tails, np.int64) if self.count else None

    def before(self, tail: Tail, tokens: Sequence[int]) -> Int64s | None:
        """What the graph reads with tokens that follow this tail, int64 [n, q]."""
        if not self.count:
            return None
        return sliding_window_view(np.array([*tail, *tokens[:-1]]), self.count)


_NONE = np.zeros((0, 0), np.float32)


class HeadFollower:
    """Keeps a head's cache in step with the features that the target gives.

    Row t of the head reads token t + 1 and the features of the target's row t, and
    answers for token t + 2. Features wait until the next token is known. A drafted
    token has no features of the target: its row reads what the head carried over from
    the row before, and leaves the cache when the target has spoken.

        follower.observe(0, [5, 8, 9], answer.features)    # float [3, w]
        follower.follow([5, 8, 9, 3])    # for what comes after 3
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self._fed = graph, Fed(graph)
        self._seen: list[int] = []
        """The tokens whose features were observed; the head was fed with some."""
        self._features: list[Float32s] = []
        """The features of each token that is seen and not fed, [w]."""
        self._last = _NONE
        """What the last row before a draft carries, [1, w]."""
        self._carried: dict[int, Float32s] = {}
        """What the rows of a tree carry, by slot."""
        self._recent = Recent(graph)
        self._tail: Tail = ()
        """The last tokens before a draft, or before its next token in a chain."""
        self._tails: dict[int, Tail] = {}
        """The last tokens up to each row of a tree, by slot."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a new sequence; the rows that the last sequence shares stay.

        At least one row is left to feed, since its answer is the first to be asked for.
        """
        seen = common_length(self._seen, prompt)
        fed = self._fed.shared(prompt[1:])
        self._cut(max(0, min(fed, seen, len(prompt) - 2)), seen)

    def keep(self, kept: int) -> int:
        """How many of the first `kept` tokens need not be observed again."""
        return min(kept, len(self._seen))

    def waiting(self, tokens: Sequence[int]) -> Float32s | None:
        """The features [1, w] of the last of these tokens, which is not fed yet.

        None if they are not known.
        """
        is_next = len(self._fed.tokens) == len(tokens) - 1
        return np.stack(self._features[:1]) if is_next and self._features else None

    def restore(self, tokens: Sequence[int], waiting: Float32s | None = None) -> None:
        """Somebody else has put the rows of these tokens into the cache.

        The last of them is not the head's, which has `waiting` features at most.
        """
        self._fed.restore(tokens[1:])
        self._features = [] if waiting is None else list(waiting)
        self._seen = list(tokens[: len(tokens) - 1 + len(self._features)])

    def forget(self) -> None:
        """Keep nothing."""
        self._fed.cut(0)
        self._seen, self._features = [], []

    def observe(
        self, first: int, tokens: Sequence[int], features: Float32s | None
    ) -> None:
        """Take the features of tokens, which replace all from position `first` on.

        They wait until the head drafts, which may be never.
        """
        if features is None or first > len(self._seen):
            return  # what it missed is read again with the next prompt
        self._cut(first, first)
        self._seen += tokens
        self._features += list(features)

    def catch_up(self, context: Sequence[int]) -> None:
        """Feed most of what waits, if it is much."""
        self._fed.cut(len(self._fed.tokens))
        while len(self._features) > WIDEST:
            self._feed(self._ready(context)[: len(self._features) - 1])

    def follow(self, context: Sequence[int]) -> Answer | None:
        """The answer for the last row of `context`; None without features for it.

        Tokens that the target has not run yet are fed like drafted tokens.
        """
        self._fed.cut(len(self._fed.tokens))  # drops the rows of the last draft
        answer = None
        while tokens := self._ready(context):
            answer = self._feed(tokens)
            assert answer.carried is not None
            self._last = answer.carried[-1:].copy()
        if answer is not None:
            end = len(self._seen) + 1
            self._tail = self._recent.tail(context, end)
            for token in context[end:]:
                answer = self.step(token)
        self._carried.clear()
        return answer

    def step(self, token: int) -> Answer:
        """The answer for a drafted token; its row is not kept."""
        recent = self._recent.rows([self._tail])
        answer = self.graph.run([token], features=self._last, recent=recent)
        self._tail = self._recent.after(self._tail, token)
        self.graph.cache.advance(1)
        assert answer.carried is not None
        self._last = answer.carried[-1:].copy()
        self._fed.own_pass()
        return answer

    def branch(
        self,
        tokens: Sequence[int],
        depths: Sequence[int],
        ancestors: Sequence[Sequence[int]],
        filled: int,
    ) -> Answer:
        """The answers for rows of a tree, each from what its parent carries."""
        parents = [self._carried[a[-1]] if a else self._last[0] for a in ancestors]
        tails = [self._tails[a[-1]] if a else self._tail for a in ancestors]
        answer = self.graph.run_branches(
            tokens,
            depths,
            ancestors,
            filled,
            features=np.stack(parents),
            recent=self._recent.rows(tails),
        )
        assert answer.carried is not None
        self._carried.update(enumerate(answer.carried.copy(), filled))
        behind = map(self._recent.after, tails, tokens)
        self._tails.update(enumerate(behind, filled))
        self._fed.own_pass()
        return answer

    def _feed(self, tokens: Sequence[int]) -> Answer:
        """Run tokens whose features have waited; the answer for the last row."""
        rows = np.stack(self._features[: len(tokens)])
        del self._features[: len(tokens)]
        tail = self._recent.tail(self._seen, len(self._fed.tokens) + 1)
        recent = self._recent.before(tail, tokens)
        answer = self.graph.run(tokens, last_only=True, features=rows, recent=recent)
        self._fed.add(tokens)
        return answer

    def _ready(self, context: Sequence[int]) -> Sequence[int]:
        """The next tokens whose rows can be fed, as many as a pass holds."""
        start, widest = len(self._fed.tokens) + 1, self.graph.contract.max_width
        end = min(start + widest, len(self._seen) + 1)
        return context[start:end]

    def _cut(self, fed: int, seen: int) -> None:
        """Keep at most `fed` rows in the cache and `seen` tokens.

        The features of the rows that were fed are gone.
        """
        if fed < len(self._fed.tokens):
            seen, self._features = fed, []
        self._fed.cut(fed)
        del self._seen[seen:]
        del self._features[len(self._seen) - len(self._fed.tokens) :]
