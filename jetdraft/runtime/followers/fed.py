"""The tokens that a graph was fed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.prefix import common_length


class Fed:
    """The `tokens` whose rows are in a graph's cache, unless somebody else runs it.

    fed = Fed(graph)
    graph.run([5, 8, 9])
    fed.add([5, 8, 9])
    fed.shared([5, 8, 2])    # 2
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tokens: list[int] = []
        self._passes = -1

    def shared(self, prompt: Sequence[int]) -> int:
        """How many rows a prompt can keep; 0 if somebody else has run the graph."""
        is_own = self.graph.passes == self._passes
        return common_length(self.tokens, prompt) if is_own else 0

    def agreement(self, context: Sequence[int]) -> int:
        """How many tokens may stay; at least the last of `context` is fed again.

        Only the tokens of the last two passes can differ, so tokens before them are not
        compared.
        """
        end = min(len(self.tokens), len(context) - 1)
        start = max(0, end - 2 * self.graph.contract.max_width)
        for index, token in enumerate(context[start:end], start):
            if self.tokens[index] != token:
                return index
        return end

    def cut(self, count: int) -> None:
        """Keep at most `count` rows."""
        del self.tokens[count:]
        self.graph.cache.rewind(len(self.tokens))

    def add(self, tokens: Sequence[int]) -> None:
        """The last pass has run these tokens, and their rows stay."""
        self.graph.cache.advance(len(tokens))
        self.tokens += tokens
        self.own_pass()

    def again(self, run: Callable[[int], Answer]) -> Answer:
        """The answer of another pass over the last row; `run` gets its token."""
        self.graph.cache.rewind(len(self.tokens) - 1)
        answer = run(self.tokens[-1])
        self.graph.cache.advance(1)
        self.own_pass()
        return answer

    def restore(self, tokens: Sequence[int]) -> None:
        """Somebody has put the rows of these tokens into the cache, or more rows."""
        self.tokens = list(tokens)
        self.graph.cache.rewind(len(self.tokens))
        self.own_pass()

    def own_pass(self) -> None:
        """Note that the last pass left these rows as they are."""
        self._passes = self.graph.passes
