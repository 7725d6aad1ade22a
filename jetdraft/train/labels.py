"""What a small model learns from a target: labels, divergences, expected acceptance."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.machine import precision
from jetdraft.train.teacher import TensorCache, cache_key, logits_at

SMALLEST = 1e-6  # The least rest, so that its logarithm is finite.


@dataclass(frozen=True)
class Labels:
    """The target's distributions for the n learned tokens of a batch.

    `wanted` float32 [n, k] are log probabilities, `mass` [n] the probability of all
    tokens that can be drafted, and `known` bool [n] whether the likeliest of all is
    among them. Without `tokens`, k is the draft vocabulary; else `tokens` int64 [n,
    k - 1] are the likeliest rows of the LM head, and the last column has the rest.
    """

    wanted: Tensor
    mass: Tensor
    known: Tensor
    tokens: Tensor | None = None

    def binned(self, scores: Tensor) -> Tensor:
        """Map the drafter's log probabilities of all tokens to columns of `wanted`."""
        if self.tokens is None:
            return scores
        return add_rest(scores.gather(-1, self.tokens))

    @property
    def best(self) -> Tensor:
        """The most likely token at each place, int64 [n], by its row in the LM head."""
        return self.wanted.argmax(-1) if self.tokens is None else self.tokens[:, 0]

    def accepted(self, scores: Tensor) -> Tensor:
        """The chance [n] that a sampled draft is accepted, 1 - total variation."""
        wanted = self.mass[:, None] * self.wanted.exp()
        return torch.minimum(wanted, self.binned(scores).exp()).sum(-1)

    def agreed(self, scores: Tensor) -> Tensor:
        """Return bool [n], whether the best token in `scores` is the target's best."""
        return (scores.argmax(-1) == self.best) & self.known


def add_rest(scores: Tensor) -> Tensor:
    """Append a column for all other tokens to log probabilities [n, k]: [n, k + 1]."""
    rest = (1.0 - scores.exp().sum(-1, keepdim=True)).clamp(min=SMALLEST).log()
    return torch.cat([scores, rest], dim=-1)


def learned_mask(batch: Batch) -> Tensor:
    """Return which tokens are learned, bool [b, T - 1]; column t is for token t + 1."""
    return batch.labels[:, 1:] != IGNORED


def log_probabilities(model: Any, batch: Batch, ids: Tensor | None) -> Tensor:
    """Return log probabilities for n learned tokens, float32 [n, vocabulary or ids]."""
    rows, places = learned_mask(batch).nonzero(as_tuple=True)
    with precision(batch.ids.device):
        logits = logits_at(model, batch.ids, rows, places)
    if ids is not None:
        logits = logits[:, ids]
    scores: Tensor = logits.float().log_softmax(-1)
    return scores


@torch.no_grad()
def exact_labels(model: Any, batch: Batch, ids: Tensor | None) -> Labels:
    """Run the target to label a batch; `ids` are the draft vocabulary, None for all."""
    scores = log_probabilities(model, batch, None)
    if ids is None:
        ones = torch.ones(len(scores), device=scores.device)
        return Labels(scores, ones, ones.bool())
    known = torch.isin(scores.argmax(-1), ids)
    scores = scores[:, ids]
    mass = scores.logsumexp(-1)
    return Labels(scores - mass[:, None], mass.exp(), known)


LABEL_FIELDS = ("wanted", "mass", "known", "tokens")  # Each a tensor of its own.


class LabelCache:
    """Float16 labels of texts in a folder of `owner`: the `kept` likeliest tokens."""

    def __init__(self, folder: Path, owner: str, kept: int, process: int = 0) -> None:
        self.kept = kept
        self._tensors = TensorCache(folder, f"labels of {kept}, {owner}", process)

    def read(self, batch: Batch) -> Labels | None:
        """Return the labels of a batch, on its device; None if one text is missing."""
        names = [[f"{key}.{n}" for n in LABEL_FIELDS] for key in _cache_keys(batch)]
        rows = [list(map(self._tensors.read, of_text)) for of_text in names]
        if any(part is None for row in rows for part in row):
            return None
        halves, *others = zip(*rows, strict=True)
        # Autocast, which surrounds a training, cannot join halves.
        parts: list[Any] = [[part.float() for part in halves], *others]
        joined = (torch.cat(part).to(batch.ids.device) for part in parts)
        wanted, mass, known, tokens = joined
        return Labels(wanted, mass, known, tokens.long())

    def write(self, batch: Batch, labels: Labels) -> Labels:
        """Add the exact labels of a batch; returns them cut to the `kept` tokens."""
        best = labels.wanted.topk(min(self.kept, labels.wanted.shape[-1] - 1), dim=-1)
        half = add_rest(best.values).half()
        kept = Labels(half.float(), labels.mass, labels.known, best.indices)
        sizes = learned_mask(batch).sum(-1).tolist()
        parts = (half, kept.mass, kept.known, best.indices.int())
        of_texts = zip(*(torch.split(part, sizes) for part in parts), strict=True)
        for key, text in zip(_cache_keys(batch), of_texts, strict=True):
            for name, part in zip(LABEL_FIELDS, text, strict=True):
                self._tensors.write(f"{key}.{name}", part.clone())
        return kept

    def flush(self) -> None:
        self._tensors.flush()


def _cache_keys(batch: Batch) -> list[str]:
    rows = torch.stack([batch.ids, batch.labels], dim=1)
    return [cache_key(row[:, : int((row[1] >= 0).nonzero()[-1]) + 1]) for row in rows]


FORWARD_KL, REVERSE_KL = "forward-kl", "reverse-kl"
JENSEN_SHANNON, TOTAL_VARIATION = "js", "tv"
BETA = 0.5  # The default weight of Jensen-Shannon.


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)


def _jensen_shannon(wanted: Tensor, got: Tensor, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q."""
    weights = got.new_tensor([beta, 1.0 - beta]).log()
    mixed = torch.logaddexp(wanted + weights[0], got + weights[1])
    return beta * _kl(wanted, mixed) + (1.0 - beta) * _kl(got, mixed)


# The grid of DistillSpec (2310.08461): each takes log probabilities p of the target and
# q of the drafter. The total variation is 1 minus the chance that a draft is accepted.
DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    FORWARD_KL: lambda p, q, beta: _kl(p, q),
    REVERSE_KL: lambda p, q, beta: _kl(q, p),
    JENSEN_SHANNON: _jensen_shannon,
    TOTAL_VARIATION: lambda p, q, beta: 0.5 * (p.exp() - q.exp()).abs().sum(-1),
}

PREDICTED_TOKENS = 4  # Tokens of a draft whose acceptance is predicted.


def rates_by_place(chances: Sequence[Tensor]) -> list[float]:
    """Return the acceptance rate of each token of a draft after all before it.

    rates_by_place([torch.tensor([1.0, 0.5, 1.0])])  # [0.83, 0.67, 1.0, 0.0]
    """
    accepted, reached = torch.zeros(PREDICTED_TOKENS), torch.zeros(PREDICTED_TOKENS)
    for text in chances:
        before = torch.ones(len(text))
        for place in range(min(PREDICTED_TOKENS, len(text))):
            count = len(text) - place
            reached[place] += before[:count].sum()
            before = before[:count] * text[place:]
            accepted[place] += before.sum()
    return [round(x, 4) for x in (accepted / reached.clamp(min=1e-9)).tolist()]


def tokens_per_pass(rates: Sequence[float]) -> float:
    """Return the tokens of a round: the accepted ones, and the target's after them."""
    return sum(accumulate(rates, operator.mul, initial=1.0))
