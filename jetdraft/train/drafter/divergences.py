"""How far a drafter's distribution is from the target's (DistillSpec, 2310.08461)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FORWARD_KL, REVERSE_KL = "forward-kl", "reverse-kl"
JENSEN_SHANNON, TOTAL_VARIATION = "js", "tv"
BETA = 0.5
"""The default weight of Jensen-Shannon."""

Divergence = Callable[[Tensor, Tensor, float], Tensor]


def forward_kl(wanted: Tensor, got: Tensor, beta: float = BETA) -> Tensor:
    """KL(p || q) of log probabilities [..., n], in nats [...]; p is the target's."""
    return _kl(wanted, got)


def reverse_kl(wanted: Tensor, got: Tensor, beta: float = BETA) -> Tensor:
    """KL(q || p)."""
    return _kl(got, wanted)


def jensen_shannon(wanted: Tensor, got: Tensor, beta: float = BETA) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q."""
    weights = got.new_tensor([beta, 1.0 - beta]).log()
    mixed = torch.logaddexp(wanted + weights[0], got + weights[1])
    return beta * _kl(wanted, mixed) + (1.0 - beta) * _kl(got, mixed)


def total_variation(wanted: Tensor, got: Tensor, beta: float = BETA) -> Tensor:
    """Half the sum of |p - q|: one less the chance that a draft is accepted."""
    return 0.5 * (wanted.exp() - got.exp()).abs().sum(-1)


DIVERGENCES: dict[str, Divergence] = {
    FORWARD_KL: forward_kl,
    REVERSE_KL: reverse_kl,
    JENSEN_SHANNON: jensen_shannon,
    TOTAL_VARIATION: total_variation,
}
"""The grid of the paper: each takes log probabilities of target and drafter."""


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)
