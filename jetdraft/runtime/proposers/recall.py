"""Drafting from the responses to similar requests; agents send such requests often.

Two requests are similar if their mean embeddings point the same way (as in AdaPLD and
in semantic caches; here the responses only become drafts). Where the earlier request
had other words, its response is read with the words of the new request in their place.
The proposer follows the response as the output grows; where the output leaves it, the
proposer looks for the next place that fits the last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from jetdraft.bundle import Bundle
from jetdraft.contract import WIDEST
from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.history.similarity import Similarity
from jetdraft.runtime.history.store import ResponseStore
from jetdraft.runtime.proposers.lookup import StoreOptions
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Tokens, Traits
from jetdraft.runtime.sampling.chooser import Chooser

ALIKE = 0.8
"""Requests with at least this cosine count as similar."""

MOST_ALIKE = 4
"""Entries whose responses are followed."""

LONGEST_SLOT = 32
"""Tokens that one replacement may have."""

LONGEST_ENDING = 3
"""Tokens that must fit where a place is looked for."""

AHEAD = 64
"""Tokens of a response that are searched for a lost place."""


class RecallProposer(Proposer):
    """Follows the responses to the most similar requests of a `store`.

    RecallProposer(store, similarity).propose(context, budget=8)
    """

    traits = Traits("recall", max_draft_tokens=WIDEST - 1)

    def __init__(self, store: ResponseStore, similarity: Similarity) -> None:
        self.store = store
        self.similarity = similarity
        self._prompt_tokens = 0
        self._read: list[int] = []
        self._scripts: list[Script] = []

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Look for similar requests."""
        self._prompt_tokens, self._read = len(prompt), []
        entries = self.store.entries
        here = self.similarity.vector(prompt)
        alike = [e for e in entries if e.vector.shape == here.shape]
        scored = [(float(e.vector @ here), e) for e in alike]
        # The latest of equals comes first, as in the store.
        scored.sort(key=lambda pair: -pair[0])
        self._scripts = [
            Script(adapted(entry.prompt, entry.response, prompt))
            for cosine, entry in scored[:MOST_ALIKE]
            if cosine >= ALIKE
        ]

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """What comes next in the response that agreed for longest."""
        output = list(context[self._prompt_tokens :])
        if output[: len(self._read)] != self._read:
            self._read = []
            self._scripts = [Script(script.tokens) for script in self._scripts]
        for end in range(len(self._read) + 1, len(output) + 1):
            for script in self._scripts:
                script.follow(output[max(0, end - LONGEST_ENDING) : end])
        self._read = output
        best = max(self._scripts, key=lambda script: script.agreed, default=None)
        draft = [] if best is None else best.following(budget)
        return Rows.chain([context[-1], *draft])


class Script:
    """A response, a place in it, and how many tokens in a row have agreed."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.place = 0
        self.agreed = 0
        self.lost = False

    def following(self, count: int) -> list[int]:
        """The tokens from the place on; none while it is lost."""
        return [] if self.lost else self.tokens[self.place : self.place + count]

    def follow(self, output: Sequence[int]) -> None:
        """Take in the last token of an output."""
        if self.tokens[self.place : self.place + 1] == list(output[-1:]):
            self.place += 1
            self.agreed += 1
            self.lost = False
            return
        self.agreed, self.lost = 0, True
        for size in range(LONGEST_ENDING, 0, -1):
            place = self._next(list(output[-size:])) if len(output) >= size else None
            if place is not None:
                self.place, self.agreed, self.lost = place, size, False
                return

    def _next(self, ending: list[int]) -> int | None:
        """The end of the next occurrence of some tokens, not far from the place."""
        # Before the place, since the tokens before a slot belong to the ending too.
        first = max(0, self.place - len(ending) + 1)
        for start in range(first, min(self.place + AHEAD, len(self.tokens))):
            if self.tokens[start : start + len(ending)] == ending:
                return start + len(ending)
        return None


def adapted(prompt: list[int], response: list[int], now: Sequence[int]) -> list[int]:
    """A response with the words of another request in the place of its own.

    adapted([1, 2, 9], [5, 2, 5], [1, 3, 9])    # [5, 3, 5]
    """
    matcher = SequenceMatcher(None, prompt, list(now), autojunk=False)
    for kind, start, end, first, last in matcher.get_opcodes():
        if kind == "replace" and max(end - start, last - first) <= LONGEST_SLOT:
            response = _replaced(response, prompt[start:end], list(now[first:last]))
    return response


def _replaced(tokens: list[int], old: list[int], new: list[int]) -> list[int]:
    replaced, at = list[int](), 0
    while at < len(tokens):
        if tokens[at : at + len(old)] == old:
            replaced += new
            at += len(old)
        else:
            replaced.append(tokens[at])
            at += 1
    return replaced


def _lacks(bundle: Bundle) -> str:
    return "" if bundle.similarity else "export the bundle again with this version"


def _make(parts: Parts, options: StoreOptions) -> Proposer:
    store = options.store(parts)
    if store is None or parts.similarity is None:
        raise OptionError(
            "it needs a store of earlier responses; give --store FILE (store=), and if "
            "you do, export the bundle again with this version",
            "method",
        )
    return RecallProposer(store, parts.similarity)


METHOD = Method(
    "recall",
    "the responses to similar requests, with --store FILE",
    _make,
    StoreOptions,
    lacks=_lacks,
)
