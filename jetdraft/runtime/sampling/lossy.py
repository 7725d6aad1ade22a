"""Acceptance rules that do not keep the target's distribution: lossy verifiers.

They have the form of `rejection`: the distribution pi of the chosen token, given the
children.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jetdraft.runtime.drafts.arrays import Float64s

EPSILON, DELTA = 0.09, 0.3
"""epsilon and delta of typical acceptance."""

TOP, TOLERANCE = 3, 1.0
"""beta and tau of tolerant acceptance."""


def typical(p: Float64s, children: Sequence[int]) -> Float64s:
    """Typical acceptance (Medusa, 2401.10774): accepts children that p finds plausible.

    It decides row by row; Medusa takes the longest of all accepted paths.
    """
    #   accept x if p(x) > min(epsilon, delta exp(-H(p)))
    #   among several such x, y is the most probable; without such an x, y ~ p
    logs = np.log(np.where(p > 0.0, p, 1.0))
    threshold = min(EPSILON, DELTA * float(np.exp((p * logs).sum())))
    return _most_probable([x for x in children if p[x] > threshold], p)


def tolerant(p: Float64s, children: Sequence[int]) -> Float64s:
    """Top-beta with a tolerance (SpecDec, 2203.16487)."""
    #   accept x if x is among the beta best of p and log p(best) - log p(x) <= tau
    #   among several such x, y is the most probable; without such an x, y ~ p
    best = np.sort(p)[::-1]
    least = max(best[min(TOP, len(p)) - 1], best[0] * np.exp(-TOLERANCE))
    return _most_probable([x for x in children if p[x] >= least], p)


def _most_probable(accepted: list[int], p: Float64s) -> Float64s:
    """The distribution of the most probable accepted child alone; p without any."""
    if not accepted:
        return p
    pi = np.zeros_like(p)
    pi[max(accepted, key=lambda x: p[x])] = 1.0
    return pi
