"""Prompt lookup and suffix decoding: what followed the last times it ended like this.

The longest ending of prompt and output that was seen before says how it goes on
(PLD; SuffixDecoding, 2411.04975), and so may the responses of earlier requests. Where
both do, the likelier draft wins, by how often its tokens came next.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.history.store import Entry, ResponseStore
from jetdraft.runtime.history.suffix import ROOT, SuffixAutomaton
from jetdraft.runtime.proposers.proposer import ModelFree
from jetdraft.runtime.sampling.chooser import Chooser

MOST_INDEXED = 32768
"""Tokens of earlier responses that are searched; each takes half a kilobyte."""


class LookupProposer(ModelFree):
    """Matches endings in prompt and output, and in the responses of a `store`.

    A draft is no longer than its match, up to `max_match` tokens, since longer matches
    hold for longer. Where it reaches the end of the sequence it repeats.

        LookupProposer().propose([1, 2, 3, 1, 2], budget=2)   # drafts 3, 1
    """

    name = "lookup"

    def __init__(self, max_match: int = 16, store: ResponseStore | None = None) -> None:
        self.max_draft_tokens = max_match
        self._own = _Own()
        self._earlier = _Earlier(store) if store is not None else None

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence, and learn what was stored since."""
        self._own = _Own()
        if self._earlier is not None:
            self._earlier.begin()

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """The tokens after the best match."""
        count = min(budget, self.max_draft_tokens)
        draft, score = self._own.draft(context, count)
        if self._earlier is not None:
            other, other_score = self._earlier.draft(context, count)
            draft = other if other_score > score else draft
        return Rows.chain([context[-1], *draft])

    def after(self, drafted: Sequence[int], count: int) -> list[int]:
        """What follows the last context and some tokens more, which are forgotten."""
        draft, score = self._own.after(drafted, count)
        if self._earlier is not None:
            other, other_score = self._earlier.after(drafted, count)
            draft = other if other_score > score else draft
        return draft


class _Own:
    """What prompt and output themselves say."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()
        self._read: list[int] = []

    def draft(self, context: Sequence[int], count: int) -> tuple[list[int], float]:
        if not _goes_on(self._read, context):
            self._automaton, self._read = SuffixAutomaton(), []
        fresh = context[len(self._read) :]
        self._automaton.extend(fresh)
        self._read += fresh
        return self.after([], count)

    def after(self, drafted: Sequence[int], count: int) -> tuple[list[int], float]:
        match = self._automaton.match
        place = match, self._automaton.length(match)
        return _following(self._automaton, place, drafted, count)


class _Earlier:
    """What the responses of earlier requests say."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._automaton = SuffixAutomaton()
        self._known: set[tuple[int, float]] = set()
        self._place = ROOT, 0
        self._read: list[int] = []

    def begin(self) -> None:
        self._place, self._read = (ROOT, 0), []
        entries = self._latest()
        if len(self._known) > 2 * len(entries):
            self._automaton, self._known = SuffixAutomaton(), set()
        for entry in reversed(entries):
            # SQLite gives ids that were deleted again.
            key = entry.id, entry.used
            if key not in self._known:
                self._known.add(key)
                self._automaton.begin()
                self._automaton.extend(entry.response)

    def _latest(self) -> list[Entry]:
        """As many entries as an automaton should hold."""
        sizes = accumulate(len(entry.response) for entry in self._store.entries)
        within = sum(size <= MOST_INDEXED for size in sizes)
        return self._store.entries[:within]

    def draft(self, context: Sequence[int], count: int) -> tuple[list[int], float]:
        if not _goes_on(self._read, context):
            self._place, self._read = (ROOT, 0), []
        fresh = context[len(self._read) :]
        for token in fresh:
            self._place = self._automaton.step(*self._place, token)
        self._read += fresh
        return self.after([], count)

    def after(self, drafted: Sequence[int], count: int) -> tuple[list[int], float]:
        return _following(self._automaton, self._place, drafted, count)


def _following(
    automaton: SuffixAutomaton,
    place: tuple[int, int],
    drafted: Sequence[int],
    count: int,
) -> tuple[list[int], float]:
    """What an automaton says after a place and some tokens; no more than the match."""
    for token in drafted:
        place = automaton.step(*place, token)
    state, length = place
    return automaton.follow(state, min(count, length))


def _goes_on(read: Sequence[int], context: Sequence[int]) -> bool:
    """Whether a context only adds to what was read; its last tokens can be withdrawn.

    Those are never more than a pass holds, so what lies farther back agrees.
    """
    start = max(0, len(read) - 32)
    return list(context[start : len(read)]) == list(read[start:])
