"""Gumbel noise as a pure function of (seed, position, token id).

The hash is splitmix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, 2014) over a counter; a 52-bit uniform u becomes -log(-log(u)).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(x: UInt64s) -> UInt64s:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def uniforms(
    seed: int, positions: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> Doubles:
    """Uniforms in (0, 1), one per broadcast pair of position and token id.

    `positions` and `ids` broadcast against each other, as in [n, 1] and [n, K].
    """
    # Arithmetic modulo 2**64 is the point, so numpy must not warn about it.
    with np.errstate(over="ignore"):
        key = _mix(np.full(1, seed % (1 << 64), np.uint64) + _GOLDEN)
        key = _mix(key + positions.astype(np.uint64) * _GOLDEN)
        bits = _mix(key + (ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return np.asarray(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)


def gumbel(
    seed: int, positions: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]
) -> Doubles:
    """Standard Gumbel variates, one per broadcast pair of position and token id.

    Adding them to logits and taking the largest draws from the softmax.

        gumbel(7, np.array([[12]]), np.array([[3, 4, 5]]))   # [1, 3]
    """
    return np.asarray(-np.log(-np.log(uniforms(seed, positions, ids))))
