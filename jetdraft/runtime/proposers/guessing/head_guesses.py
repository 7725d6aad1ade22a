"""Drafting with heads that each guess one token further (Medusa, 2401.10774).

All heads read the features of the target's last row, in one pass without a cache.
Hydra's (2402.05109) also read the likeliest guesses before their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.bundle import Bundle
from jetdraft.runtime.followers.block_follower import AnyFollower
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.draft import SAMPLES, check_trees, observe
from jetdraft.runtime.proposers.guessing.guess_proposer import GuessProposer
from jetdraft.runtime.proposers.head_method import follower_for
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer, Seen, Tokens, Traits
from jetdraft.runtime.proposers.tree_options import TreeOptions
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.trees.shape import Shape


class HeadGuesses(GuessProposer):
    """Drafts the guesses of a graph that its `follower` keeps in step.

    HeadGuesses(GuessFollower(graph), traits).propose(context, budget=3)
    """

    def __init__(
        self, follower: AnyFollower, traits: Traits, shape: Shape | None = None
    ) -> None:
        super().__init__(traits, shape)
        self._follower = follower

    @property
    def session_seconds(self) -> float:
        """The seconds inside the graph's `session.run`."""
        return self._follower.graph.seconds

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence, except for what the prompt shares."""
        super().begin(prompt, chooser)
        self._follower.begin(prompt)

    def keep(self, kept: int) -> int:
        """As its follower says."""
        return self._follower.keep(kept)

    def observe(self, seen: Seen) -> None:
        """Let its follower see the accepted rows, whoever proposed them."""
        observe(self._follower, seen)

    def catch_up(self, context: Tokens) -> None:
        """Feed most of what the graph has missed."""
        self._follower.catch_up(context)

    def guesses(self, context: Tokens) -> Answer | None:
        """The answers for the tokens after the last accepted row."""
        return self._follower.follow(context)


def head_traits(parts: Parts, options: TreeOptions, name: str) -> Traits:
    """What a controller knows of guesses; raises `OptionError` if trees cannot be."""
    contract, drafter = parts.target.contract, parts.drafter
    assert drafter is not None
    if options.branched:
        check_trees(parts.target)
    count = drafter.contract.guesses
    branches = options.may_branch and contract.tree and not options.branched
    return Traits(
        name,
        contract.max_width - 1 if options.branched or branches else count,
        options.kind,
        ms_per_token=parts.curve.drafter / count,
        branches=branches,
    )


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


MEDUSA = Method(
    NAME,
    "Medusa or Hydra heads on the target's last state",
    _make,
    TreeOptions,
    lacks=_lacks,
    trees=True,
    samples=SAMPLES,
    alone={},
)
