"""The rows in a drafter's buffers, kept in step with the committed sequence."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from jetdraft.contracts.tensors import WIDEST, Float32s, Int64s
from jetdraft.runtime.drafts.rows import Tokens
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.buffers import HOST
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.halves import LeadingHalf, PlacedRows
from jetdraft.runtime.passes.prefix import common_length

MODEL_READS = 64
"""How many tokens of a new prompt a drafter model reads on the CPU: the last."""


class DraftCache:
    """Keeps a graph in step with the sequence, for all proposers that draft with it.

    A head's drafted rows are dropped once the target's features are known; others stay
    until the sequence differs. On the CPU a model reads the end of a prompt, as if the
    text began there. `tokens` are the tokens that the graph has read or skipped, `seen`
    the tokens whose features were observed.

        cache = DraftCache(graph)
        cache.observe(0, [5, 8, 9], answer.features)    # float [3, w]; a head needs it
        answer = cache.follow([5, 8, 9, 3])    # for what comes after 3
        answer = cache.step(7)    # for what comes after a drafted 7
    """

    _first_read = 0  # The first token of a text that windows have.

    def __init__(self, graph: Graph) -> None:
        contract = graph.contract
        self.graph = graph
        self.reads, self.carry = contract.feature_input > 0, contract.carried_size > 0
        self.shift, self.window = int(self.reads), contract.recent
        # A model on the CPU skips text and reads guesses. No GPU was measured.
        self.skips = contract.stands_alone and graph.memory is HOST
        self.tokens: list[int] = []
        self.seen: list[int] = []
        # The features [w] of each token that is seen and has no row yet.
        self._features: list[Float32s] = []
        # How many of `tokens` were skipped; the graph's passes at the last row.
        self._skipped, self._passes = 0, -1
        # What the last row carries, or of a block what it has read, [1, w].
        self._carried: Float32s | None = None
        self._next_window: Sequence[int] = ()  # the window of the next drafted row
        # By slot, what a row of a tree carries, and the window behind it.
        self._branches: dict[int, tuple[Float32s, Sequence[int]]] = {}
        self._ahead: Sequence[int] = ()  # tokens of a block that the target has not run
        self._most_left = WIDEST  # rows that the last draft can leave to read

    def begin(self, prompt: Tokens) -> None:
        """Start a new sequence; keep the rows that it shares with the last."""
        seen = common_length(self.seen, prompt)
        own = self.graph.passes == self._passes  # else another caller has run the graph
        fed = common_length(self.tokens, prompt[self.shift :]) if own else 0
        if self.shift:  # a row gives the first answer, so one row is left to feed
            fed = max(0, min(fed, seen, len(prompt) - 2))
        self._truncate(fed, seen)
        last = max(0, len(prompt) - MODEL_READS) if self.skips else 0
        if not self._skipped <= last <= fed:
            self._rewind(0)
            self.tokens, self._skipped = list(prompt[:last]), last

    def keep(self, kept: int) -> int:
        """How many of the first `kept` tokens need not be observed again."""
        return min(kept, len(self.seen)) if self.reads else kept

    def waiting(self, tokens: Tokens) -> Float32s | None:
        """The features [1, w] of the last token if only its row is missing, or None."""
        is_next = self.shift and len(self.tokens) == len(tokens) - 1
        return np.stack(self._features[:1]) if is_next and self._features else None

    def restore(self, tokens: Tokens, waiting: Float32s | None = None) -> None:
        """Adopt a file's rows of these tokens; `waiting` has features of the last."""
        self.tokens, self._skipped = list(tokens[self.shift :]), 0
        self.graph.cache.rewind(len(self.tokens))
        self._passes = self.graph.passes
        self._features = [] if waiting is None else list(waiting)
        self.seen = list(tokens[: len(self.tokens) + len(self._features)])

    def forget(self) -> None:
        self._truncate(0, 0)

    def observe(self, first: int, tokens: Tokens, features: Float32s | None) -> None:
        """Store `features` [n, w] of n `tokens`, which replace all from `first` on."""
        if not self.reads or features is None or first > len(self.seen):
            return  # what it missed is read again with the next prompt
        if max(len(self.seen), len(self.tokens)) > first:
            self._truncate(self._count_kept_rows(first, tokens), first)
        self.seen += tokens
        # Rows that are kept need no features.
        self._features += list(features[max(len(self.tokens) - first, 0) :])

    def catch_up(self, context: Tokens) -> None:
        """Run all missing rows but one, if more are missing than a draft can leave."""
        self._drop_differing(context)
        if self._count_missing(context) <= self._most_left:
            return
        while (missing := self._count_missing(context)) > 1:
            self._feed(context, missing - 1)

    def follow(self, context: Tokens) -> Answer | None:
        """Run all rows of `context`; the answer after it, or None without features."""
        self._drop_differing(context)
        answer, contract = None, self.graph.contract
        self._most_left = min(1 + max(contract.block, contract.guesses, 1), WIDEST)
        while (missing := self._count_missing(context)) > 0:
            answer = self._feed(context, missing)
        return self._feed_unseen(context, answer) if self.shift else answer

    def _feed_unseen(self, text: Tokens, answer: Answer | None) -> Answer | None:
        """Draft over tokens that the target has not run; the answer after them."""
        known = len(self.seen) + 1
        if not self.graph.contract.block:
            self._branches.clear()
            self._next_window = self._window_at(text, known)
            for token in text[known:] if answer is not None else ():
                answer = self.step(token)
            return answer
        self._ahead = text[known:]
        if answer is None or not self._ahead:
            return answer
        return self.refine(()) if len(self._ahead) < self.graph.contract.block else None

    def step(self, token: int) -> Answer | None:
        """Run a drafted token at the cursor; None in a subclass that lacks room."""
        if not self.carry:
            return self.review([*self.tokens, token], ())
        self._most_left = min(self._most_left + 1, WIDEST)
        recent = np.array([self._next_window], np.int64) if self.window else None
        answer = self.graph.run([token], features=self._carried, recent=recent)
        assert answer.carried is not None
        self._carried = answer.carried[-1:].copy()
        self._next_window = (*self._next_window, token)[1:]
        self.graph.cache.advance(1)
        self._passes = self.graph.passes
        return answer

    def branch(self, placed: PlacedRows) -> Answer:
        """Run rows of a tree and keep what they carry; see `Graph.run_branches`."""
        self._most_left = WIDEST
        features = recent = None
        if self.carry:
            assert self._carried is not None
            root = self._carried[0], self._next_window
            above = [self._branches[a[-1]] if a else root for a in placed.ancestors]
            features = np.stack([carried for carried, _ in above])
            if self.window:
                recent = np.array([window for _, window in above], np.int64)
        answer = self.graph.run_branches(*placed, features=features, recent=recent)
        self._passes = self.graph.passes
        if self.carry:
            assert answer.carried is not None
            rows = zip(answer.carried.copy(), above, placed.tokens, strict=True)
            behind = ((row, (*window, token)[1:]) for row, (_, window), token in rows)
            self._branches.update(enumerate(behind, placed.filled))
        return answer

    def refine(self, known: Sequence[int]) -> Answer:
        """Run a block again with its first tokens `known`; the guesses after them."""
        block = [*self._ahead, *known]
        self.graph.cache.rewind(len(self.tokens) - 1)
        answer = self.graph.run(self.tokens[-1:], features=self._carried, block=block)
        self.graph.cache.advance(1)
        self._passes = self.graph.passes
        return answer.rows(slice(len(block), None))

    def review(self, context: Tokens, guess: Sequence[int]) -> Answer:
        """Run `context` and guesses; the answers after its end and after each guess."""
        self._drop_differing(context)
        widest = min(WIDEST, self.graph.contract.max_width)
        if len(context) + len(guess) - len(self.tokens) > widest:
            self.follow(context[:-1])
        rest = context[len(self.tokens) :]
        self._most_left = 2  # the last token of a draft, and the target's own
        answer = self.graph.run([*rest, *guess])
        self._append_rows([*rest, *guess])
        return answer.rows(slice(len(rest) - 1, None))

    def _count_missing(self, context: Tokens) -> int:
        missing = len(context) - self.shift - len(self.tokens)
        return min(missing, len(self._features)) if self.reads else missing

    def _feed(self, context: Tokens, missing: int) -> Answer:
        """Run a pass of the next `missing` rows; the answer for the last in it."""
        count = min(missing, self.graph.contract.max_width)
        first = len(self.tokens) + self.shift
        tokens, features, recent = context[first : first + count], None, None
        if self.reads:
            features = np.stack(self._features[:count])
            del self._features[:count]
            recent = self._windows(context, first, count)
        answer = self.graph.run(tokens, True, features=features, recent=recent)
        self._append_rows(tokens)
        if answer.carried is not None:
            self._carried = answer.carried[-1:].copy()
        elif features is not None:
            self._carried = features[-1:]
        return answer

    def _append_rows(self, tokens: Tokens) -> None:
        """Advance the cursor over the rows of the last pass, which read `tokens`."""
        self.graph.cache.advance(len(tokens))
        self.tokens += tokens
        self._passes = self.graph.passes

    def _window_at(self, text: Tokens, end: int) -> tuple[int, ...]:
        """The window behind the first `end` tokens; token 0 stands before a text."""
        last = text[max(end - self.window, self._first_read) : end]
        return (*[0] * (self.window - len(last)), *last)

    def _windows(self, text: Tokens, first: int, count: int) -> Int64s | None:
        if not self.window:
            return None
        before = self._window_at(text, first)
        behind = text[first : first + count - 1]
        return sliding_window_view(np.array([*before, *behind]), self.window)

    def _drop_differing(self, context: Tokens) -> None:
        """Drop the rows that differ from a context, and its last row."""
        end = len(self.tokens)
        if not self.shift:
            end = min(end, len(context) - 1)
            start = max(0, end - 2 * self.graph.contract.max_width)
            end = start + common_length(self.tokens[start:end], context[start:end])
        self._rewind(end)

    def _count_kept_rows(self, first: int, tokens: Tokens) -> int:
        """How many rows stay if `tokens` replace all from `first` on: here, `first`."""
        return first

    def _truncate(self, fed: int, seen: int) -> None:
        if fed < len(self.tokens):
            seen, self._features = min(seen, fed), []
        self._rewind(fed)
        del self.seen[seen:]
        del self._features[max(len(self.seen) - len(self.tokens), 0) :]

    def _rewind(self, count: int) -> None:
        del self.tokens[count:]
        self._skipped = min(self._skipped, len(self.tokens))
        self.graph.cache.rewind(len(self.tokens) - self._skipped)


