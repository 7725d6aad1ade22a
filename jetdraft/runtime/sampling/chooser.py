"""Chooses one token per row: greedily, or by filtered sampling.

    p        the target's distribution after temperature, top-k, top-p and min-p
    chosen = argmax over the support of p of logit / temperature + G(seed, position, id)

By the Gumbel-max trick it is a draw from p, and depends on prefix and seed alone.
Logits beyond the graph's K candidates are fetched only if these are not enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from jetdraft.contracts.tensors import Float64s, Int64s
from jetdraft.options import Checked, Range
from jetdraft.runtime.drafts.noise import Distribution, exponentials, exponentials_below
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processors import LogitsProcessor, best_ids

_TEMPERATURES = Range(lambda t: 0.0 <= t <= 100.0, "0 (greedy) to 100")


@dataclass(frozen=True)
class Sampling(Checked):
    """How tokens are chosen; temperature 0 is greedy and ignores the other fields.

    `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off. Raises `OptionError` for a
    value out of range.

        Sampling(temperature=0.8, top_p=0.95, seed=7)
    """

    temperature: Annotated[float, _TEMPERATURES] = 0.0
    top_k: Annotated[int, Range(lambda k: k >= 0, "0 (off) or more")] = 0
    top_p: Annotated[float, Range(lambda p: 0 < p <= 1, "more than 0, at most 1")] = 1.0
    min_p: Annotated[float, Range(lambda p: 0 <= p < 1, "0 (off) to below 1")] = 0.0
    seed: Annotated[int, Range(lambda seed: True, "an integer")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # The noise calculates modulo 2**64, where numpy's integers overflow.
        object.__setattr__(self, "seed", int(self.seed))


# Of a drafter in greedy decoding: 1 is too unsure (docs/log/trees-and-verifiers.md).
GREEDY_DRAFT_TEMPERATURE = 0.4


class Chooser:
    """Chooses a token for each row of an `Answer` of the target or of a drafter."""

    def __init__(
        self, sampling: Sampling, processors: Sequence[LogitsProcessor] = ()
    ) -> None:
        self.sampling, self._processors = sampling, processors

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The target's answer after all processors; `context` ends with the root."""
        for processor in self._processors:
            answer = processor.process(answer, rows, context)
        return answer

    def choose(self, answer: Answer, positions: Sequence[int]) -> list[int]:
        """Choose the token after each row; `positions` are where these tokens stand."""
        chosen = answer.candidates[:, 0]
        if self.sampling.temperature:
            chosen = self._sample(answer, np.array(positions))
        tokens: list[int] = chosen.tolist()
        return tokens

    def _sample(self, answer: Answer, positions: Int64s) -> Int64s:
        """Gumbel-max per row: over the candidates, and over more tokens if needed."""
        ids, sampling = answer.candidates, self.sampling
        scaled = answer.candidate_logits.astype(np.float64) / sampling.temperature
        scores = scaled - np.log(exponentials(sampling.seed, positions[:, None], ids))
        if (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0):
            best = np.arange(len(ids)), scores.argmax(1)
            chosen = np.asarray(ids[best])
            if ids.shape[1] < answer.vocab_size:
                known = scaled[:, -1], scores[best], chosen
                self._try_other_tokens(answer, positions, *known)
            return chosen
        kept = self._count_kept_tokens(scaled, answer)
        limit = np.where(kept == _OPEN, scaled.shape[1], kept)
        scores[np.arange(scaled.shape[1]) >= limit[:, None]] = -np.inf
        chosen = np.asarray(ids[np.arange(len(ids)), scores.argmax(1)])
        still_open = np.flatnonzero(kept == _OPEN)
        if len(still_open):
            wider = self._widen(answer, still_open)
            chosen[still_open] = self._sample(wider, positions[still_open])
        return chosen

    def _count_kept_tokens(self, scaled: Float64s, answer: Answer) -> Int64s:
        """Per row, the number of tokens that the filters keep, or `_OPEN`."""
        rows, candidates = scaled.shape
        vocabulary, sampling = answer.vocab_size, self.sampling
        most = np.full(rows, min(sampling.top_k or vocabulary, vocabulary))
        least = np.minimum(most, candidates)
        if sampling.top_p < 1.0:
            least, most = self._nucleus_bounds(scaled, most, answer)
        if sampling.min_p > 0.0:
            passes = scaled >= scaled[:, :1] + np.log(sampling.min_p)
            count = np.count_nonzero(passes, axis=1)
            least = np.minimum(least, count)
            most = np.where(count < candidates, np.minimum(most, count), most)
        return np.where(least == most, least, _OPEN)

    def _nucleus_bounds(
        self, scaled: Float64s, most: Int64s, answer: Answer
    ) -> tuple[Int64s, Int64s]:
        """Bounds of the number of best tokens whose probability reaches top-p.

        The mass of the `most` tokens of earlier filters is known if all are candidates,
        else at most `_tail_bound` more than the candidates'.
        """
        candidates = scaled.shape[1]
        mass = np.cumsum(np.exp(scaled - scaled[:, :1]), axis=1)
        counted = np.minimum(most, candidates)
        total = mass[np.arange(len(counted)), counted - 1]
        tail = np.where(most > candidates, self._tail_bound(scaled, answer), 0.0)
        least = np.minimum(_count_to_mass(mass, self.sampling.top_p * total), counted)
        longest = _count_to_mass(mass, self.sampling.top_p * (total + tail))
        return least, np.where(longest > counted, most, longest)

    def _tail_bound(self, scaled: Float64s, answer: Answer) -> Float64s:
        """An upper bound of the mass of all tokens that are not candidates, [n].

        Relative to the mass of the best candidate:

            T <= 1:  rest exp((l_K - l_1)(1/T - 1)), rest = the same mass at T = 1
            T > 1:   (vocabulary - K) exp((l_K - l_1) / T)

        since no other logit is larger than the last candidate's, l_K.
        """
        temperature = self.sampling.temperature
        logits = answer.candidate_logits.astype(np.float64)
        total = np.exp(answer.logsumexp.astype(np.float64) - logits[:, 0])
        # The sum of a float32 logsumexp is right to at least four digits.
        rest = np.maximum(total * (1 + 1e-4) - np.exp(logits - logits[:, :1]).sum(1), 0)
        last = logits[:, -1] - logits[:, 0]
        if temperature <= 1.0:
            return np.asarray(rest * np.exp(last * (1 / temperature - 1)))
        others = answer.vocab_size - logits.shape[1]
        return np.asarray(others * np.exp(last / temperature))

    def distribution(self, answer: Answer) -> Distribution:
        """The distribution of one row's token, after temperature and filters."""
        if self.sampling.temperature == 0:
            return Distribution(answer.candidates[0, :1].copy(), np.ones(1))
        scaled = answer.candidate_logits.astype(np.float64) / self.sampling.temperature
        kept = int(self._count_kept_tokens(scaled, answer)[0])
        if kept == _OPEN:
            return self.distribution(self._widen(answer, np.zeros(1, np.int64)))
        return _softmax(answer, scaled, kept)

    def draft_distribution(self, answer: Answer) -> Distribution:
        """A drafter's distribution after one row, over its candidates only: a q."""
        temperature = self.sampling.temperature or GREEDY_DRAFT_TEMPERATURE
        scaled = answer.candidate_logits.astype(np.float64) / temperature
        kept = _OPEN
        if self.sampling.temperature:
            kept = int(self._count_kept_tokens(scaled, answer)[0])
        return _softmax(answer, scaled, scaled.shape[1] if kept == _OPEN else kept)

    def _widen(self, answer: Answer, rows: Int64s) -> Answer:
        """Return the answer of `rows` with more candidates; reads all their logits."""
        logits, known = answer.logits[rows], answer.candidates.shape[1]
        count = min(max(_WIDER * known, self.sampling.top_k), answer.vocab_size)
        ids = np.stack([best_ids(row, count) for row in logits])
        values = np.take_along_axis(logits, ids, axis=1)
        return Answer(ids, values, answer.logsumexp[rows], logits)

    def _try_other_tokens(
        self,
        answer: Answer,
        positions: Int64s,
        last: Float64s,
        scores: Float64s,
        chosen: Int64s,
    ) -> None:
        """Let tokens outside of the candidates win, whose logits are at most `last`."""
        seed, temperature = self.sampling.seed, self.sampling.temperature
        most = np.exp(last - scores)
        rows, ids, values = exponentials_below(seed, positions, answer.vocab_size, most)
        if not len(rows):
            return
        rivals = answer.logits_at(rows, ids).astype(np.float64) / temperature
        rivals -= np.log(values)
        for row, token, rival in zip(rows, ids, rivals.tolist(), strict=True):
            if rival > scores[row]:
                scores[row], chosen[row] = rival, token


_WIDER = 8  # How many times the candidates are fetched where the filters may keep more.
_OPEN = -1  # Instead of a count: tokens beyond the candidates may be kept.


def _softmax(answer: Answer, scaled: Float64s, kept: int) -> Distribution:
    """The softmax over the first `kept` candidates of a row; `scaled` is [1, K]."""
    weights = np.exp(scaled[0, :kept] - scaled[0, 0])
    return Distribution(answer.candidates[0, :kept].copy(), weights / weights.sum())


def _count_to_mass(mass: Float64s, wanted: Float64s) -> Int64s:
    """How many candidates the cumulative `mass` [n, K] takes to reach `wanted` [n]."""
    return np.asarray(np.count_nonzero(mass < wanted[:, None], axis=1) + 1)


@dataclass(frozen=True)
class Logprob:
    """The natural logarithm of a token's probability.

    It is the model's own, before temperature, filters, biases and penalties. `top` has
    the (id, logprob) pairs of the best tokens, best first; `names` their bytes at their
    place, maybe a part of a character, None for a hidden token.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    names: dict[int, bytes | None] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Answer, row: int, token: int, top: int) -> "Logprob":
        """Compute it for the token after a row, and for the `top` best candidates."""
        # A kernel may sum the graph's own logsumexp in another order in another row.
        whole = answer.logits[row]
        peak = whole.max()
        total = float(peak + np.log(np.exp(whole - peak).sum(dtype=np.float64)))
        best = answer.candidates[row, :top].tolist()
        values = (float(whole[id]) - total for id in best)
        logprob = float(whole[token]) - total
        return cls(token, logprob, tuple(zip(best, values, strict=True)))
