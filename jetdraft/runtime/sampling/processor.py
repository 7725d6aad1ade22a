"""What changes a model's logits before a token is chosen from them.

A processor must depend on a row's prefix alone. A drafted row's prefix is known: the
committed text and the path down to the row. So each row is changed as plain decoding
would change it, and the same seed gives the same text with every draft.

A vocabulary may have 150,000 tokens, so the changes are made on the candidates first:
a token that is neither a candidate nor changed is no better than the last candidate.
The changed logits of all tokens are computed when they are first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer

ENOUGH = 8
"""Candidates that must be left of a row, or the whole row is searched for the best."""


class LogitsProcessor(Protocol):
    """Changes the logits that one generation's tokens are chosen from."""

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with changed logits.

        `context` holds all committed tokens; its last token is the root of `rows`.
        """
        ...


class Change(Protocol):
    """A change of one row's logits."""

    def apply(self, logits: Float32s) -> None:
        """Change all logits of the row, float32 [vocab], in place."""

    def at(self, ids: Int64s, values: Float32s) -> Float32s:
        """The new logits of single tokens, whose old ones are `values`."""

    def best(self, answer: Answer, row: int) -> tuple[Int64s, Float32s] | None:
        """The best tokens after the change, best first, and their logits.

        No other token may be better than the last of these. `answer` is the answer
        before. None if the tokens cannot be known without visiting the whole row.
        """


def changed(answer: Answer, changes: Sequence[Change]) -> Answer:
    """The answer after one change for each of its rows."""
    later, width = _Later(answer, changes), answer.candidates.shape[1]
    best = []
    for row, change in enumerate(changes):
        known = change.best(answer, row)
        if known is None or len(known[0]) < min(ENOUGH, width):
            later.fetch()
            ids = best_ids(later.logits[row], width)
            known = ids, later.logits[row, ids]
        best.append(known)
    width = min(len(ids) for ids, _ in best)
    return replace(
        answer,
        candidates=np.stack([ids[:width] for ids, _ in best]),
        candidate_logits=np.stack([values[:width] for _, values in best]),
        _logsumexp=None,
        _logits=later.logits,
        _parts={},
        _source=later,
        _pick=later.at,
    )


@dataclass
class _Later:
    """The changed logits, float32 [m, vocab], computed when they are first read."""

    answer: Answer
    changes: Sequence[Change]
    logits: Float32s = field(init=False)
    is_filled: bool = False

    def __post_init__(self) -> None:
        shape = len(self.changes), self.answer.vocab_size
        self.logits = np.empty(shape, np.float32)  # costs nothing until it is filled

    def fetch(self) -> None:
        """Copy the logits and change them, once."""
        if not self.is_filled:
            np.copyto(self.logits, self.answer.logits)
            for row, change in zip(self.logits, self.changes, strict=True):
                change.apply(row)
            self.is_filled = True

    def at(self, rows: Int64s, ids: Int64s) -> Float32s:
        """Single logits, without the work for all tokens."""
        values = self.answer.logits_at(rows, ids)
        for row in np.unique(rows):
            own = rows == row
            values[own] = self.changes[row].at(ids[own], values[own])
        return values


def best_ids(row: Float32s, count: int) -> Int64s:
    """The ids of the largest logits, best first; of equal logits the lower id first."""
    # A partition alone would choose freely among equal logits at its end.
    least = np.partition(row, -count)[-count]
    better = np.flatnonzero(row > least)
    # A mask may make nearly all logits equal, so these are not sorted.
    equal = np.flatnonzero(row == least)[: count - len(better)]
    return np.append(better[np.argsort(-row[better], kind="stable")], equal)


def ordered(ids: Int64s, values: Float32s) -> tuple[Int64s, Float32s]:
    """Tokens and their logits, best first; of equal logits the lower id first."""
    order = np.lexsort((ids, -values))
    return ids[order], values[order]
