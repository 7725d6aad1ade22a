"""Gumbel noise as a pure function of (seed, position, token id).

So the noise of a token does not depend on how passes were grouped. The hash is the
finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, 2014):

    key  = mix(mix(seed + g) + position g)
    bits = mix(key + (id + 1) g)                 modulo 2^64
    u    = (floor(bits / 2^12) + 1/2) / 2^52   uniform in (0, 1)
    G    = -log(-log(u))                       standard Gumbel
"""

from __future__ import annotations

import numpy as np

from jetdraft.runtime.drafts.arrays import Float64s, Int64s, UInt64s

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(x: UInt64s) -> UInt64s:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, positions: Int64s, ids: Int64s) -> Float64s:
    """Uniforms in (0, 1), float64, one per pair of position and token id.

    `positions` and `ids` broadcast against each other, for example [n, 1] and [n, K].
    """
    # The sums are meant to wrap around at 2**64, so numpy must not warn.
    with np.errstate(over="ignore"):
        key = _mix(np.full(1, seed % (1 << 64), np.uint64) + _GOLDEN)
        key = _mix(key + positions.astype(np.uint64) * _GOLDEN)
        bits = _mix(key + (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return np.asarray(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)


def gumbel(seed: int, positions: Int64s, ids: Int64s) -> Float64s:
    """Standard Gumbel variates, float64, one per pair of position and token id.

    The largest sum of logit and variate is a draw from the softmax of the logits.
    `positions` and `ids` broadcast against each other.

        gumbel(7, np.array([[12]]), np.array([[3, 4, 5]]))   # [1, 3]
    """
    return np.asarray(-np.log(-np.log(uniforms(seed, positions, ids))))
