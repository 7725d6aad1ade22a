"""Acceptance rules that do not keep the target's distribution: lossy verifiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jetdraft.runtime.drafts.arrays import Float64s
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling

EPSILON, DELTA = 0.09, 0.3
"""epsilon and delta of typical acceptance."""


def typical(p: Float64s, children: Sequence[int]) -> Float64s:
    """Typical acceptance (Medusa, 2401.10774): accepts children that p finds plausible.

    It has the form of `rejection`: the distribution pi of the chosen token, given the
    children. It decides row by row; Medusa takes the longest of all accepted paths.
    """
    #   accept x if p(x) > min(epsilon, delta exp(-H(p)))
    #   among several such x, y is the most probable; without such an x, y ~ p
    logs = np.log(np.where(p > 0.0, p, 1.0))
    threshold = min(EPSILON, DELTA * float(np.exp((p * logs).sum())))
    return _most_probable([x for x in children if p[x] > threshold], p)


def _most_probable(accepted: list[int], p: Float64s) -> Float64s:
    """The distribution of the most probable accepted child alone; p without any."""
    if not accepted:
        return p
    pi = np.zeros_like(p)
    pi[max(accepted, key=lambda x: p[x])] = 1.0
    return pi


@dataclass
class Tolerant:
    """Spec-Verification (SpecDec, 2203.16487): accepts what is nearly the best token.

    A drafted token is accepted if it is one of the `top` best and its log probability
    is at most `tolerance` below that of the best; of several such tokens the most
    probable is. Without one the token is that of plain decoding. With `top` 1 a greedy
    text is that of plain decoding.

        Tolerant(top=5, tolerance=3.0).choose(rows, answer, positions, chooser)
    """

    top: int = 3
    tolerance: float = 1.0
    name: str = "tolerant"
    kinds: frozenset[Kind] = frozenset(Kind)
    lossy: bool = True
    single_child: bool = False
    settings: tuple[str, ...] = ("top", "tolerance")

    def choose(
        self, rows: Rows, answer: Answer, positions: Sequence[int], chooser: Chooser
    ) -> list[int]:
        """A token per row; see `Verifier`."""
        chosen = chooser.choose(answer, positions)
        # A greedy text has probabilities too, those at temperature 1.
        reader = chooser if chooser.sampling.temperature else Chooser(Sampling(1.0))
        row: int | None = 0
        while row is not None:
            p = reader.draft_distribution(answer.rows(slice(row, row + 1)))
            near = p.probabilities >= p.probabilities[0] * np.exp(-self.tolerance)
            passing = p.ids[: self.top][near[: self.top]].tolist()
            children = rows.children(row)
            drafted = {rows.tokens[child] for child in children}
            chosen[row] = next((t for t in passing if t in drafted), chosen[row])
            row = next((i for i in children if rows.tokens[i] == chosen[row]), None)
        return chosen
