"""Prompt lookup and suffix decoding (SuffixDecoding, 2411.04975).

The proposer drafts what followed the longest ending of the text that occurred before,
in it or in the responses to earlier requests; the likelier draft wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from jetdraft.contracts.constants import WIDEST
from jetdraft.runtime.drafts.rows import Rows, Tokens
from jetdraft.runtime.history.store import Entry, ResponseStore
from jetdraft.runtime.history.suffix import ROOT, SuffixAutomaton
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Traits
from jetdraft.runtime.sampling.chooser import Chooser

MAX_INDEXED = 32768
"""The most tokens of earlier responses that are indexed, half a kilobyte each."""

MAX_EVIDENCE = 5
"""Matches of 16 tokens and more are alike."""


class LookupProposer(Proposer):
    """Matches endings in prompt and output, and in the responses of a `store`.

    Its evidence is the length of the match, in doublings: after one token a draft was
    right in 0.15 of the places, after two or three in 0.4 to 0.8, after eight and more
    in 0.95 (docs/log/controller.md). So a draft is no longer than its match, or
    `max_match`. At the end of the sequence it continues with its own beginning. A
    `source` is looked up too, since summaries and corrections copy it.
    """

    def __init__(
        self,
        max_match: int = 16,
        store: ResponseStore | None = None,
        source: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self.traits = Traits("lookup", max_draft_tokens=max_match)
        earlier = [] if store is None else [_ResponseLookup(store)]
        self._lookups: list[_SequenceLookup] = [_SequenceLookup(), *earlier]
        self._source, self._before = source, list[int]()

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence, and index the responses stored since."""
        self._before = list(self._source())
        for source in self._lookups:
            source.begin()

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """A chain of the tokens after the best match."""
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

    def guess_after(self, drafted: Sequence[int], count: int) -> Guess:
        """The best guess of `count` tokens after the context and `drafted` tokens."""
        guesses = [source.guess_after(drafted, count) for source in self._lookups]
        return max(guesses, key=lambda guess: guess.score)


class Guess(NamedTuple):
    """The tokens after a match, their score, and how many tokens matched."""

    tokens: list[int]
    score: float
    match: int

    def evidence(self, place: int) -> int:
        """The length of the match before the token at `place`, in doublings.

        The guessed tokens before it belong to the match.
        """
        return min((self.match + place).bit_length(), MAX_EVIDENCE)


class _SequenceLookup:
    """Looks up endings in prompt and output; see `LookupProposer` for the methods."""

    def __init__(self) -> None:
        self._restart()

    def begin(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._automaton = SuffixAutomaton()
        self._place, self._read = (ROOT, 0), list[int]()

    def read(self, context: Sequence[int]) -> None:
        """Learn the tokens of a context that were not read before.

        Never more tokens than a pass holds are withdrawn, so only these are compared.
        """
        start = max(0, len(self._read) - 2 * WIDEST)
        if list(context[start : len(self._read)]) != self._read[start:]:
            self._restart()
        fresh = context[len(self._read) :]
        self._learn(fresh)
        self._read += fresh

    def _learn(self, fresh: Sequence[int]) -> None:
        self._automaton.extend(fresh)
        match = self._automaton.match
        self._place = match, self._automaton.length(match)

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
        self._automaton = SuffixAutomaton()
        self._store = store
        self._indexed: set[tuple[int, float]] = set()

    def _restart(self) -> None:
        self._place, self._read = (ROOT, 0), []

    def begin(self) -> None:
        self._restart()
        entries = self._latest_entries()
        if len(self._indexed) > 2 * len(entries):
            self._automaton, self._indexed = SuffixAutomaton(), set()
        for entry in reversed(entries):
            # The id alone is not enough: SQLite gives the ids of deleted entries again.
            key = entry.id, entry.used
            if key not in self._indexed:
                self._indexed.add(key)
                self._automaton.begin()
                self._automaton.extend(entry.response)

    def _latest_entries(self) -> list[Entry]:
        """The latest entries, as many as the automaton should hold."""
        sizes = accumulate(len(entry.response) for entry in self._store.entries)
        within = sum(size <= MAX_INDEXED for size in sizes)
        return self._store.entries[:within]

    def _learn(self, fresh: Sequence[int]) -> None:
        for token in fresh:
            self._place = self._automaton.step(*self._place, token)
