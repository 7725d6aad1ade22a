"""Rounds float matrices to llama.cpp's types, by a search for the scale of each block.

For several scales, weighted least squares give the best scale and minimum; the smallest
error wins. Weights are second moments of inputs, or llama.cpp's guess without moments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetdraft.quant.blocks import Bytes, Floats

COLUMNS_AT_ONCE = 256  # Rounded together: they stay in the cache.
GPTQ_COLUMNS = 4096  # The same, where later inputs correct errors.
DAMPING = 0.01  # The share of the mean second moment that is added, as in GPTQ.
# What is added to the largest integer, to try other scales.
AFFINE_TRIES = torch.arange(-1.0, 1.05, 0.125)
SYMMETRIC_TRIES = torch.arange(-0.9, 0.95, 0.15)

_TINY = 1e-30


class Steps(NamedTuple):
    """The numbers of equal blocks: integers from `low` to `high` times scale + minimum.

    `scale` and `minimum` are [columns, blocks]; `pack` makes bytes uint8 [columns,
    blocks of the type, bytes] of integers less `low`, uint8 [columns, rows].
    """

    scale: Tensor
    minimum: Tensor
    low: int
    high: int
    pack: Callable[[Bytes], Bytes]

    def round(self, x: Tensor) -> Bytes:
        """Round x [columns, rows] to the nearest numbers, and pack their integers."""
        blocks = x.view(*self.scale.shape, -1)
        nearest = self._nearest(blocks, self.scale[..., None], self.minimum[..., None])
        return self.pack((nearest - self.low).to(torch.uint8).view(x.shape).numpy())

    def round_and_correct(self, x: Tensor, inverse: Tensor) -> Bytes:
        """Round the first rows of x one by one; later rows correct each error.

        `inverse` [rows, n] are rows of `_inverse_factor`; x [columns, n] is changed.
        """
        integers = torch.zeros(len(x), len(inverse), dtype=torch.uint8)
        size = len(inverse) // self.scale.shape[1]
        for block, first in enumerate(range(0, len(inverse), size)):
            end, scale = first + size, self.scale[:, block]
            minimum, part = self.minimum[:, block], x[:, first:end]
            errors = torch.zeros_like(part)
            for place, at in enumerate(range(first, end)):
                row, number = inverse[at, at:end], part[:, place]
                nearest = self._nearest(number, scale, minimum)
                errors[:, place] = (number - nearest * scale - minimum) / row[0]
                part[:, place:] -= errors[:, place, None] * row
                integers[:, at] = (nearest - self.low).to(torch.uint8)
            x[:, end:] -= errors @ inverse[first:end, end:]
        return self.pack(integers.numpy())

    def _nearest(self, x: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        steps = torch.where(scale == 0, torch.inf, scale)
        return ((x - minimum) / steps).round_().clamp_(self.low, self.high)


# Finds the steps of whole blocks [columns, rows], by the rows' moments or None.
Fit = Callable[[Tensor, Tensor | None], Steps]


def round_to_grid(matrix: Floats, grid: str, moments: Floats | None = None) -> Bytes:
    """The bytes uint8 [columns, bytes] of a matrix [rows, columns]; see `round_by`."""
    packed = round_by(_FITS[grid], matrix, 256 if grid.endswith("K") else 32, moments)
    return packed.reshape(matrix.shape[1], -1)


def round_by(fit: Fit, matrix: Floats, size: int, moments: Floats | None) -> Bytes:
    """Round a matrix [rows, columns] in blocks of `size` rows, which zeros fill.

    Returns uint8 [columns, blocks, bytes]. `moments` are of the inputs: float [rows],
    or the sums of x x^T [rows, rows], by which GPTQ (2210.17323) corrects errors.
    """
    spare, given = (0, -len(matrix) % size), None
    columns = torch.from_numpy(np.pad(matrix, (spare, (0, 0)))).T.float()
    if moments is not None:
        diagonal = moments if moments.ndim == 1 else moments.diagonal()
        given = torch.from_numpy(np.pad(diagonal, spare))
    if moments is None or given is None or moments.ndim == 1:
        parts = (part.contiguous() for part in torch.split(columns, COLUMNS_AT_ONCE))
        return np.concatenate([fit(part, given).round(part) for part in parts])
    packed, inverse = [], _inverse_factor(np.pad(moments, spare), len(matrix))
    for part in torch.split(columns, GPTQ_COLUMNS):
        rest, blocks = part.contiguous(), []
        for start in range(0, rest.shape[1], size):
            own = slice(start, start + size)
            steps, behind = fit(rest[:, own].contiguous(), given[own]), rest[:, start:]
            blocks.append(steps.round_and_correct(behind, inverse[own, start:]))
        packed.append(np.concatenate(blocks, axis=1))
    return np.concatenate(packed)


def _inverse_factor(moments: Floats, rows: int) -> Tensor:
    """The upper Cholesky factor of the inverse of moments, which are damped.

    `moments` [n, n] are zeros behind the first `rows` rows and columns.
    """
    whole = torch.from_numpy(moments).float()
    diagonal = whole.diagonal()
    # Inputs that are always 0, and the filling of the last block, correct no errors.
    diagonal += DAMPING * diagonal[:rows].mean() + (diagonal == 0).float()
    # From the last input to the first: H = R R^T with an upper R, and H^-1 = U^T U
    # with U = R^-1.
    upper = torch.linalg.cholesky(whole.flip(0, 1)).flip(0, 1)
    identity = torch.eye(len(upper))
    inverse: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
    return inverse


def _weights(x: Tensor, given: Tensor | None, size: int) -> Tensor:
    """The weight of each number of x [columns, blocks, size]."""
    power = x.square().mean(-1, keepdim=True)
    if given is None:
        return power.sqrt() + x.abs()
    return given.view(-1, size) * (power + x.square()).sqrt()


def _fit_symmetric(x: Tensor, weights: Tensor, lowest: int) -> Tensor:
    """The scale [columns, blocks] of integers from `lowest` to -1 - `lowest`."""
    peak = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best, scale = torch.full_like(peak, -1.0), torch.zeros_like(peak)
    wx = weights * x
    for more in SYMMETRIC_TRIES:
        factor = (lowest - more) / torch.where(peak == 0, 1.0, peak)
        integers = (x * factor).round_().clamp_(lowest, -1 - lowest)
        product = (wx * integers).sum(-1, keepdim=True)
        squares = (weights * integers.square()).sum(-1, keepdim=True).clamp(min=_TINY)
        gain = product.square() / squares
        better = gain > best
        best = torch.where(better, gain, best)
        scale = torch.where(better, product / squares, scale)
    return scale[..., 0]


def _fit_affine(x: Tensor, weights: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum, at most 0, of integers from 0; both [columns, blocks]."""
    low = x.amin(-1, keepdim=True).clamp(max=0)
    reach = (x.amax(-1, keepdim=True) - low).clamp(min=_TINY)
    best = torch.full_like(low, torch.inf)
    scale, minimum = torch.zeros_like(low), low
    total = weights.sum(-1, keepdim=True).clamp(min=_TINY)
    x_mean = (weights * x).sum(-1, keepdim=True) / total
    for more in AFFINE_TRIES:
        integers = ((x - low) * ((largest + more) / reach)).round_().clamp_(0, largest)
        wi = weights * integers
        mean = wi.sum(-1, keepdim=True) / total
        spread = weights * (integers - mean)
        variance = (spread * (integers - mean)).sum(-1, keepdim=True)
        step = (spread * (x - x_mean)).sum(-1, keepdim=True) / variance.clamp(min=_TINY)
        base = x_mean - step * mean
        # Without a minimum where it would be above 0, or all integers are the same.
        alone = (base > 0) | (variance <= _TINY)
        squares = (wi * integers).sum(-1, keepdim=True).clamp(min=_TINY)
        step = torch.where(alone, (wi * x).sum(-1, keepdim=True) / squares, step)
        base = torch.where(alone, 0.0, base)
        error = (weights * (integers * step + base - x).square()).sum(-1, keepdim=True)
        better = (error < best) & (step > 0)
        best = torch.where(better, error, best)
        scale = torch.where(better, step, scale)
        minimum = torch.where(better, base, minimum)
    return scale[..., 0], minimum[..., 0]


