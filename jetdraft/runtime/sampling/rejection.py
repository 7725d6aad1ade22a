"""Verifiers of sampled drafts, as distributions of the chosen token.

Each rule gives pi(y | drafted children) for a row whose children were drawn from q:
draw y from pi, and whatever the draft was, y is distributed as p. The sum over drafts

    sum_x P(x_1 .. x_k) pi(y | x_1 .. x_k) = p(y)

is what the tests compute. Accepting is then the plain walk: y is a child or it is not.

All rules take p and q as float64 [m] over the same tokens and the children as indices
into them, in the order they were drawn; they return pi, float64 [m].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jetdraft.errors import VerifierError
from jetdraft.runtime.drafts.noise import Doubles


def single(p: Doubles, q: Doubles, children: Sequence[int]) -> Doubles:
    """Speculative sampling of one draft (Leviathan et al., 2211.17192)."""
    #   accept x ~ q with min(1, p(x) / q(x))
    #   else y ~ norm(max(p - q, 0))
    if len(children) > 1:
        raise VerifierError(
            "verifier 'rejection' takes one child per row; use 'recursive'"
        )
    return recursive(p, q, children, replaced=True)


def recursive(
    p: Doubles, q: Doubles, children: Sequence[int], replaced: bool
) -> Doubles:
    """Recursive rejection sampling (SpecInfer 2305.09781; MCSD 2401.06706)."""
    #   accept x with min(1, r(x) / d(x)), where r = p and d = q at first
    #   on rejection r = norm(max(r - d, 0)), and without replacement d loses x
    #   with no child left, y ~ r
    chosen, reach = np.zeros_like(p), 1.0
    residual, draft = p, q
    for x in children:
        accepted = min(1.0, residual[x] / draft[x])
        chosen[x] += reach * accepted
        reach *= 1.0 - accepted
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
    return np.asarray(chosen + reach * residual)


def sequential(p: Doubles, q: Doubles, children: Sequence[int]) -> Doubles:
    """K-SEQ of SpecTr (2310.15141): k independent drafts, one threshold for all."""
    #   accept x with min(1, p(x) / (rho q(x))), in turn
    #   rho solves 1 - (1 - beta)^k = rho beta, with beta = sum min(p / rho, q)
    #   else y ~ norm(p - min(p / rho, q) (1 - (1 - beta)^k) / beta)
    count = len(children)
    rho = _threshold(p, q, count)
    shared = np.minimum(p / rho, q)
    beta = shared.sum()
    if beta <= 0.0:
        return p
    rest = np.maximum(p - shared * (1.0 - (1.0 - beta) ** count) / beta, 0.0)
    chosen, reach = np.zeros_like(p), 1.0
    for x in children:
        accepted = min(1.0, p[x] / (rho * q[x]))
        chosen[x] += reach * accepted
        reach *= 1.0 - accepted
    return np.asarray(chosen + reach * rest / rest.sum() if rest.sum() > 0 else chosen)


def _threshold(p: Doubles, q: Doubles, count: int) -> float:
    """K-SEQ's rho in [1, count], by bisection."""

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


def greedy_plus_one(p: Doubles, q: Doubles, children: Sequence[int]) -> Doubles:
    """The best q tokens and one drawn from the others (Hu et al., 2502.18779)."""
    #   t ~ q' = q without the fixed tokens, renormalised; accept with min(1, p / q')
    #   else y ~ norm(max(p - q', 0)), which may well be one of the fixed tokens
    *fixed, drawn = children
    draft = q.copy()
    draft[fixed] = 0.0
    if draft.sum() <= 0.0:
        return p
    return recursive(p, draft / draft.sum(), [drawn], replaced=True)
