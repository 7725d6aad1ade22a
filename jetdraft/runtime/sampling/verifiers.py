"""Verifiers: they choose a token per row, and `Rows.walk` accepts the rows that agree.

    p   the target's distribution of a row's token
    q   the drafter's distribution, from which the row's children x_1 .. x_k were drawn
    pi  the distribution to draw the chosen token y from, given the children

Rules take p and q as float64 [m], and children as indices in the order of their draws;
they return pi. Where they are not lossy, sum_x P(x_1 .. x_k) pi(y | x_1 .. x_k) = p(y).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from jetdraft.contracts.tensors import Float64s
from jetdraft.errors import DraftingError
from jetdraft.runtime.drafts.noise import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling

Draws = Sequence[int]  # The places of children, in the order of their draws.
# Maps (p, q, children, kind) to the distribution of the chosen token.
Rule = Callable[[Float64s, Float64s, Draws, Kind], Float64s]
# A token per row, for these absolute positions; -1 where the walk cannot come.
Choose = Callable[[Rows, Answer, Sequence[int], Chooser], list[int]]
EPSILON, DELTA = 0.09, 0.3  # The parameters of typical acceptance.
TOP, TOLERANCE = 3, 1.0  # The tolerant verifier's defaults.


@dataclass(frozen=True)
class Verifier:
    """Chooses one token per row, by the target's distribution unless it is `lossy`.

    It is for drafts of some `kinds`, maybe with a `single_child` only. The `settings`
    are fields of `MethodOptions` with their defaults.
    """

    name: str
    kinds: frozenset[Kind]
    choose: Choose
    rule: Rule | None = None
    lossy: bool = False
    single_child: bool = False
    settings: Mapping[str, float] = field(default_factory=dict)

    def with_settings(self, settings: Mapping[str, float]) -> "Verifier":
        """This verifier with other values of its `settings`."""
        choose: Any = self.choose
        return replace(self, choose=partial(choose, **settings))

    def check_kind(self, kind: Kind) -> None:
        """Raise `OptionError` if the verifier is not made for drafts of this kind."""
        if kind not in self.kinds:
            allowed = ", ".join(sorted(k.value for k in self.kinds))
            raise DraftingError(
                f"verifier {self.name!r} is not made for {kind.value} drafts, only "
                f"for {allowed}; use verifier=walk, or method draft with those siblings"
            )


def _rule_verifier(
    name: str, kinds: frozenset[Kind], rule: Rule, **more: Any
) -> Verifier:

    def choose(
        rows: Rows, answer: Answer, positions: Sequence[int], chooser: Chooser
    ) -> list[int]:
        """One draw per row of the accepted path, from p without children."""
        if rows.drafted:
            verifier.check_kind(rows.kind)
        chosen = [-1] * len(rows)
        row: int | None = 0
        while row is not None:
            p = chooser.distribution(answer.rows(slice(row, row + 1)))
            children = rows.children(row)
            if children:
                tokens = np.array([rows.tokens[child] for child in children])
                q = rows.drawn_from.get(row) or Distribution(tokens[:0], np.zeros(0))
                ids = np.unique(np.concatenate([p.ids, q.ids, tokens]))
                places = np.searchsorted(ids, tokens).tolist()
                p = Distribution(ids, rule(p.over(ids), q.over(ids), places, rows.kind))
            token = p.draw(chooser.sampling.seed, positions[row])
            chosen[row] = token
            row = next((i for i in children if rows.tokens[i] == token), None)
        return chosen

    verifier = Verifier(name, kinds, choose, rule, **more)
    return verifier


def _single(p: Float64s, q: Float64s, children: Draws, kind: Kind) -> Float64s:
    """Speculative sampling with one child (Leviathan et al., 2211.17192)."""
    #   accept x ~ q with min(1, p(x) / q(x))
    #   else y ~ norm(max(p - q, 0))
    if len(children) > 1:
        fact = "verifier 'rejection' takes one child per row; use 'recursive'"
        raise DraftingError(fact)
    return _recursive(p, q, children, Kind.REPLACED)


def _recursive(p: Float64s, q: Float64s, children: Draws, kind: Kind) -> Float64s:
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
        if kind is not Kind.REPLACED:
            draft = draft.copy()
            draft[x] = 0.0
            if draft.sum() <= 0.0:
                break
            draft = draft / draft.sum()
    return np.asarray(pi + reach * residual)


def _sequential(p: Float64s, q: Float64s, children: Draws, kind: Kind) -> Float64s:
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


def _greedy_plus_one(p: Float64s, q: Float64s, children: Draws, kind: Kind) -> Float64s:
    """The best tokens of q, and a token drawn from the rest (Hu et al., 2502.18779)."""
    #   q' = q without the fixed tokens, renormalised; t ~ q'
    #   accept t with min(1, p(t) / q'(t))
    #   else y ~ norm(max(p - q', 0)), which can be a fixed token
    *fixed, drawn = children
    draft = q.copy()
    draft[fixed] = 0.0
    if draft.sum() <= 0.0:
        return p
    return _recursive(p, draft / draft.sum(), [drawn], Kind.REPLACED)


def _typical(p: Float64s, q: Float64s, children: Draws, kind: Kind) -> Float64s:
    """Typical acceptance, row by row (Medusa, 2401.10774): what p finds plausible."""
    #   accept x if p(x) > min(epsilon, delta exp(-H(p)))
    #   among several such x, y is the most probable; without such an x, y ~ p
    logs = np.log(np.where(p > 0.0, p, 1.0))
    threshold = min(EPSILON, DELTA * float(np.exp((p * logs).sum())))
    accepted = [x for x in children if p[x] > threshold]
    if not accepted:
        return p
    pi = np.zeros_like(p)
    pi[max(accepted, key=lambda x: p[x])] = 1.0
    return pi


def _tolerant(
    rows: Rows,
    answer: Answer,
    positions: Sequence[int],
    chooser: Chooser,
    top: int = TOP,
    tolerance: float = TOLERANCE,
) -> list[int]:
    """Spec-Verification (2203.16487) accepts the `top` best within `tolerance`."""
    chosen = chooser.choose(answer, positions)
    # A greedy text has probabilities too, at temperature 1.
    reader = chooser if chooser.sampling.temperature else Chooser(Sampling(1.0))
    row: int | None = 0
    while row is not None:
        p = reader.draft_distribution(answer.rows(slice(row, row + 1)))
        near = p.probabilities >= p.probabilities[0] * np.exp(-tolerance)
        passing = p.ids[:top][near[:top]].tolist()
        children = rows.children(row)
        drafted = {rows.tokens[child] for child in children}
        chosen[row] = next((t for t in passing if t in drafted), chosen[row])
        row = next((i for i in children if rows.tokens[i] == chosen[row]), None)
    return chosen


_ALL_KINDS, _DRAWN_KINDS = frozenset(Kind), frozenset({Kind.REPLACED, Kind.DISTINCT})
_REPLACED_KINDS, _TOP_KINDS = frozenset({Kind.REPLACED}), frozenset({Kind.TOP_AND_ONE})
_TOLERANT = {"top": TOP, "tolerance": TOLERANCE}

_TABLE = (
    Verifier("walk", _ALL_KINDS, lambda _, answer, at, by: by.choose(answer, at)),
    _rule_verifier("rejection", _DRAWN_KINDS, _single, single_child=True),
    _rule_verifier("recursive", _DRAWN_KINDS, _recursive),
    _rule_verifier("k-seq", _REPLACED_KINDS, _sequential),
    _rule_verifier("greedy-plus-one", _TOP_KINDS, _greedy_plus_one),
    _rule_verifier("typical", _ALL_KINDS, _typical, lossy=True),
    Verifier("tolerant", _ALL_KINDS, _tolerant, lossy=True, settings=_TOLERANT),
)
VERIFIERS = {verifier.name: verifier for verifier in _TABLE}  # All verifiers by name.
