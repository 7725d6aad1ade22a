"""Drafting with the target's own lower layers (Kangaroo, 2404.18911).

The lower half of the target runs a drafted token, an adapter of one attention layer
makes of its state what the LM head reads, and the head drafts the next token. Both
exits are early: out of the layers, and out of the draft where the adapter is not sure.
What the lower half computed is kept for the pass that verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetdraft.bundle import Bundle
from jetdraft.devices.providers import HALVES, cpu_only
from jetdraft.errors import OptionError
from jetdraft.ranges import Range, check_ranges
from jetdraft.runtime.followers.exit_follower import ExitFollower
from jetdraft.runtime.passes.target import Target
from jetdraft.runtime.proposers.draft import (
    SAMPLES,
    DraftProposer,
    TreeProposer,
    check_trees,
    needs_drafter,
)
from jetdraft.runtime.proposers.draft_stops import Confidence
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer
from jetdraft.runtime.proposers.tree_options import TreeOptions

NAME = "kangaroo"

_RANGES = {"confidence": Range(lambda p: 0.0 <= p <= 1.0, "0 (off) to 1")}


@dataclass(frozen=True)
class ExitOptions(TreeOptions):
    """The shape of drafts, and where chains end.

    confidence  a chain ends behind a token whose probability at the adapter is below
                this; the token itself is still verified

        ExitOptions(confidence=0.6)
    """

    confidence: float = Confidence.default

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, _RANGES)


def _lacks(bundle: Bundle) -> str:
    contract = bundle.drafter.contract if bundle.drafter else None
    halves = bundle.target.halves
    has_adapter = (
        halves is not None
        and contract is not None
        and contract.feature_input == halves.hidden_size
        and not (contract.carried_size or contract.guesses)
    )
    return "" if has_adapter else "export with --head, and a Kangaroo adapter"


def _make(parts: Parts, options: ExitOptions) -> Proposer:
    follower = parts.follower
    if not isinstance(follower, ExitFollower) or _lacks(parts.bundle):
        raise needs_drafter(NAME, "a Kangaroo adapter", "--head")
    if refusal := cpu_only(HALVES, parts.provider, "choose --provider cpu"):
        raise OptionError(refusal, "method")
    entry = parts.bundle.target
    assert entry.halves is not None
    below = 1.0 - entry.halves.layers / len(entry.contract.kv_shapes)
    ms = parts.curve.drafter + below * parts.curve.pass_ms(1)
    if options.branched:
        check_trees(parts.target, follower.graph)
        return TreeProposer(follower, options.shape, options.kind, ms, NAME)
    stopping = Confidence(options.confidence) if options.confidence else None
    return DraftProposer(follower, ms, stopping, NAME)


def _target(parts: Parts, options: ExitOptions, widths: Sequence[int]) -> Target | None:
    """The target whose lower half runs ahead, where there is an adapter to draft."""
    if not isinstance(parts.follower, ExitFollower) or parts.provider != "cpu":
        return None
    leading = parts.leading()
    leading.prepare(widths)
    return leading


METHOD = Method(
    NAME,
    "the target's lower layers and an adapter",
    _make,
    ExitOptions,
    lacks=_lacks,
    trees=True,
    target=_target,
    samples=SAMPLES,
    alone={"confidence": 0.0},
)
