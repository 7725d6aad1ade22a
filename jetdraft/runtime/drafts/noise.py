"""Gumbel noise as a pure function of (seed, position, token id), and draws with it.

Drawn from the top down in blocks of B = 256 ids (A* sampling, Maddison et al., 2014),
with E = exp(-G) and `mix`, the finalizer of splitmix64 (Steele et al., 2014):

    key, lower  = mix(mix(seed + g) + (2 position, 2 position + 1) g)
    bits        = mix(key + (block + 1) g)                          modulo 2^64
    winner      = bits mod B                 the token of the block with the least E
    E(winner)   = -log(u(bits)) / B          the least of B standard exponentials
    E(others)   = E(winner) - log(u(mix(lower + (id + 1) g)))       memoryless
    u(bits)     = (floor(bits / 2^12) + 1/2) / 2^52                 uniform in (0, 1)
"""

from dataclasses import dataclass
from functools import lru_cache
from operator import lt
from typing import NamedTuple

import numpy as np

from jetdraft.contracts.tensors import Float64s, Int64s, UInt64s

BLOCK = 256  # Ids whose largest noise is drawn first.
STRIP = 32  # Positions drawn together, since a text visits them all.
_GOLDEN = 0x9E3779B97F4A7C15  # g above; the two below are the factors in `mix`
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB
_MASK_64 = (1 << 64) - 1

# numpy takes arrays faster than numbers. `_PLACE` masks an id's place in its block.
_NUMBERS = (_GOLDEN, _FACTOR_1, _FACTOR_2, 30, 27, 31, 12, BLOCK - 1)
_G, _M1, _M2, _30, _27, _31, _12, _PLACE = (np.array(x, np.uint64) for x in _NUMBERS)


def _mix(x: UInt64s) -> None:
    x ^= x >> _30
    x *= _M1
    x ^= x >> _27
    x *= _M2
    x ^= x >> _31


def _mix_one(x: int) -> int:
    """`mix` of one integer, modulo 2^64."""
    x = (x ^ (x >> 30)) * _FACTOR_1 & _MASK_64
    x = (x ^ (x >> 27)) * _FACTOR_2 & _MASK_64
    return x ^ (x >> 31)


def _log_uniforms(bits: UInt64s) -> Float64s:
    """log(u(bits)), float64 of the same shape."""
    uniforms = (bits >> _12).astype(np.float64)
    uniforms += 0.5
    uniforms *= 2.0**-52
    return np.log(uniforms, out=uniforms)


# Drafter and target choose a token for the same positions, in the same round.
@lru_cache(maxsize=512)
def _key_pair(seed: int, position: int) -> list[int]:
    """`key` and `lower` of a position, with the g that all bits add."""
    start = _mix_one((seed + _GOLDEN) & _MASK_64)
    places = 2 * position, 2 * position + 1
    keys = [_mix_one((start + place * _GOLDEN) & _MASK_64) for place in places]
    return [(key + _GOLDEN) & _MASK_64 for key in keys]


def _keys(seed: int, positions: Int64s) -> UInt64s:
    """`_key_pair` of each position, uint64 [2, *positions.shape]."""
    pairs = [_key_pair(seed, position) for position in positions.ravel().tolist()]
    return np.array(pairs, np.uint64).T.reshape(2, *positions.shape)


class _Strip(NamedTuple):
    """The winner of each block, at `STRIP` positions.

    winners  int64 [STRIP, blocks], its place in the block
    least    float64 [STRIP, blocks], its exponential
    floors   the least of `least` at each position
    """

    winners: Int64s
    least: Float64s
    floors: list[float]


@lru_cache(maxsize=8)
def _draw_strip(seed: int, number: int, blocks: int) -> _Strip:
    """The winners of all blocks at the positions of the strip with this number."""
    positions = np.arange(number * STRIP, (number + 1) * STRIP)[:, None]
    bits = np.arange(blocks, dtype=np.uint64) * _G + _keys(seed, positions)[0]
    _mix(bits)
    least = _log_uniforms(bits) / -BLOCK
    return _Strip((bits & _PLACE).astype(np.int64), least, least.min(1).tolist())


