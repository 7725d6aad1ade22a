"""Choosing one token per row: greedy, or filtered sampling by the Gumbel-max trick.

    p        the target's distribution after temperature and filters
    chosen = argmax over p's support of logit / temperature + G(seed, position, id)
    so chosen ~ p, and it depends on the prefix and the seed alone (Gumbel-max)

Filters apply in this order: temperature, top-k, top-p, min-p. Each keeps a prefix of
the candidates, best first, so a filter is a length. Where that length is certain within
the graph's K candidates the other logits are never looked at.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jetdraft.ranges import Range, check_ranges
from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.noise import Doubles, Int64s, gumbel, uniforms
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processor import LogitsProcessor

_RANGES = {
    "temperature": Range(lambda t: 0.0 <= t <= 100.0, "0 (greedy) to 100"),
    "top_k": Range(lambda k: k >= 0, "0 (off) or more", integer=True),
    "top_p": Range(lambda p: 0.0 < p <= 1.0, "more than 0, at most 1"),
    "min_p": Range(lambda p: 0.0 <= p < 1.0, "0 (off) to below 1"),
    "seed": Range(lambda seed: True, "an integer", integer=True),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy and ignores the rest.

    `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. A `seed` of None becomes a
    random seed, or 0 where decoding is greedy. Raises `OptionError` for a value out of
    range.

        Sampling(temperature=0.8, top_p=0.95, seed=7)
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.seed is None:
            drawn = secrets.randbits(32) if self.temperature else 0
            object.__setattr__(self, "seed", drawn)
        check_ranges(self, _RANGES)

    @property
    def noise_seed(self) -> int:
        """The seed, never None."""
        assert self.seed is not None
        return self.seed


GREEDY_DRAFT_TEMPERATURE = 0.4
"""Of a drafter's probabilities beside greedy decoding: they say which rows are worth
drafting, and at 1 a small drafter doubts too much (docs/log.md)."""


class Chooser:
    """Chooses a token for each row of an `Answer`; the same object serves a drafter.

    The target's answers go through `processors` first.

    Chooser(Sampling()).choose(answer, [40, 41])   # two tokens
    """

    def __init__(
        self, sampling: Sampling, processors: Sequence[LogitsProcessor] = ()
    ) -> None:
        self.sampling = sampling
        self._processors = processors

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """What the tokens after `rows`, below the end of `context`, are chosen from."""
        for processor in self._processors:
            answer = processor.process(answer, rows, context)
        return answer

    def choose(self, answer: Answer, positions: Sequence[int]) -> list[int]:
        """The chosen token of each row.

        `positions` are the absolute positions of the *chosen* tokens, one past those of
        their rows.
        """
        chosen = (
            self._sample(answer, np.asarray(positions))
            if self.sampling.temperature
            else answer.candidates[:, 0]
        )
        tokens: list[int] = chosen.tolist()
        return tokens

    def _sample(self, answer: Answer, positions: Int64s) -> Int64s:
        """Gumbel-max over each row's candidates, and beyond where they leave off."""
        scaled = answer.candidate_logits.astype(np.float64) / self.sampling.temperature
        kept = self._kept(scaled, answer)
        noise = gumbel(self.sampling.noise_seed, positions[:, None], answer.candidates)
        limit = np.where(kept == _OPEN, scaled.shape[1], kept)
        inside = np.arange(scaled.shape[1]) < limit[:, None]
        scores = np.where(inside, scaled + noise, -np.inf)
        best = np.argmax(scores, axis=1)
        chosen = answer.candidates[np.arange(len(best)), best]
        still_open = np.flatnonzero(kept == _OPEN)
        if not len(still_open):
            return np.asarray(chosen)
        if self._unfiltered:
            self._challenge(answer, positions, scaled[:, -1], scores.max(1), chosen)
        else:
            for row in still_open:
                part = self._whole(answer.rows(slice(row, row + 1)))
                chosen[row] = self._sample(part, positions[row : row + 1])[0]
        return np.asarray(chosen)

    @property
    def _unfiltered(self) -> bool:
        sampling = self.sampling
        return sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0

    def _kept(self, scaled: Doubles, answer: Answer) -> Int64s:
        """Per row the number of candidates that the filters keep, or `_OPEN`.

        `scaled` is float64 [n, K]: logits over temperature, best first. Each filter
        narrows `least` and `most`, between which the number of kept tokens lies.
        """
        rows, candidates = scaled.shape
        vocabulary, sampling = answer.vocab_size, self.sampling
        total = min(sampling.top_k or vocabulary, vocabulary)
        most = np.full(rows, total)
        least = np.minimum(most, candidates)
        if sampling.top_p < 1.0:
            least, most = self._nucleus(scaled, most, answer)
        if sampling.min_p > 0.0:
            passing = scaled >= scaled[:, :1] + np.log(sampling.min_p)
            count = np.count_nonzero(passing, axis=1)
            least = np.minimum(least, count)
            # If every candidate passes, tokens beyond them may pass too.
            most = np.where(count < candidates, np.minimum(most, count), most)
        return np.where(least == most, least, _OPEN)

    def _nucleus(
        self, scaled: Doubles, most: Int64s, answer: Answer
    ) -> tuple[Int64s, Int64s]:
        """Bounds of the smallest prefix whose probability reaches top-p.

        If the candidates hold all `most` tokens, their mass is known. Otherwise it lies
        between the candidates' own and that plus the most the other logits can add:
        they hold exp(logsumexp) in total at temperature 1 and none exceeds the last.
        """
        candidates = scaled.shape[1]
        mass = np.cumsum(np.exp(scaled - scaled[:, :1]), axis=1)
        held = np.minimum(most, candidates)
        inside = mass[np.arange(len(held)), held - 1]
        tail = np.where(most > candidates, self._tail(scaled, answer), 0.0)
        least = np.minimum(_prefix(mass, self.sampling.top_p * inside), held)
        longest = _prefix(mass, self.sampling.top_p * (inside + tail))
        return least, np.where(longest > held, most, longest)

    def _tail(self, scaled: Doubles, answer: Answer) -> Doubles:
        """An upper bound of the other logits' weight, relative to the best."""
        temperature = self.sampling.temperature
        logits = answer.candidate_logits.astype(np.float64)
        total = np.exp(answer.logsumexp.astype(np.float64) - logits[:, 0])
        # a float32 logsumexp leaves the sum good to four digits at least.
        rest = np.maximum(total * (1 + 1e-4) - np.exp(logits - logits[:, :1]).sum(1), 0)
        last = logits[:, -1] - logits[:, 0]
        if temperature <= 1.0:
            return np.asarray(rest * np.exp(last * (1 / temperature - 1)))
        others = answer.vocab_size - logits.shape[1]
        return np.asarray(others * np.exp(last / temperature))

    def distribution(self, answer: Answer) -> Distribution:
        """What one row's token is drawn from, after temperature and filters."""
        if self.sampling.temperature == 0:
            return Distribution(answer.candidates[0, :1].copy(), np.ones(1))
        scaled = answer.candidate_logits.astype(np.float64) / self.sampling.temperature
        kept = int(self._kept(scaled, answer)[0])
        if kept == _OPEN:
            return self.distribution(self._whole(answer))
        return _softmax(answer, scaled, kept)

    def draft_distribution(self, answer: Answer) -> Distribution:
        """A drafter's distribution after one row, over its candidates alone.

        Drafts may leave the rest out, as long as they are verified as drawn from this.
        """
        temperature = self.sampling.temperature or GREEDY_DRAFT_TEMPERATURE
        scaled = answer.candidate_logits.astype(np.float64) / temperature
        kept = _OPEN
        if self.sampling.temperature:
            kept = int(self._kept(scaled, answer)[0])
        return _softmax(answer, scaled, scaled.shape[1] if kept == _OPEN else kept)

    def _whole(self, answer: Answer) -> Answer:
        """One row with all logits as candidates, or as many as top-k may keep."""
        logits = answer.logits[0]
        order = np.argsort(-logits, kind="stable")
        if self.sampling.top_k:
            order = order[: self.sampling.top_k]
        best = logits[order][None]
        return Answer(order[None], best, answer.logsumexp, best)

    def _challenge(
        self,
        answer: Answer,
        positions: Int64s,
        last: Doubles,
        scores: Doubles,
        chosen: Int64s,
    ) -> None:
        """Without filters any token can win, but few have noise high enough.

        A token outside the candidates has at most the `last` candidate's scaled logit,
        so only those whose uniform clears what that implies can beat the best
        candidate's score. `scores` and `chosen` are updated in place.
        """
        seed, temperature = self.sampling.noise_seed, self.sampling.temperature
        threshold = np.exp(-np.exp(last - scores))[:, None]
        every = np.arange(answer.vocab_size)[None]
        rows, ids = np.nonzero(uniforms(seed, positions[:, None], every) >= threshold)
        rivals = answer.logits[rows, ids].astype(np.float64) / temperature
        rivals += gumbel(seed, positions[rows], ids)
        for row, token, score in zip(rows, ids, rivals, strict=True):
            if score > scores[row]:
                scores[row], chosen[row] = score, token


_OPEN = -1
"""A filter whose end lies beyond the candidates."""


def _softmax(answer: Answer, scaled: Doubles, kept: int) -> Distribution:
    """Of one row's first `kept` candidates, whose `scaled` logits are [1, K]."""
    weights = np.exp(scaled[0, :kept] - scaled[0, 0])
    ids = answer.candidates[0, :kept].copy()
    return Distribution(ids, weights / weights.sum())


def _prefix(mass: Doubles, wanted: Doubles) -> Int64s:
    """The shortest prefix whose cumulative `mass` [n, K] reaches `wanted` [n]."""
    return np.asarray(np.count_nonzero(mass < wanted[:, None], axis=1) + 1)