class LastRowCache(DraftCache):
    """Keeps the features of the target's last row, for a graph without buffers."""

    _length = 0
    """The tokens up to that row; 0 if it is not known."""

    def forget(self) -> None:
        self._length = 0

    def begin(self, prompt: Tokens) -> None:
        self.forget()

    def restore(self, tokens: Tokens, waiting: Float32s | None = None) -> None:
        self.forget()  # a file does not hold its features

    def keep(self, kept: int) -> int:
        """All `kept` tokens: no row needs to be observed again."""
        return kept

    def observe(self, first: int, tokens: Tokens, features: Float32s | None) -> None:
        """Copy the features of the last of these tokens; None changes nothing."""
        if features is not None:
            self._length, self._features = first + len(tokens), [features[-1].copy()]

    def catch_up(self, context: Tokens) -> None:
        """Do nothing: only the last row is ever missing."""

    def follow(self, context: Tokens) -> Answer | None:
        """The answer after `context`; None if only a part of it was observed."""
        if not self._length or self._length + 1 != len(context):
            return None
        self.graph.cache.rewind(0)  # steps move the cursor
        answer = self.graph.run(context[-1:], features=np.stack(self._features))
        if answer.carried is not None:
            self._carried = answer.carried[-1:].copy()
        return answer


class LedCache(DraftCache):
    """Keeps an adapter in step with its target's lower half, which runs ahead."""

    def __init__(self, graph: Graph, leading: Callable[[], LeadingHalf]) -> None:
        super().__init__(graph)
        self.shift, self._leading = 0, leading

    def begin(self, prompt: Tokens) -> None:
        super().begin(prompt)
        if len(self.seen) < len(self.tokens):
            self.seen = list(self.tokens)

    def follow(self, context: Tokens) -> Answer | None:
        """The answer for the last row of `context`; None without the rows before it."""
        answer = super().follow(context)
        if len(self.tokens) == len(context):
            return answer
        if len(self.tokens) < self._leading().cache.length:
            return None
        return self._lead(context)

    def step(self, token: int) -> Answer | None:
        """Run a drafted token; the answer after it, or None if it does not fit."""
        return self._lead([*self.tokens, token])

    def branch(self, placed: PlacedRows) -> Answer:
        states = self._leading().branch(placed)
        answer = self.graph.run_branches(*placed, features=states)
        self._passes = self.graph.passes
        return answer

    def _lead(self, text: Tokens) -> Answer | None:
        """Run a text's missing rows; the last answer, or None if they do not fit."""
        states = self._leading().lead(text)
        if states is None:
            return None
        tokens = text[len(self.tokens) :]
        states = states[len(states) - len(tokens) :]
        answer = self.graph.run(tokens, True, features=states)
        self._append_rows(tokens)
        return answer

    def _count_kept_rows(self, first: int, tokens: Tokens) -> int:
        """How many rows stay: `first`, and the rows that the `tokens` confirm."""
        return first + common_length(self.tokens[first:], tokens)