def _half_bytes(numbers: Tensor) -> tuple[Tensor, Bytes]:
    """Numbers rounded to halves, and the halves' bytes on a new last axis."""
    halves = numbers.half()
    return halves.float(), halves.numpy()[..., None].view(np.uint8)


def _pair_halves(integers: Bytes) -> Bytes:
    """Two integers of four bits in a byte: the first half of the last axis is low."""
    low, high = np.split(integers & 15, 2, axis=-1)
    pairs: Bytes = low | high << 4
    return pairs


def _flat(bits: int, affine: bool) -> Fit:
    """How Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0 find their steps."""
    lowest = 0 if affine else -(1 << (bits - 1))

    def fit(columns: Tensor, given: Tensor | None) -> Steps:
        x = columns.view(len(columns), -1, 32)
        weights = _weights(x, given, 32)
        minimum = torch.zeros(x.shape[:2])
        if affine:
            scale, minimum = _fit_affine(x, weights, (1 << bits) - 1)
        elif bits == 8:  # no search gains anything
            scale = x.abs().amax(-1) / 127
        else:
            scale = _fit_symmetric(x, weights, lowest)
        scale, *parts = _half_bytes(scale)
        if affine:
            minimum, stored = _half_bytes(minimum)
            parts.append(stored)

        def pack(integers: Bytes) -> Bytes:
            integers = integers.reshape(x.shape)
            if bits == 8:
                return np.concatenate([*parts, integers ^ 128], -1)
            high = np.packbits(integers >> 4, axis=-1, bitorder="little")
            both = *parts, *[high] * (bits == 5), _pair_halves(integers)
            return np.concatenate(both, -1)

        return Steps(scale, minimum, lowest, lowest + (1 << bits) - 1, pack)

    return fit


