"""All verifiers by name: the walk, and others whose choice depends on the draft."""

from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.sampling.lossy import Tolerant, typical
from jetdraft.runtime.sampling.rejection import (
    greedy_plus_one,
    recursive,
    sequential,
    single,
)
from jetdraft.runtime.sampling.verifier import Conditional, Verifier, Walk

_ALL, _DRAWN = frozenset(Kind), frozenset({Kind.REPLACED, Kind.DISTINCT})
_REPLACED, _TOP = frozenset({Kind.REPLACED}), frozenset({Kind.TOP_AND_ONE})

_RULES: tuple[Verifier, ...] = (
    Walk(),
    Conditional(
        "rejection", _DRAWN, lambda p, q, x, kind: single(p, q, x), single_child=True
    ),
    Conditional(
        "recursive",
        _DRAWN,
        lambda p, q, x, kind: recursive(p, q, x, replaced=kind is Kind.REPLACED),
    ),
    Conditional("k-seq", _REPLACED, lambda p, q, x, kind: sequential(p, q, x)),
    Conditional(
        "greedy-plus-one", _TOP, lambda p, q, x, kind: greedy_plus_one(p, q, x)
    ),
    Conditional("typical", _ALL, lambda p, q, x, kind: typical(p, x), lossy=True),
    Tolerant(),
)

VERIFIERS: dict[str, Verifier] = {verifier.name: verifier for verifier in _RULES}
"""All verifiers by name."""
