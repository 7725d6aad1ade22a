"""What a model that hears may write next, as Whisper was trained to write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import Speech
from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processors import changed

Mask = npt.NDArray[np.bool_]


class SpeechRules:
    """Bans tokens by what was written before; a `LogitsProcessor`.

    Some tokens are never written, some not as the first. With `timestamps` a text
    begins with one, they stand in pairs, and they never go back; and where all of them
    together are likelier than the likeliest word, one of them is written (2212.04356,
    appendix; the rules of OpenAI's decoder and of transformers). Without them there are
    none. `start` is the length of the prompt, `end` an id from which on
    no token is a word.
    """

    def __init__(self, speech: Speech, start: int, end: int, timestamps: bool) -> None:
        self._speech, self._start, self._end = speech, start, end
        self._timestamps = timestamps
        self._never = np.zeros(0, bool)

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer without banned tokens; `context` ends with the root of `rows`."""
        if not len(self._never):
            self._never = np.zeros(answer.vocab_size, bool)
            self._never[list(self._speech.suppressed)] = True
            speech = self._speech
            timed, untimed = speech.first_timestamp, speech.no_timestamps
            self._never[untimed if self._timestamps else slice(timed, None)] = True
        written = list(context[self._start :])
        masks = [self._banned([*written, *path]) for path in rows.paths]
        if self._timestamps:
            self._prefer_timestamps(answer.logits, masks)
        return changed(answer, [_Banned(mask) for mask in masks])

    def _banned(self, written: Sequence[int]) -> Mask:
        """The tokens that must not follow what was written."""
        banned, first = self._never.copy(), self._speech.first_timestamp
        if not written:
            banned[list(self._speech.suppressed_first)] = True
        if not self._timestamps:
            return banned
        if not written:
            banned[:first] = True
            if self._speech.latest_first:
                banned[first + self._speech.latest_first + 1 :] = True
            return banned
        ended = written[-1] >= first
        # The first timestamp stands alone, as if another one stood before it.
        paired = len(written) < 2 or written[-2] >= first
        if ended and paired:
            banned[first:] = True
        elif ended:
            banned[: self._end] = True
        times = [token for token in written if token >= first]
        if times:
            # A segment may begin where the last one ended, but not end where it begins.
            repeated = ended and not paired
            banned[first : times[-1] + (0 if repeated else 1)] = True
        return banned

    def _prefer_timestamps(self, logits: Float32s, masks: list[Mask]) -> None:
        """Ban all else where a timestamp is likelier than each other token."""
        first = self._speech.first_timestamp
        for row, mask in zip(logits, masks, strict=True):
            times = row[first:][~mask[first:]].astype(np.float64)
            others = row[:first][~mask[:first]]
            if not len(times) or not len(others):
                continue
            largest = times.max()
            if largest + np.log(np.exp(times - largest).sum()) > others.max():
                mask[:first] = True


class OneOf:
    """Bans all tokens but some; a `LogitsProcessor`."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with these tokens alone."""
        mask = np.ones(answer.vocab_size, bool)
        mask[self._ids] = False
        return changed(answer, [_Banned(mask)] * len(rows.tokens))


@dataclass(frozen=True)
class _Banned:
    """The tokens of a row that are banned; a `Change`."""

    mask: Mask

    def apply(self, logits: Float32s) -> None:
        """Give banned tokens no chance."""
        logits[self.mask] = -np.inf

    def at(self, ids: Int64s, values: Float32s) -> Float32s:
        """The new logits of single tokens."""
        return np.where(self.mask[ids], np.float32(-np.inf), values)

    def best(self, answer: Answer, row: int) -> tuple[Int64s, Float32s] | None:
        """The candidates that are left: all other tokens are below the last."""
        ids, values = answer.candidates[row], answer.candidate_logits[row]
        left = ~self.mask[ids]
        return ids[left], values[left]