def _super(bits: int) -> Fit:
    """How Q4_K or Q5_K find their steps; their scales and minima have 6 bits."""

    def fit(columns: Tensor, given: Tensor | None) -> Steps:
        x = columns.view(len(columns), -1, 32)
        scale, minimum = _fit_affine(x, _weights(x, given, 32), (1 << bits) - 1)
        factors, steps, halves = [], [], []
        for numbers in (scale, -minimum):
            groups = numbers.view(len(x), -1, 8)
            unit, stored = _half_bytes(groups.amax(-1, keepdim=True) / 63)
            safe = torch.where(unit == 0, torch.inf, unit)
            factor = (groups / safe).round_().clamp_(0, 63)
            factors.append(factor.to(torch.uint8).numpy())
            steps.append((factor * unit).view(scale.shape))
            halves.append(stored[..., 0, :])
        s, m = factors
        packed = [
            s[..., :4] | s[..., 4:] >> 4 << 6,
            m[..., :4] | m[..., 4:] >> 4 << 6,
            s[..., 4:] & 15 | (m[..., 4:] & 15) << 4,
        ]

        def pack(integers: Bytes) -> Bytes:
            integers = integers.reshape(len(x), -1, 8, 32)
            high = np.packbits(integers >> 4, axis=2, bitorder="little")[..., 0, :]
            pairs = integers.reshape(*integers.shape[:2], 4, 64)
            low = _pair_halves(pairs).reshape(*integers.shape[:2], -1)
            return np.concatenate([*halves, *packed, *[high] * (bits == 5), low], -1)

        return Steps(steps[0], -steps[1], 0, (1 << bits) - 1, pack)

    return fit


def _halves(bits: int) -> Fit:
    """How Q3_K or Q6_K find their steps: half blocks have a scale in 6 or 8 bits."""
    lowest, reach = -(1 << (bits - 1)), 32 if bits == 3 else 128

    def fit(columns: Tensor, given: Tensor | None) -> Steps:
        x = columns.view(len(columns), -1, 16)
        scale = _fit_symmetric(x, _weights(x, given, 16), lowest).view(len(x), -1, 16)
        peak = scale.gather(-1, scale.abs().argmax(-1, keepdim=True))
        unit, stored = _half_bytes(peak / -reach)
        factor = (scale / torch.where(unit == 0, torch.inf, unit)).round_()
        factor = factor.clamp_(-reach, reach - 1)
        step = (factor * unit).view(len(x), -1)

        def pack(integers: Bytes) -> Bytes:
            twos = np.array([0, 2, 4, 6], np.uint8)[:, None]
            shape = *stored.shape[:2], -1
            halves: Any = integers.reshape(*shape[:2], 2, 4, 32)
            if bits == 3:
                eights = halves.reshape(*shape[:2], 8, 32)
                high = np.packbits(eights >> 2, axis=2, bitorder="little")
                low = np.bitwise_or.reduce((halves & 3) << twos, axis=-2)
                factors = (factor + reach).to(torch.uint8).numpy()
                tops = factors.reshape(-1, 4, 4) >> 4 << twos
                tops = np.bitwise_or.reduce(tops, axis=-2)
                parts = [high, low, _pair_halves(factors), tops]
            else:
                low = halves[..., :2, :] & 15 | (halves[..., 2:, :] & 15) << 4
                high = np.bitwise_or.reduce(halves >> 4 << twos, axis=-2)
                parts = [low, high, factor.to(torch.int8).numpy().view(np.uint8)]
            return np.concatenate([p.reshape(shape) for p in (*parts, stored)], -1)

        return Steps(step, torch.zeros_like(step), lowest, -1 - lowest, pack)

    return fit


_FITS: dict[str, Fit] = {
    "Q4_0": _flat(4, affine=False),
    "Q4_1": _flat(4, affine=True),
    "Q5_0": _flat(5, affine=False),
    "Q5_1": _flat(5, affine=True),
    "Q8_0": _flat(8, affine=False),
    "Q4_K": _super(4),
    "Q5_K": _super(5),
    "Q6_K": _halves(6),
    "Q3_K": _halves(3),
}
