"""What changes a model's logits before a token is chosen from them.

A processor must depend on a row's prefix alone. A drafted row's prefix is known: the
committed text and the path down to the row. So each row is changed as plain decoding
would change it, and the same seed gives the same text with every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer


class LogitsProcessor(Protocol):
    """Changes the logits that one generation's tokens are chosen from."""

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with changed logits.

        `context` holds all committed tokens; its last token is the root of `rows`.
        """
        ...


def with_logits(answer: Answer, logits: Sequence[Float32s]) -> Answer:
    """The answer with these logits, float32 [vocab] per row, and their candidates.

    All numbers are computed row by row, so that they cannot depend on the other rows.
    """
    count = answer.candidates.shape[1]
    best_ids = [_best_ids(row, count) for row in logits]
    values = [row[ids] for row, ids in zip(logits, best_ids, strict=True)]
    logsumexps = [
        largest[0] + np.log(np.exp(row - largest[0]).sum())
        for row, largest in zip(logits, values, strict=True)
    ]
    return replace(
        answer,
        candidates=np.stack(best_ids),
        candidate_logits=np.stack(values),
        logsumexp=np.array(logsumexps, np.float32),
        _logits=np.stack(logits),
        _parts={},
        _source=None,
    )


def _best_ids(row: Float32s, count: int) -> np.ndarray:
    """The ids of the largest logits, best first; of equal logits the lower id first."""
    ids = np.sort(np.argpartition(-row, count - 1)[:count])
    return np.asarray(ids[np.argsort(-row[ids], kind="stable")])
