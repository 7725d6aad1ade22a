"""Drafting with heads that each guess one token further (Medusa, 2401.10774).

All heads read the features of the target's last row, in one pass without a cache.
Hydra's (2402.05109) also read the likeliest guesses before their own.
"""

from __future__ import annotations

from jetdraft.bundle import Bundle
from jetdraft.runtime.proposers.draft import SAMPLES
from jetdraft.runtime.proposers.guessing.head_guesses import HeadGuesses, head_traits
from jetdraft.runtime.proposers.head_method import follower_for
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer
from jetdraft.runtime.proposers.tree_options import TreeOptions

NAME = "medusa"


def _lacks(bundle: Bundle) -> str:
    entry = bundle.drafter
    has_heads = (
        entry is not None and entry.contract.guesses and not entry.contract.block
    )
    return "" if has_heads else "export with --head, and heads of Medusa or Hydra"


def _make(parts: Parts, options: TreeOptions) -> Proposer:
    follower = follower_for(
        parts, NAME, "heads of Medusa or Hydra", _lacks(parts.bundle)
    )
    traits = head_traits(parts, options, NAME)
    shape = options.shape if options.branched else None
    return HeadGuesses(follower, traits, shape)


METHOD = Method(
    NAME,
    "Medusa or Hydra heads on the target's last state",
    _make,
    TreeOptions,
    lacks=_lacks,
    trees=True,
    samples=SAMPLES,
    alone={},
)
