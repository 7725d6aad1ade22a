"""Changes a model's logits, by a row's prefix alone, before a token is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Protocol, Union

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.tensors import Float32s, Int64s
from jetdraft.errors import OptionError
from jetdraft.options import Range, between, check_fields
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer

NEVER = np.float32(-1e30)  # A logit so low that no noise makes it win.
# Each of few allowed tokens is looked at; from many on the whole row is searched.
FEW_TOKENS, MANY_TOKENS = 512, 4096
_Best = tuple[Int64s, Float32s]
MIN_CANDIDATES = 8  # With fewer left, the whole row is searched for the best.


class LogitsProcessor(Protocol):
    """Changes the logits that one generation's tokens are chosen from."""

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with changed logits; `context` ends with the root of `rows`."""
        ...


Change = Union["Mask", "_Penalized"]  # A change of one row's logits.


def apply_changes(answer: Answer, changes: Sequence[Change | None]) -> Answer:
    """Apply a change, or None, to each row; all logits are computed when read."""
    later, width = _LazyLogits(answer, changes), answer.candidates.shape[1]
    best = []
    for row, change in enumerate(changes):
        known: _Best | None = answer.candidates[row], answer.candidate_logits[row]
        if change is not None:
            known = change.best(answer, row)
        if known is None or len(known[0]) < min(MIN_CANDIDATES, width):
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
        _fetch=later.fetch,
        _pick=later.at,
    )


class _LazyLogits:
    """The changed logits, float32 [m, vocab], computed when they are first read."""

    def __init__(self, answer: Answer, changes: Sequence[Change | None]) -> None:
        self.answer, self.changes, self.is_filled = answer, changes, False
        shape = len(changes), answer.vocab_size
        self.logits = np.empty(shape, np.float32)  # costs nothing until it is filled

    def fetch(self) -> None:
        """Copy the logits and change them, once."""
        if not self.is_filled:
            np.copyto(self.logits, self.answer.logits)
            for row, change in zip(self.logits, self.changes, strict=True):
                if change is not None:
                    change.apply(row)
            self.is_filled = True

    def at(self, rows: Int64s, ids: Int64s) -> Float32s:
        """Single logits float32 [n], without the work for all tokens."""
        values = self.answer.logits_at(rows, ids)
        for row in np.unique(rows):
            own, change = rows == row, self.changes[row]
            if change is not None:
                values[own] = change.at(ids[own], values[own])
        return values


@dataclass(frozen=True)
class Mask:
    """The `count` tokens of `size` that may come: uint8 `bits`, lowest bit first."""

    bits: npt.NDArray[np.uint8]
    size: int
    count: int

    @classmethod
    def of(cls, allowed: npt.NDArray[np.bool_]) -> "Mask":
        """The mask of the allowed tokens, bool [vocab]."""
        bits = np.packbits(allowed, bitorder="little")
        return cls(bits, len(allowed), int(np.count_nonzero(allowed)))

    @cached_property
    def allowed(self) -> npt.NDArray[np.bool_]:
        """Whether each token may come, bool [vocab]."""
        return np.unpackbits(self.bits, count=self.size, bitorder="little").view(bool)

    def _holds(self, ids: Int64s) -> npt.NDArray[np.bool_]:
        bits: npt.NDArray[np.uint8] = self.bits[ids >> 3] >> (ids & 7).astype(np.uint8)
        return (bits & 1).view(np.bool_)

    def apply(self, logits: Float32s) -> None:
        """Set the logits of forbidden tokens to `NEVER`."""
        np.maximum(logits, NEVER / 2, out=logits)
        logits[~self.allowed] = NEVER

    def at(self, ids: Int64s, values: Float32s) -> Float32s:
        """`NEVER` for the forbidden of the tokens."""
        return np.where(self._holds(ids), np.maximum(values, NEVER / 2), NEVER)

    def best(self, answer: Answer, row: int) -> tuple[Int64s, Float32s] | None:
        """All allowed tokens if they are few, else the allowed candidates, or None.

        No other token is better than the last. None if only the whole row shows them.
        """
        ids, values = answer.candidates[row], answer.candidate_logits[row]
        kept = self._holds(ids)
        if self.count > FEW_TOKENS and np.count_nonzero(kept) >= MIN_CANDIDATES:
            return ids[kept], values[kept]
        if self.count > MANY_TOKENS:
            return None
        inside = np.flatnonzero(self.allowed)
        logits = np.maximum(answer.logits[row, inside], NEVER / 2)
        best, forbidden = sort_best_first(inside, logits), ids[~kept]
        never = np.full(len(forbidden), NEVER)
        return np.append(best[0], forbidden), np.append(best[1], never)


def best_ids(row: Float32s, count: int) -> Int64s:
    """The ids of the largest logits, best first; of equal logits the lower id first."""
    # A partition alone would choose freely among equal logits at its end.
    least = np.partition(row, -count)[-count]
    better = np.flatnonzero(row > least)
    # A mask may make nearly all logits equal, so these are not sorted.
    equal = np.flatnonzero(row == least)[: count - len(better)]
    return np.append(better[np.argsort(-row[better], kind="stable")], equal)


def sort_best_first(ids: Int64s, values: Float32s) -> tuple[Int64s, Float32s]:
    """Tokens and their logits, best first; of equal logits the lower id first."""
    order = np.lexsort((ids, -values))
    return ids[order], values[order]


_DIVISORS = Range(lambda r: 0.0 < r <= 100.0, "more than 0 (1: off), at most 100")


@dataclass(frozen=True)
class Penalties:
    """The biases of tokens, and the penalties on tokens that the text already has.

    l <- l + bias
    l <- l / r if l > 0 else l * r     for tokens in prompt or output (CTRL, 1909.05858)
    l <- l - presence - frequency * n  for tokens that occur n times in the output

    `logit_bias` maps token ids to the number that is added to their logits. A
    `repetition_penalty` of 1 and other penalties of 0 change nothing. Raises
    `OptionError` for a value out of range.

        Penalties({13: -100.0}, repetition_penalty=1.1)
    """

    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: Annotated[float, _DIVISORS] = 1.0
    presence_penalty: Annotated[float, between(-100, 100)] = 0.0
    frequency_penalty: Annotated[float, between(-100, 100)] = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            fact = f"logit_bias {self.logit_bias!r} is not a mapping"
            raise OptionError(f"{fact}; give {{id: number}}", "logit_bias")
        for token, bias in self.biases.items():
            if isinstance(token, bool) or not isinstance(token, int):
                fact = f"logit bias of {token!r}: give ids of tokens"
                raise OptionError(fact, "logit_bias")
            if not isinstance(bias, (int, float)) or not abs(bias) < 3e38:
                fact = f"logit bias of {token} is not a number of 32 bits"
                raise OptionError(f"{fact}; give a number", "logit_bias")
        check_fields(self)

    @property
    def biases(self) -> Mapping[int, float]:
        """`logit_bias`; empty if it is None."""
        return self.logit_bias or {}

    @property
    def changes(self) -> bool:
        """Whether any logit changes at all."""
        return bool(self.biases) or replace(self, logit_bias=None) != Penalties()


class PenaltyProcessor:
    """Applies `Penalties` in one generation after `prompt`; a `LogitsProcessor`."""

    def __init__(self, penalties: Penalties, prompt: Sequence[int]) -> None:
        self.penalties, self._prompt = penalties, prompt
        self._counted = len(prompt)
        # The changed tokens, and by token id: bias, count in the output, and whether
        # it is in the text; made when the vocabulary's size is known.
        self._ids: set[int] = set()
        self._bias = self._output_counts = np.zeros(0, np.float32)
        self._is_in_text = np.zeros(0, bool)

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with penalized logits; `context` ends with the root of `rows`."""
        if not len(self._is_in_text):
            biases = self.penalties.biases
            self._bias = np.zeros(answer.vocab_size, np.float32)
            self._bias[list(biases)] = list(biases.values())
            self._output_counts = np.zeros(answer.vocab_size, np.float32)
            self._is_in_text = np.zeros(answer.vocab_size, bool)
            self._ids.update(biases)
            if self.penalties.repetition_penalty != 1.0:
                self._ids.update(self._prompt)
                self._is_in_text[list(self._prompt)] = True
        fresh = context[self._counted :]
        self._counted = len(context)
        np.add.at(self._output_counts, fresh, 1)
        self._is_in_text[fresh] = True
        self._ids.update(fresh)
        ids = np.fromiter(self._ids, np.int64, len(self._ids))
        pairs = zip(answer.logits, rows.paths, strict=True)
        return apply_changes(answer, [self._penalize(row, ids, p) for row, p in pairs])

    def _penalize(self, logits: Float32s, ids: Int64s, path: list[int]) -> "_Penalized":
        """The new logits of a row, after the tokens of a path to the row."""
        ids = np.concatenate([ids, np.setdiff1d(np.array(path, np.int64), ids)])
        values = logits[ids] + self._bias[ids]
        times, seen = self._output_counts[ids], self._is_in_text[ids]
        for token in path:
            times[ids == token] += 1
            seen[ids == token] = True
        rate = np.float32(self.penalties.repetition_penalty)
        repeated = np.where(values > 0, values / rate, values * rate)
        values = np.where(seen, repeated, values)
        frequency = np.float32(self.penalties.frequency_penalty) * times
        presence = np.float32(self.penalties.presence_penalty)
        values -= np.where(times > 0, presence + frequency, np.float32(0))
        return _Penalized(ids, values)


@dataclass(frozen=True)
class _Penalized:
    """New logits of some tokens of a row; a `Change`."""

    ids: Int64s
    values: Float32s

    def apply(self, logits: Float32s) -> None:
        """Change all logits of the row, float32 [vocab], in place."""
        logits[self.ids] = self.values

    def at(self, ids: Int64s, values: Float32s) -> Float32s:
        """The logits `values` of `ids`, with the new values of changed tokens."""
        if not len(self.ids):
            return values
        order = np.argsort(self.ids)
        places = np.searchsorted(self.ids, ids, sorter=order)
        places = order[np.minimum(places, len(order) - 1)]
        return np.where(self.ids[places] == ids, self.values[places], values)

    def best(self, answer: Answer, row: int) -> tuple[Int64s, Float32s]:
        """The candidates and changed tokens that no other token can be better than."""
        ids, values = answer.candidates[row], answer.candidate_logits[row]
        floor = values[-1] if len(ids) < answer.vocab_size else -np.inf
        kept = ~np.isin(ids, self.ids)
        ids = np.concatenate([ids[kept], self.ids])
        values = np.concatenate([values[kept], self.values])
        return sort_best_first(ids[values > floor], values[values > floor])
