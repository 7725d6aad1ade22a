"""Picks the tokens that become the children of a row, for each kind of draft."""

from __future__ import annotations

import numpy as np

from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.sampling.chooser import Sampling

_SALT = 0x6A09E667F3BCC908
"""Makes the draws of a draft independent of the noise that chooses target tokens."""


def siblings(
    kind: Kind,
    q: Distribution,
    count: int,
    sampling: Sampling,
    position: int,
    family: int = 0,
) -> list[int]:
    """At most `count` tokens from `q`, for `position`, in the order to try them.

    `q` lists its tokens best first. The k best tokens by log q + noise are k draws
    without replacement (Gumbel-top-k, Kool et al. 1903.06059). With the noise of the
    target they are the coupled siblings; in greedy decoding these are the k best of q.

    Families with different numbers draw independently: a shape may look at the tokens
    of one family to decide whether another family grows at all, without a bias.
    """
    salt = sampling.seed + _SALT + (family << 8)
    if kind is Kind.REPLACED:
        return [q.draw(salt + i, position) for i in range(count)]
    if kind is Kind.TOP_AND_ONE:
        return _top_and_one(q, count, salt, position)
    count = min(count, int(np.count_nonzero(q.probabilities)))
    coupled = kind is Kind.COUPLED and sampling.temperature > 0
    if kind is Kind.DISTINCT or coupled:
        seed = sampling.seed if coupled else salt
        order = np.argsort(-q.scores(seed, position), kind="stable")
        return [int(token) for token in q.ids[order[:count]]]
    return [int(token) for token in q.ids[:count]]


def _top_and_one(q: Distribution, count: int, seed: int, position: int) -> list[int]:
    """The best `count` - 1 tokens, then one token drawn from the others."""
    fixed = [int(token) for token in q.ids[: count - 1]]
    rest = Distribution(q.ids[count - 1 :], q.probabilities[count - 1 :])
    if not rest.probabilities.any():
        return fixed
    return [*fixed, rest.draw(seed, position)]
