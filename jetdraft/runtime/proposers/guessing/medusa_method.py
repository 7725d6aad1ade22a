"""Drafting with heads that each guess one token further (Medusa, 2401.10774).

All heads read the features of the target's last row, in one pass without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.bundle import Bundle
from jetdraft.errors import OptionError
from jetdraft.runtime.followers.follower import Follower
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.draft import SAMPLES, check_trees, observe
from jetdraft.runtime.proposers.guessing.guess_proposer import GuessProposer
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer, Seen, Tokens, Traits
from jetdraft.runtime.proposers.tree_options import TreeOptions
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.trees.shape import Shape

NAME = "medusa"


class MedusaProposer(GuessProposer):
    """Drafts what the heads guess after the last accepted row.

    MedusaProposer(GuessFollower(graph), traits).propose(context, budget=3)
    """

    def __init__(
        self, follower: Follower, traits: Traits, shape: Shape | None = None
    ) -> None:
        super().__init__(traits, shape)
        self._follower = follower

    @property
    def session_seconds(self) -> float:
        """The seconds inside the heads' `session.run`."""
        return self._follower.graph.seconds

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence."""
        super().begin(prompt, chooser)
        self._follower.begin(prompt)

    def observe(self, seen: Seen) -> None:
        """Let its follower see the accepted rows, whoever proposed them."""
        observe(self._follower, seen)

    def guesses(self, context: Tokens) -> Answer | None:
        """The answers of the heads, from the features of the last accepted row."""
        return self._follower.follow(context)


def _lacks(bundle: Bundle) -> str:
    entry = bundle.drafter
    has_heads = entry is not None and entry.contract.guesses
    return "" if has_heads else "export with --head, and Medusa heads"


def _make(parts: Parts, options: TreeOptions) -> Proposer:
    follower = parts.follower
    if follower is None or _lacks(parts.bundle):
        raise OptionError(
            f"{NAME} needs Medusa heads; export with --head, and do not pass "
            "--drafter-provider off",
            "method",
        )
    contract, shape = parts.target.contract, None
    if options.branched:
        check_trees(parts.target)
        shape = options.shape
    count = follower.graph.contract.guesses
    branches = options.may_branch and contract.tree and shape is None
    chain = shape is None and not branches
    traits = Traits(
        NAME,
        count if chain else contract.max_width - 1,
        options.kind,
        ms_per_token=parts.curve.drafter / count,
        branches=branches,
    )
    return MedusaProposer(follower, traits, shape)


METHOD = Method(
    NAME,
    "Medusa heads on the target's last state",
    _make,
    TreeOptions,
    lacks=_lacks,
    trees=True,
    samples=SAMPLES,
)
