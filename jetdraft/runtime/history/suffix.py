"""Finds where the end of a token sequence occurred before, and what followed it.

A suffix automaton (Blumer et al., 1985). All texts that end at the same places share a
state; its `link` is the state of the longest of their endings that occurs elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0
MAX_LINKS = 64
"""Links that are followed to count occurrences: repetitions form long chains."""


class SuffixAutomaton:
    """Counts parts of token sequences, and keeps their last places; states are ints."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._latest = [0]
        self._last = ROOT
        self._size = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the current sequence."""
        for token in tokens:
            self._last = self._append_token(token)
            self._size += 1
            ending = self._last
            for _ in range(MAX_LINKS):
                if ending <= ROOT:
                    break
                self._count[ending] += 1
                self._latest[ending] = self._size
                ending = self._link[ending]

    def begin(self) -> None:
        """Start another sequence; no match spans two sequences."""
        self._last = ROOT

    @property
    def match(self) -> int:
        """The state of the longest ending of the sequence that occurred before."""
        occurred_before = self._count[self._last] > 1
        return self._last if occurred_before else max(self._link[self._last], ROOT)

    def length(self, state: int) -> int:
        """The number of tokens of the longest text of a state."""
        return self._length[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Advance a match of another text by `token`; returns its state and length."""
        while state != ROOT and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return ROOT, 0
        return self._next[state][token], length + 1

    def follow(self, state: int, count: int) -> tuple[list[int], float]:
        """Return at most `count` tokens that likely follow a state, and their score.

        Each is the most frequent next token, of equals the latest. The score is the
        expected number of right tokens, by these frequencies. At the end of a sequence,
        the tokens after its longest ending that also occurs elsewhere follow.
        """
        tokens, chance, score = list[int](), 1.0, 0.0
        while len(tokens) < count:
            successors = self._next[state]
            if successors:
                token = max(successors, key=lambda t: self._rank(successors[t]))
                chance *= self._count[successors[token]] / max(self._count[state], 1)
                score += chance
                tokens.append(token)
                state = successors[token]
            elif self._link[state] > ROOT:
                state = self._link[state]
            else:
                break
        return tokens, score

    def _rank(self, state: int) -> tuple[int, int]:
        """How often, and then how recently, the texts of a state occurred."""
        return self._count[state], self._latest[state]

    def _append_token(self, token: int) -> int:
        """Append `token` to the current sequence; returns the sequence's new state."""
        last = self._last
        if token in self._next[last]:
            return self._exact_state(self._next[last][token], last, token)
        new = self._add_state({}, self._length[last] + 1)
        while last >= ROOT and token not in self._next[last]:
            self._next[last][token] = new
            last = self._link[last]
        if last < ROOT:
            self._link[new] = ROOT
        else:
            self._link[new] = self._exact_state(self._next[last][token], last, token)
        return new

    def _exact_state(self, state: int, before: int, token: int) -> int:
        """The state for `before`'s longest text plus `token`; may split `state`."""
        length = self._length[before] + 1
        if self._length[state] == length:
            return state
        split = self._add_state(dict(self._next[state]), length)
        self._link[split] = self._link[state]
        self._count[split] = self._count[state]
        self._latest[split] = self._latest[state]
        self._link[state] = split
        while before >= ROOT and self._next[before].get(token) == state:
            self._next[before][token] = split
            before = self._link[before]
        return split

    def _add_state(self, successors: dict[int, int], length: int) -> int:
        """Add a state that has not occurred yet; returns its number."""
        self._next.append(successors)
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(0)
        return len(self._link) - 1
