"""Gumbel noise as a pure function of (seed, position, token id).

So the noise of a token does not depend on how passes were grouped. Noise is drawn from
the top down, in blocks of B = 256 ids (after A* sampling, Maddison et al., 2014): the
largest noise of a block can be known without visiting its tokens. With E = exp(-G),
which is a standard exponential variate:

    key, lower  = mix(mix(seed + g) + (2 position, 2 position + 1) g)
    bits        = mix(key + (block + 1) g)                          modulo 2^64
    winner      = bits mod B                 the token of the block with the least E
    E(winner)   = -log(u(bits)) / B          the least of B standard exponentials
    E(others)   = E(winner) - log(u(mix(lower + (id + 1) g)))       memoryless
    u(bits)     = (floor(bits / 2^12) + 1/2) / 2^52                 uniform in (0, 1)

`mix` is the finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, 2014).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from jetdraft.runtime.drafts.arrays import Float64s, Int64s, UInt64s

BLOCK = 256
"""Ids whose largest noise is drawn first."""

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ALL = (1 << 64) - 1


def _mix(x: UInt64s) -> UInt64s:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def _mix_one(x: int) -> int:
    x = (x ^ (x >> 30)) * _FIRST & _ALL
    x = (x ^ (x >> 27)) * _SECOND & _ALL
    return x ^ (x >> 31)


def _uniforms(bits: UInt64s) -> Float64s:
    return np.asarray(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)


# Drafter and target choose a token for the same positions, in the same round.
@lru_cache(maxsize=1024)
def _key(seed: int, position: int, which: int) -> int:
    key = _mix_one((seed + _GOLDEN) & _ALL)
    return _mix_one((key + (2 * position + which) * _GOLDEN) & _ALL)


def _keys(seed: int, positions: Int64s, which: int) -> UInt64s:
    """The keys of positions: of their blocks (0) or of the tokens below (1)."""
    keys = [_key(seed, position, which) for position in positions.ravel().tolist()]
    return np.array(keys, np.uint64).reshape(positions.shape)


def _spread(ids: Int64s) -> UInt64s:
    return (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)


def quiet(
    seed: int, positions: Int64s, vocab_size: int, most: Float64s
) -> tuple[Int64s, Int64s, Float64s]:
    """The pairs of row and token id whose exponential is below `most`, with it.

    They are int64, int64 and float64 [k]. `positions` int64 [n] and `most` float64 [n]
    have an entry per row. Only blocks with a least exponential below `most` are
    visited. A pair at `most` itself may come too.

        rows, ids, values = quiet(7, np.array([12]), 151936, np.array([1e-4]))
    """
    blocks = np.arange(-(-vocab_size // BLOCK))
    bits = _block_bits(seed, positions[:, None], blocks[None])
    least = -np.log(_uniforms(bits)) / BLOCK
    rows, blocks = np.nonzero(least < most[:, None])
    ids = blocks[:, None] * BLOCK + np.arange(BLOCK)
    others = _uniforms(_mix(_keys(seed, positions, 1)[rows, None] + _spread(ids)))
    least = least[rows, blocks]
    room = np.exp(least - most[rows])
    is_below = others > room[:, None] * (1 - 1e-9)
    winners = (bits[rows, blocks] % np.uint64(BLOCK)).astype(np.int64)
    is_below[np.arange(len(rows)), winners] = True
    block, place = np.nonzero(is_below & (ids < vocab_size))
    rest = np.where(place == winners[block], 0.0, -np.log(others[block, place]))
    return rows[block], ids[block, place], least[block] + rest


def _block_bits(seed: int, positions: Int64s, blocks: Int64s) -> UInt64s:
    return _mix(_keys(seed, positions, 0) + _spread(blocks))


def exponentials(seed: int, positions: Int64s, ids: Int64s) -> Float64s:
    """Standard exponential variates, float64, one per pair of position and token id.

    `positions` and `ids` broadcast against each other, for example [n, 1] and [n, K].
    """
    bits = _block_bits(seed, positions, ids // BLOCK)
    rest = -np.log(_uniforms(_mix(_keys(seed, positions, 1) + _spread(ids))))
    is_winner = bits % np.uint64(BLOCK) == (ids % BLOCK).astype(np.uint64)
    return -np.log(_uniforms(bits)) / BLOCK + np.where(is_winner, 0.0, rest)


def gumbel(seed: int, positions: Int64s, ids: Int64s) -> Float64s:
    """Standard Gumbel variates, float64, one per pair of position and token id.

    The largest sum of logit and variate is a draw from the softmax of the logits.
    `positions` and `ids` broadcast against each other.

        gumbel(7, np.array([[12]]), np.array([[3, 4, 5]]))   # [1, 3]
    """
    return np.asarray(-np.log(exponentials(seed, positions, ids)))
