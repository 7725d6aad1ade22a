"""Logits as they are wanted: biases, and penalties for what the text has already.

What a row's logits become depends on its prefix alone, and a drafted row's prefix is
known: the text and the path down to it. So each row is shaped as plain decoding would
shape it, and the same seed gives the same text with every draft.

    l <- l + bias
    l <- l / r if l > 0 else l * r     of tokens in prompt or output (CTRL, 1909.05858)
    l <- l - presence - frequency * n  of tokens that are n times in the output
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Protocol

import numpy as np

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.binding import Floats
from jetdraft.runtime.passes.graph import Answer


@dataclass(frozen=True)
class Shaping:
    """What is added to logits, and taken from those of tokens that came before.

    `repetition_penalty` 1 and the others at 0 change nothing.

        Shaping({13: -100.0}, repetition_penalty=1.1)
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise OptionError(f"logit bias of {token!r}: give ids of tokens")
            if not isinstance(bias, (int, float)) or not isfinite(bias):
                raise OptionError(f"logit bias {bias!r} is not a number; give one")
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise OptionError(
                f"repetition penalty {self.repetition_penalty} is out of range; give "
                "more than 0 (1: off), at most 100"
            )
        for name in ("presence", "frequency"):
            value = getattr(self, f"{name}_penalty")
            if not -100.0 <= value <= 100.0:
                raise OptionError(
                    f"{name} penalty {value} is out of range; give -100 to 100"
                )

    @property
    def changes(self) -> bool:
        """Whether it does anything."""
        return self != Shaping()


class Shaper(Protocol):
    """Changes what one generation's tokens are chosen from, by their prefix alone."""

    def shape(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer for rows below the end of `context`, the last being the root."""
        ...


class Penalties:
    """Biases and penalties in one generation.

    Penalties(shaping, prompt).shape(answer, rows, context)
    """

    def __init__(self, shaping: Shaping, prompt: Sequence[int]) -> None:
        self.shaping = shaping
        self._prompt = frozenset(prompt)
        self._counts: Counter[int] = Counter()
        self._counted = len(prompt)

    def shape(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer for rows below the end of `context`, the last being the root."""
        self._counts.update(context[self._counted :])
        self._counted = len(context)
        shaped = [
            self._row(logits, path)
            for logits, path in zip(answer.logits, rows.paths, strict=True)
        ]
        return answer_of(answer, shaped)

    def _row(self, logits: Floats, path: Sequence[int]) -> Floats:
        """One row's logits, after the tokens of a path below the context."""
        shaped, shaping = logits.copy(), self.shaping
        for token, bias in shaping.logit_bias.items():
            shaped[token] += bias
        counts = self._counts + Counter(path) if path else self._counts
        if shaping.repetition_penalty != 1.0:
            seen = np.fromiter(self._prompt | counts.keys(), np.int64)
            found, penalty = shaped[seen], np.float32(shaping.repetition_penalty)
            shaped[seen] = np.where(found > 0, found / penalty, found * penalty)
        if counts and (shaping.presence_penalty or shaping.frequency_penalty):
            ids = np.fromiter(counts.keys(), np.int64)
            times = np.fromiter(counts.values(), np.float32)
            each = np.float32(shaping.frequency_penalty) * times
            shaped[ids] -= np.float32(shaping.presence_penalty) + each
        return shaped


def answer_of(answer: Answer, logits: Sequence[Floats]) -> Answer:
    """The same answer with other logits, float32 [vocab] a row.

    Row by row, so that no number depends on how many rows there are.
    """
    count = answer.candidates.shape[1]
    best = [_best(row, count) for row in logits]
    values = [row[ids] for row, ids in zip(logits, best, strict=True)]
    sums = [
        first[0] + np.log(np.exp(row - first[0]).sum())
        for row, first in zip(logits, values, strict=True)
    ]
    return replace(
        answer,
        candidates=np.stack(best),
        candidate_logits=np.stack(values),
        logsumexp=np.array(sums, np.float32),
        _logits=np.stack(logits),
        _parts={},
        _source=None,
    )


def _best(row: Floats, count: int) -> np.ndarray:
    """The ids of the largest logits, best first, the lower id before its equal."""
    ids = np.sort(np.argpartition(-row, count - 1)[:count])
    return np.asarray(ids[np.argsort(-row[ids], kind="stable")])
