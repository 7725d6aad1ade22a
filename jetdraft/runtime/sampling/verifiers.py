"""All verifiers by name: the walk, and others whose choice depends on the draft."""

from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.sampling import lossy, rejection
from jetdraft.runtime.sampling.verifier import Conditional, Verifier, Walk, check_kind

__all__ = ["VERIFIERS", "Conditional", "Verifier", "Walk", "check_kind"]

_DRAWN = frozenset({Kind.REPLACED, Kind.DISTINCT})

VERIFIERS: dict[str, Verifier] = {
    verifier.name: verifier
    for verifier in (
        Walk(),
        Conditional(
            "rejection",
            _DRAWN,
            lambda p, q, x, kind: rejection.single(p, q, x),
            single_child=True,
        ),
        Conditional(
            "recursive",
            _DRAWN,
            lambda p, q, x, kind: rejection.recursive(
                p, q, x, replaced=kind is Kind.REPLACED
            ),
        ),
        Conditional(
            "k-seq",
            frozenset({Kind.REPLACED}),
            lambda p, q, x, kind: rejection.sequential(p, q, x),
        ),
        Conditional(
            "greedy-plus-one",
            frozenset({Kind.TOP_AND_ONE}),
            lambda p, q, x, kind: rejection.greedy_plus_one(p, q, x),
        ),
        Conditional(
            "typical",
            frozenset(Kind),
            lambda p, q, x, kind: lossy.typical(p, x),
            lossy=True,
        ),
        Conditional(
            "tolerant",
            frozenset(Kind),
            lambda p, q, x, kind: lossy.tolerant(p, x),
            lossy=True,
        ),
    )
}
"""All verifiers by name."""
