"""Drafting with a layer that reads the target's own KV buffers (GliDe, 2402.02082).

The buffers of the target's last layer are inputs of the drafter's graph, bound once and
only read. The draft expands where it is unsure with `tree=comb` (CaPE, same paper).
"""

from __future__ import annotations

from jetdraft.bundle import Bundle
from jetdraft.errors import OptionError
from jetdraft.runtime.followers.follower import Follower
from jetdraft.runtime.proposers.draft import SAMPLES, DraftOptions, drafting
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer

NAME = "glide"


def _lacks(bundle: Bundle) -> str:
    entry = bundle.drafter
    reads = entry is not None and entry.contract.reads
    return "" if reads else "export with --head, and a GliDe drafter"


def _make(parts: Parts, options: DraftOptions) -> Proposer:
    if not isinstance(parts.follower, Follower) or _lacks(parts.bundle):
        raise OptionError(
            f"{NAME} needs a GliDe drafter; export with --head, and do not pass "
            "--drafter-provider off",
            "method",
        )
    return drafting(parts, options, parts.follower, NAME)


METHOD = Method(
    NAME,
    "a layer that reads the target's keys and values",
    _make,
    DraftOptions,
    lacks=_lacks,
    trees=True,
    cost="drafter",
    samples=SAMPLES,
    alone={},
)
