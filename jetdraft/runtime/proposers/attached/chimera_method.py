"""Drafting with a trigram encoder and one layer over features (Chimera, 2402.15758).

A step reads the last three tokens, and attends to the features of all rows that the
target has run. What it makes of its row stands for the features of that row in the
steps after it.
"""

from __future__ import annotations

from jetdraft.bundle import Bundle
from jetdraft.errors import OptionError
from jetdraft.runtime.followers.head_follower import HeadFollower
from jetdraft.runtime.proposers.draft import SAMPLES, DraftOptions, drafting
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer

NAME = "chimera"


def _lacks(bundle: Bundle) -> str:
    entry = bundle.drafter
    contract = entry.contract if entry is not None else None
    reads = contract is not None and contract.recent and not contract.ahead
    return "" if reads else "export with --head, and a Chimera drafter"


def _make(parts: Parts, options: DraftOptions) -> Proposer:
    if not isinstance(parts.follower, HeadFollower) or _lacks(parts.bundle):
        raise OptionError(
            f"{NAME} needs a Chimera drafter; export with --head, and do not pass "
            "--drafter-provider off",
            "method",
        )
    return drafting(parts, options, parts.follower, NAME)


METHOD = Method(
    NAME,
    "three tokens, and a layer over all of the target's states",
    _make,
    DraftOptions,
    lacks=_lacks,
    trees=True,
    cost="drafter",
    samples=SAMPLES,
    alone={},
)
