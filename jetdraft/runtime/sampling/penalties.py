"""Logit biases, and penalties on tokens that the text already has.

l <- l + bias
l <- l / r if l > 0 else l * r     for tokens in prompt or output (CTRL, 1909.05858)
l <- l - presence - frequency * n  for tokens that occur n times in the output
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from jetdraft.errors import OptionError
from jetdraft.ranges import Range, between, check_ranges
from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processor import with_logits

_RANGES = {
    "repetition_penalty": Range(
        lambda penalty: 0.0 < penalty <= 100.0, "more than 0 (1: off), at most 100"
    ),
    "presence_penalty": between(-100.0, 100.0),
    "frequency_penalty": between(-100.0, 100.0),
}


@dataclass(frozen=True)
class Penalties:
    """The biases of tokens, and the penalties on repeated tokens.

    `logit_bias` maps token ids to the number that is added to their logits. A
    `repetition_penalty` of 1 and other penalties of 0 change nothing. Raises
    `OptionError` for a value out of range.

        Penalties({13: -100.0}, repetition_penalty=1.1)
    """

    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            raise OptionError(
                f"logit_bias {self.logit_bias!r} is not a mapping; give {{id: number}}",
                "logit_bias",
            )
        for token, bias in self.biases.items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise OptionError(
                    f"logit bias of {token!r}: give ids of tokens", "logit_bias"
                )
            if not isinstance(bias, (int, float)) or not isfinite(bias):
                raise OptionError(
                    f"logit bias {bias!r} is not a number; give a number", "logit_bias"
                )
        check_ranges(self, _RANGES)

    @property
    def biases(self) -> Mapping[int, float]:
        """`logit_bias`; empty if it is None."""
        return self.logit_bias or {}

    @property
    def changes(self) -> bool:
        """Whether any logit changes at all."""
        return bool(self.biases) or replace(self, logit_bias=None) != Penalties()


class PenaltyProcessor:
    """Applies `Penalties` in one generation after `prompt`; a `LogitsProcessor`.

    PenaltyProcessor(penalties, prompt).process(answer, rows, context)
    """

    def __init__(self, penalties: Penalties, prompt: Sequence[int]) -> None:
        self.penalties = penalties
        self._prompt = frozenset(prompt)
        self._counts: Counter[int] = Counter()
        self._counted = len(prompt)

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with penalized logits; `context` ends with the root of `rows`."""
        self._counts.update(context[self._counted :])
        self._counted = len(context)
        logits = [
            self._penalized(row, path)
            for row, path in zip(answer.logits, rows.paths, strict=True)
        ]
        return with_logits(answer, logits)

    def _penalized(self, logits: Float32s, path: Sequence[int]) -> Float32s:
        """One row's logits with penalties, after the tokens of a path to the row."""
        logits, penalties = logits.copy(), self.penalties
        for token, bias in penalties.biases.items():
            logits[token] += bias
        counts = self._counts + Counter(path) if path else self._counts
        if penalties.repetition_penalty != 1.0:
            ids = np.fromiter(self._prompt | counts.keys(), np.int64)
            repeated, rate = logits[ids], np.float32(penalties.repetition_penalty)
            logits[ids] = np.where(repeated > 0, repeated / rate, repeated * rate)
        if counts and (penalties.presence_penalty or penalties.frequency_penalty):
            ids = np.fromiter(counts.keys(), np.int64)
            times = np.fromiter(counts.values(), np.float32)
            frequency = np.float32(penalties.frequency_penalty) * times
            logits[ids] -= np.float32(penalties.presence_penalty) + frequency
        return logits
