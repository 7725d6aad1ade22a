"""Prompt lookup and suffix decoding (SuffixDecoding, 2411.04975)."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from jetdraft.contracts.tensors import WIDEST
from jetdraft.runtime.drafts.rows import Rows, Tokens
from jetdraft.runtime.history.store import ResponseStore
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Traits
from jetdraft.runtime.sampling.chooser import Chooser

MAX_INDEXED = 32768  # Tokens of earlier responses, half a kilobyte each.
MAX_EVIDENCE = 5  # Matches of 16 tokens and more are alike.
ROOT = 0
MAX_LINKS = 64  # Links followed to count occurrences, as chains are long.


class LookupProposer(Proposer):
    """Matches endings in prompt and output, and in the responses of a `store`.

    Its evidence is the length of the match, in doublings: after one token a draft was
    right in 0.15 of the places, after two or three in 0.4 to 0.8, after eight and more
    in 0.95 (docs/log/controller.md). So a draft is no longer than its match, or
    `max_match`. At the end of the sequence it continues with its own beginning. A
    `source` is looked up too, since summaries and corrections copy it. A draft ends
    before the token `end`, such as a picture's.
    """

    def __init__(
        self,
        max_match: int = 16,
        store: ResponseStore | None = None,
        source: Callable[[], Sequence[int]] = tuple,
        end: int | None = None,
    ) -> None:
        self.traits = Traits("lookup", max_draft_tokens=max_match)
        earlier = [] if store is None else [_ResponseLookup(store)]
        self._lookups: list[_SequenceLookup] = [_SequenceLookup(), *earlier]
        self._source, self._end, self._before = source, end, list[int]()

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence, and index the responses stored since."""
        self._before = list(self._source())
        for source in self._lookups:
            source.begin()

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        self.read(context)
        guess = self.guess_after([], min(budget, self.traits.max_draft_tokens))
        self.evidence = guess.evidence(0)
        return Rows.chain([context[-1], *guess.tokens])

    def read(self, context: Tokens) -> None:
        """Index the new tokens of `context`, which `guess_after` continues."""
        if self._before:
            context = [*self._before, *context]
        for source in self._lookups:
            source.read(context)

    def guess_after(self, drafted: Sequence[int], count: int) -> "Guess":
        """The best guess of `count` tokens after the context and `drafted` tokens."""
        guesses = [source.guess_after(drafted, count) for source in self._lookups]
        best = max(guesses, key=lambda guess: guess.score)
        if self._end not in best.tokens:
            return best
        return best._replace(tokens=best.tokens[: best.tokens.index(self._end)])


class Guess(NamedTuple):
    """The tokens after a match, their score, and how many tokens matched."""

    tokens: list[int]
    score: float
    match: int

    def evidence(self, place: int) -> int:
        """The grade of the match before the token at `place`: 0 without a match.

        Grades 1 to 5 are matches of 1, 2-3, 4-7, 8-15, and 16 or more tokens.
        """
        return min((self.match + place).bit_length(), MAX_EVIDENCE)


class _SequenceLookup:
    """Looks up endings in prompt and output; see `LookupProposer` for the methods."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._automaton = SuffixAutomaton()
        self._place, self._read = (ROOT, 0), list[int]()

    begin = _restart

    def read(self, context: Sequence[int]) -> None:
        """Learn the tokens of a context that were not read before."""
        start = max(0, len(self._read) - 2 * WIDEST)
        if list(context[start : len(self._read)]) != self._read[start:]:
            self._restart()
        fresh = context[len(self._read) :]
        self._learn(fresh)
        self._read += fresh

    def _learn(self, fresh: Sequence[int]) -> None:
        self._automaton.extend(fresh)
        self._place = self._automaton.match

    def guess_after(self, drafted: Sequence[int], count: int) -> Guess:
        """The tokens after the match, at most as many as matched."""
        place = self._place
        for token in drafted:
            place = self._automaton.step(*place, token)
        state, length = place
        return Guess(*self._automaton.follow(state, min(count, length)), length)


class _ResponseLookup(_SequenceLookup):
    """Looks up endings in the responses of earlier requests; as `_SequenceLookup`."""

    def __init__(self, store: ResponseStore) -> None:
        super().__init__()
        self._automaton, self._store = SuffixAutomaton(), store
        self._indexed: set[tuple[int, float]] = set()

    def _restart(self) -> None:
        self._place, self._read = (ROOT, 0), []

    def begin(self) -> None:
        self._restart()
        sizes = accumulate(len(entry.response) for entry in self._store.entries)
        entries = self._store.entries[: sum(size <= MAX_INDEXED for size in sizes)]
        if len(self._indexed) > 2 * len(entries):
            self._automaton, self._indexed = SuffixAutomaton(), set()
        for entry in reversed(entries):
            # The id alone is not enough: SQLite gives the ids of deleted entries again.
            key = entry.id, entry.used
            if key not in self._indexed:
                self._indexed.add(key)
                self._automaton.begin()
                self._automaton.extend(entry.response)

    def _learn(self, fresh: Sequence[int]) -> None:
        for token in fresh:
            self._place = self._automaton.step(*self._place, token)


class SuffixAutomaton:
    """Counts parts of token sequences, and keeps their last places (Blumer, 1985).

    A state, an int, is for all texts that end at the same places; its `link` is for
    their longest ending that occurs elsewhere.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._count, self._latest = [-1], [0], [0], [0]
        self._last, self._size = ROOT, 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the current sequence."""
        for token in tokens:
            ending = self._last = self._append_token(token)
            self._size += 1
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
    def match(self) -> tuple[int, int]:
        """The longest ending of the sequence that occurred before: state and length."""
        occurred_before = self._count[self._last] > 1
        state = self._last if occurred_before else max(self._link[self._last], ROOT)
        return state, self._length[state]

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

        Each is the most frequent next token, of equals the latest; the score is the
        expected number of right tokens. After the end of a sequence follows what
        follows its longest ending elsewhere.
        """
        tokens, chance, score = list[int](), 1.0, 0.0
        while len(tokens) < count:
            after = self._next[state]
            if after:
                # Which occurred most often, and of these the latest.
                ranks = {t: (self._count[s], self._latest[s]) for t, s in after.items()}
                token = max(ranks, key=ranks.__getitem__)
                chance *= self._count[after[token]] / max(self._count[state], 1)
                score += chance
                tokens.append(token)
                state = after[token]
            elif self._link[state] > ROOT:
                state = self._link[state]
            else:
                break
        return tokens, score

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
        self._next.append(successors)
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(0)
        return len(self._link) - 1
