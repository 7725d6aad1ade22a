"""Drafting with a graph that answers for any rows of a draft, one level at a time.

EAGLE (2401.15077) and MTP (2412.19437) read the features of the target's last row and
the next token; such a head hands its own features from one drafted token to the next.
GliDe (2402.02082) reads the target's own KV buffers, which are bound once and only
read. Chimera (2402.15758) reads the last three tokens, and the features of all rows.
"""

from __future__ import annotations

from collections.abc import Callable

from jetdraft.bundle import Bundle
from jetdraft.contracts.step_contract import StepContract
from jetdraft.runtime.followers.block_follower import AnyFollower
from jetdraft.runtime.followers.exit_follower import ExitFollower
from jetdraft.runtime.followers.follower import Follower
from jetdraft.runtime.followers.head_follower import HeadFollower
from jetdraft.runtime.proposers.draft import (
    SAMPLES,
    DraftOptions,
    drafting,
    needs_drafter,
)
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer


def follower_for(parts: Parts, name: str, needed: str, lacks: str) -> AnyFollower:
    """The follower of a method's graph; raises `OptionError` if it `lacks` a graph."""
    if parts.follower is None or lacks:
        raise needs_drafter(name, needed, "--head")
    return parts.follower


def _method(
    name: str, summary: str, needed: str, fits: Callable[[StepContract], object]
) -> Method[DraftOptions]:
    """The method of graphs whose contract `fits`."""

    def lacks(bundle: Bundle) -> str:
        has_graph = bundle.drafter is not None and fits(bundle.drafter.contract)
        return "" if has_graph else f"export with --head, and {needed}"

    def make(parts: Parts, options: DraftOptions) -> Proposer:
        follower = follower_for(parts, name, needed, lacks(parts.bundle))
        assert isinstance(follower, Follower | HeadFollower | ExitFollower)
        return drafting(parts, options, follower, name)

    return Method(
        name,
        summary,
        make,
        DraftOptions,
        lacks=lacks,
        trees=True,
        cost="drafter",
        samples=SAMPLES,
        alone={},
    )


EAGLE = _method(
    "eagle",
    "a head that reads the target's own states",
    "a head of EAGLE or MTP",
    lambda contract: contract.carried_size and not contract.recent,
)
GLIDE = _method(
    "glide",
    "a layer that reads the target's keys and values",
    "a GliDe drafter",
    lambda contract: contract.reads,
)
CHIMERA = _method(
    "chimera",
    "three tokens, and a layer over all of the target's states",
    "a Chimera drafter",
    lambda contract: contract.recent and not contract.ahead,
)
