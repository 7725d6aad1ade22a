"""All drafts of k children, their probabilities, and the best any verifier can do."""

import itertools

import numpy as np

from jetdraft.runtime.drafts.rows import Kind


def enumerate_drafts(q, k, kind):
    """Pairs of children and the probability that they are drawn, in that order."""
    tokens = np.flatnonzero(q).tolist()
    if kind is Kind.REPLACED:
        for children in itertools.product(tokens, repeat=k):
            yield children, float(np.prod(q[list(children)]))
    elif kind is Kind.DISTINCT:
        for children in itertools.permutations(tokens, k):
            left, probability = 1.0, 1.0
            for x in children:
                probability *= q[x] / left
                left -= q[x]
            yield children, probability
    else:
        fixed = np.argsort(-q, kind="stable")[: k - 1].tolist()
        rest = 1.0 - q[fixed].sum()
        for x in set(tokens) - set(fixed):
            yield (*fixed, x), q[x] / rest


def optimum(p, q, k, kind):
    """1 + min over token sets H of p(H) - P(all drafted tokens are in H)."""
    drafts = list(enumerate_drafts(q, k, kind))
    best = 0.0
    for bits in itertools.product((False, True), repeat=len(p)):
        inside = {x for x, bit in enumerate(bits) if bit}
        drafted = sum(weight for x, weight in drafts if set(x) <= inside)
        best = min(best, p[list(inside)].sum() - drafted)
    return 1.0 + best


def outcome(rule, p, q, k, kind):
    """The exact distribution of the chosen token, and the chance that it is drafted."""
    total, accepted = np.zeros(len(p)), 0.0
    for children, weight in enumerate_drafts(q, k, kind):
        pi = rule(p, q, children, kind)
        assert pi.min() >= -1e-12
        total += weight * pi
        accepted += weight * pi[list(set(children))].sum()
    return total, accepted
