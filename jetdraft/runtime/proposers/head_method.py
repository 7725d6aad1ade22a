"""Drafting with a head on the target's own states (EAGLE, 2401.15077; MTP, 2412.19437).

A head is one layer that reads the features of the target's last row and the next token.
It hands its own features from one drafted token to the next.
"""

from __future__ import annotations

from jetdraft.bundle import Bundle
from jetdraft.errors import OptionError
from jetdraft.runtime.followers.head_follower import HeadFollower
from jetdraft.runtime.proposers.draft import SAMPLES, DraftOptions, drafting
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer

NAME = "eagle"


def lacks_head(bundle: Bundle) -> str:
    """What an export must add to a bundle for a head that carries; "" if nothing."""
    entry = bundle.drafter
    contract = entry.contract if entry is not None else None
    has_head = contract is not None and contract.carried_size and not contract.recent
    return "" if has_head else "export with --head"


def head_of(parts: Parts, method: str) -> HeadFollower:
    """The head of a bundle; raises `OptionError` if there is none."""
    if not isinstance(parts.follower, HeadFollower) or lacks_head(parts.bundle):
        raise OptionError(
            f"{method} needs a head; export with --head, and do not pass "
            "--drafter-provider off",
            "method",
        )
    return parts.follower


def _make(parts: Parts, options: DraftOptions) -> Proposer:
    return drafting(parts, options, head_of(parts, NAME), NAME)


METHOD = Method(
    NAME,
    "a head that reads the target's own states",
    _make,
    DraftOptions,
    lacks=lacks_head,
    trees=True,
    cost="drafter",
    samples=SAMPLES,
    alone={},
)
