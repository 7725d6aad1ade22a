"""All that a sequence has said so far, found by how it ends.

A suffix automaton (Blumer et al., 1985) grows a token at a time, in constant time on
average. Its states are sets of places: every text that ends at the same places shares
one, whose `link` is the longest ending of it that is also found elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0
FAR = 64
"""Links that counting follows: endings of a long repetition form long chains."""


class SuffixAutomaton:
    """Sequences that grow, with how often and how late each ending of them was seen.

    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, 1, 2])
    automaton.follow(automaton.match, 2)    # [3, 1] and their score
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._latest = [0]
        self._last = ROOT
        self._size = 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with the present sequence."""
        for token in tokens:
            self._last = self._grown(token)
            self._size += 1
            self._count_endings()

    def begin(self) -> None:
        """Start another sequence; matches do not reach across."""
        self._last = ROOT

    @property
    def match(self) -> int:
        """The state of the longest ending of the present sequence seen before."""
        again = self._count[self._last] > 1
        return self._last if again else max(self._link[self._last], ROOT)

    def length(self, state: int) -> int:
        """Tokens of the longest text of a state."""
        return self._length[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """One token on in a text that is not the automaton's own.

        From the state of its longest ending that was seen, and how long that is, to
        those of the text with `token` behind it.
        """
        while state != ROOT and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return ROOT, 0
        return self._next[state][token], length + 1

    def follow(self, state: int, count: int) -> tuple[list[int], float]:
        """The tokens that came most often after a state, the latest of equals.

        And how many of them are right if things go on as often as they did. Where a
        sequence ends, what repeats at its end goes on.
        """
        tokens, chance, score = list[int](), 1.0, 0.0
        while len(tokens) < count:
            after = self._next[state]
            if after:
                token = max(after, key=lambda t: self._rank(after[t]))
                chance *= self._count[after[token]] / max(self._count[state], 1)
                score += chance
                tokens.append(token)
                state = after[token]
            elif self._link[state] > ROOT:
                state = self._link[state]
            else:
                break
        return tokens, score

    def _rank(self, state: int) -> tuple[int, int]:
        return self._count[state], self._latest[state]

    def _grown(self, token: int) -> int:
        """The state of the present sequence and `token`."""
        last = self._last
        if token in self._next[last]:
            known = self._next[last][token]
            return self._of_length(known, last, token)
        new = self._add({}, self._length[last] + 1)
        while last >= ROOT and token not in self._next[last]:
            self._next[last][token] = new
            last = self._link[last]
        if last < ROOT:
            self._link[new] = ROOT
        else:
            self._link[new] = self._of_length(self._next[last][token], last, token)
        return new

    def _of_length(self, state: int, before: int, token: int) -> int:
        """`state`, or the part of it that is one token longer than `before`."""
        length = self._length[before] + 1
        if self._length[state] == length:
            return state
        part = self._add(dict(self._next[state]), length)
        self._link[part] = self._link[state]
        self._count[part] = self._count[state]
        self._latest[part] = self._latest[state]
        self._link[state] = part
        while before >= ROOT and self._next[before].get(token) == state:
            self._next[before][token] = part
            before = self._link[before]
        return part

    def _add(self, after: dict[int, int], length: int) -> int:
        self._next.append(after)
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(0)
        return len(self._link) - 1

    def _count_endings(self) -> None:
        state = self._last
        for _ in range(FAR):
            if state <= ROOT:
                break
            self._count[state] += 1
            self._latest[state] = self._size
            state = self._link[state]
