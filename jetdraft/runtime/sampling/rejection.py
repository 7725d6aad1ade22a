"""Rejection rules for sampled drafts, written as distributions of the chosen token.

    p   the target's distribution of a row's token
    q   the drafter's distribution, from which the row's children x_1 .. x_k were drawn
    pi  the distribution to draw the chosen token y from, given the children

Every rule keeps the target's distribution, which the tests compute:

    sum_x P(x_1 .. x_k) pi(y | x_1 .. x_k) = p(y)

Accepting is then the plain walk: y is one of the children, or it is not. All rules take
p and q as float64 [m] over the same tokens, and the children as indices into them in
the order they were drawn. They return pi, float64 [m].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jetdraft.errors import DraftingError
from jetdraft.runtime.drafts.arrays import Float64s


def single(p: Float64s, q: Float64s, children: Sequence[int]) -> Float64s:
    """Speculative sampling with one child (Leviathan et al., 2211.17192)."""
    #   accept x ~ q with min(1, p(x) / q(x))
    #   else y ~ norm(max(p - q, 0))
    if len(children) > 1:
        raise DraftingError(
            "verifier 'rejection' takes one child per row; use 'recursive'"
        )
    return recursive(p, q, children, replaced=True)


def recursive(
    p: Float64s, q: Float64s, children: Sequence[int], replaced: bool
) -> Float64s:
    """Recursive rejection sampling (SpecInfer 2305.09781; MCSD 2401.06706)."""
    #   accept x with min(1, r(x) / d(x)), where r = p and d = q at first
    #   on rejection r = norm(max(r - d, 0)), and without replacement d loses x
    #   with no child left, y ~ r
    #   reach: the chance that x is tried at all
    pi, reach = np.zeros_like(p), 1.0
    residual, draft = p, q
    for x in children:
        accept = min(1.0, residual[x] / draft[x])
        pi[x] += reach * accept
        reach *= 1.0 - accept
        rest = np.maximum(residual - draft, 0.0)
        if reach <= 0.0 or rest.sum() <= 0.0:
            break
        residual = rest / rest.sum()
        if not replaced:
            draft = draft.copy()
            draft[x] = 0.0
            if draft.sum() <= 0.0:
                break
            draft = draft / draft.sum()
    return np.asarray(pi + reach * residual)


def sequential(p: Float64s, q: Float64s, children: Sequence[int]) -> Float64s:
    """K-SEQ of SpecTr (2310.15141): k independent children that share one rho."""
    #   accept x with min(1, p(x) / (rho q(x))), in turn
    #   rho solves 1 - (1 - beta)^k = rho beta, with beta = sum min(p / rho, q)
    #   else y ~ norm(p - min(p / rho, q) (1 - (1 - beta)^k) / beta)
    count = len(children)
    rho = _rho(p, q, count)
    shared = np.minimum(p / rho, q)
    beta = shared.sum()
    if beta <= 0.0:
        return p
    rest = np.maximum(p - shared * (1.0 - (1.0 - beta) ** count) / beta, 0.0)
    pi, reach = np.zeros_like(p), 1.0
    for x in children:
        accept = min(1.0, p[x] / (rho * q[x]))
        pi[x] += reach * accept
        reach *= 1.0 - accept
    return np.asarray(pi + reach * rest / rest.sum() if rest.sum() > 0 else pi)


def _rho(p: Float64s, q: Float64s, count: int) -> float:
    """The rho of K-SEQ, between 1 and `count`, by bisection."""

    def excess(rho: float) -> float:
        beta = float(np.minimum(p / rho, q).sum())
        return 1.0 - (1.0 - beta) ** count - rho * beta

    low, high = 1.0, float(count)
    if excess(low) <= 0.0:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0.0 else (low, middle)
    return high


def greedy_plus_one(p: Float64s, q: Float64s, children: Sequence[int]) -> Float64s:
    """The best tokens of q, and one drawn from the rest (Hu et al., 2502.18779)."""
    #   q' = q without the fixed tokens, renormalised; t ~ q'
    #   accept t with min(1, p(t) / q'(t))
    #   else y ~ norm(max(p - q', 0)), which can be a fixed token
    *fixed, drawn = children
    draft = q.copy()
    draft[fixed] = 0.0
    if draft.sum() <= 0.0:
        return p
    return recursive(p, draft / draft.sum(), [drawn], replaced=True)