def exponentials_below(
    seed: int, positions: Int64s, vocab_size: int, most: Float64s
) -> tuple[Int64s, Int64s, Float64s]:
    """Find the pairs of row and token id whose exponential is below the row's `most`.

    Returns rows int64, ids int64 and exponentials float64, [k] each. `positions` int64
    [n] and `most` float64 [n] are by row. A pair at `most` itself may come too.
    """
    blocks = -(-vocab_size // BLOCK)
    parts = (divmod(position, STRIP) for position in positions.tolist())
    places = [(_draw_strip(seed, number, blocks), place) for number, place in parts]
    floors = [strip.floors[place] for strip, place in places]
    if not any(map(lt, floors, most.tolist())):
        return _NO_IDS, _NO_IDS, np.zeros(0)
    least = np.array([strip.least[place] for strip, place in places])
    winners = np.array([strip.winners[place] for strip, place in places])
    rows, visited = np.nonzero(least < most[:, None])
    least, winners = least[rows, visited], winners[rows, visited]
    firsts = (visited * BLOCK).astype(np.uint64) * _G + _keys(seed, positions)[1, rows]
    bits = firsts[:, None] + _ID_STEPS
    _mix(bits)
    # E < most is u > room; a few more pairs do no harm.
    room = np.exp(least - most[rows]) * (1 - 1e-9)
    is_below = bits > (room * 2.0**64).astype(np.uint64)[:, None]
    is_below[np.arange(len(rows)), winners] = True
    is_below[visited == vocab_size // BLOCK, vocab_size % BLOCK :] = False
    pairs = np.flatnonzero(is_below)
    block, place = pairs // BLOCK, pairs % BLOCK
    rest = _log_uniforms(bits.ravel()[pairs])
    rest[place == winners[block]] = 0.0
    return rows[block], visited[block] * BLOCK + place, least[block] - rest


_ID_STEPS = np.arange(BLOCK, dtype=np.uint64) * _G
_NO_IDS = np.zeros(0, np.int64)


def exponentials(seed: int, positions: Int64s, ids: Int64s) -> Float64s:
    """Standard exponential variates, float64, of the broadcast shape of both arrays."""
    # The bits of a pair's block and of its token go through the same calls.
    bits = np.empty((2, *np.broadcast(positions, ids).shape), np.uint64)
    bits[0], bits[1] = ids // BLOCK, ids
    bits *= _G
    bits += _keys(seed, positions)
    _mix(bits)
    is_winner = (bits[0] ^ ids.view(np.uint64)) & _PLACE == 0
    least, rest = _log_uniforms(bits)
    rest[is_winner] = 0.0
    least /= -BLOCK
    return np.asarray(least - rest)


def gumbel(seed: int, positions: Int64s, ids: Int64s) -> Float64s:
    """Standard Gumbel variates, float64, shaped as `exponentials`."""
    return np.asarray(-np.log(exponentials(seed, positions, ids)))


@dataclass(frozen=True)
class Distribution:
    """The `probabilities` float64 [m] of the tokens `ids` int64 [m]; others have 0."""

    ids: Int64s
    probabilities: Float64s

    def draw(self, seed: int, position: int) -> int:
        """Draw a token by the Gumbel-max trick; seed and position decide it."""
        return int(self.ids[np.argmax(self.scores(seed, position))])

    def scores(self, seed: int, position: int) -> Float64s:
        """Log probability plus noise, float64 [m]; the k best are k distinct draws."""
        with np.errstate(divide="ignore"):  # log 0 never wins
            logs = np.log(self.probabilities)
        return np.asarray(logs + gumbel(seed, np.array([position]), self.ids))

    def over(self, ids: Int64s) -> Float64s:
        """The probabilities of ascending `ids`, which include all of `self.ids`."""
        probabilities = np.zeros(len(ids))
        probabilities[np.searchsorted(ids, self.ids)] = self.probabilities
        return probabilities
