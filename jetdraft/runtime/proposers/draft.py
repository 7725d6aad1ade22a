"""Drafting with a second, small model, the drafter (Leviathan et al., 2211.17192)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jetdraft.bundle import Bundle
from jetdraft.errors import DraftingError, OptionError
from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.followers.block_follower import AnyFollower
from jetdraft.runtime.followers.exit_follower import ExitFollower
from jetdraft.runtime.followers.falcon_follower import FalconFollower
from jetdraft.runtime.followers.follower import Follower
from jetdraft.runtime.followers.head_follower import HeadFollower
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.proposers.draft_stops import DRAFT_STOPS, DraftStop, draft_stop
from jetdraft.runtime.proposers.method import Method, check_choice
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Seen, Tokens, Traits
from jetdraft.runtime.proposers.tree_options import TreeOptions
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.trees.shape import Shape, Tree

NAME = "draft"

LevelFollower = Follower | HeadFollower | ExitFollower
"""The followers that answer for any rows of a tree in a pass."""

DraftingFollower = LevelFollower | FalconFollower
"""The followers that draft a token after a drafted token."""


@dataclass(frozen=True)
class DraftOptions(TreeOptions):
    """The shape of a drafter's drafts, and the rule that ends its chains early.

    stopping        "confidence", "product" or "learned", see `DraftStop`
    stop_threshold  the probability that the rule compares with

        DraftOptions(stopping="confidence", stop_threshold=0.6)
    """

    stopping: str | None = None
    stop_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        threshold = self.stop_threshold
        if self.stopping is None:
            if threshold is not None:
                raise DraftingError(
                    "stop_threshold needs a stopping rule; give stopping too"
                )
            return
        check_choice("stopping", self.stopping, DRAFT_STOPS)
        if self.branched:
            raise DraftingError(
                f"stopping {self.stopping!r} ends chains, not trees; leave it out"
            )
        if threshold is not None and not 0.0 <= threshold <= 1.0:
            raise DraftingError(
                f"stop threshold {threshold} is out of range; give 0 to 1"
            )


class DraftProposer(Proposer):
    """Drafts chains with an independent drafter, which chooses with the target's noise.

    With `stopping` a draft ends where this rule doubts it. Several proposers may share
    a drafter through one follower.

        DraftProposer(Follower(graph)).propose([5, 8, 9], budget=3)
    """

    def __init__(
        self,
        follower: DraftingFollower,
        ms_per_token: float = 0.0,
        stopping: DraftStop | None = None,
        name: str = NAME,
        kind: Kind = Kind.COUPLED,
    ) -> None:
        self.graph = follower.graph
        self.traits = Traits(
            name, self.graph.contract.max_width - 1, kind, ms_per_token=ms_per_token
        )
        self.stopping = stopping
        self._follower = follower
        self._chooser = Chooser(Sampling())

    @property
    def session_seconds(self) -> float:
        """The seconds inside the drafter's `session.run`."""
        return self.graph.seconds

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence, except for the beginning that the prompt shares."""
        self._follower.begin(prompt)
        self._chooser = chooser

    def keep(self, kept: int) -> int:
        """As its follower says."""
        return self._follower.keep(kept)

    def observe(self, seen: Seen) -> None:
        """Let its follower see the accepted rows, whoever proposed them."""
        observe(self._follower, seen)

    def catch_up(self, context: Tokens) -> None:
        """Feed most of what the drafter's graph has missed."""
        self._follower.catch_up(context)

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """Catch up with the context, then draft token by token."""
        tokens = [context[-1]]
        answer = self._follower.follow(context)
        if self.stopping is not None:
            self.stopping.begin()
        while answer is not None:
            tokens.append(self._choose(answer, len(context) + len(tokens) - 1))
            if len(tokens) > budget or (
                self.stopping is not None and self.stopping.stop(answer)
            ):
                break
            answer = self._follower.step(tokens[-1])
        return Rows.chain(tokens, self.traits.kind)

    def _choose(self, answer: Answer, position: int) -> int:
        return self._chooser.choose(answer, [position])[0]


class GrowingProposer(DraftProposer):
    """Drafts trees of a `shape` with siblings of a `kind`, level by level.

    The drafter's rows of a tree are never committed in its cache: the accepted tokens
    are fed again with the next context, in one pass. A subclass asks the drafter.
    """

    def __init__(
        self,
        follower: DraftingFollower,
        shape: Shape,
        kind: Kind,
        ms_per_token: float = 0.0,
        name: str = NAME,
    ) -> None:
        super().__init__(follower, ms_per_token, name=name, kind=kind)
        self.shape = shape

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """Grow a tree below the context's last token."""
        root, kind = context[-1], self.traits.kind
        tree = Tree(kind, self._chooser.sampling, len(context), budget, [root])
        answer = self._follower.follow(context)
        if answer is None:
            return tree.rows()
        answers = {0: self._first(answer)}
        while rows := self.shape.grow(tree, answers):
            # A wide level is cut, and a full buffer or mask ends the draft.
            rows = rows[: self._room()]
            if not rows:
                break
            answers = self._ask(tree, rows)
        return self.shape.finish(tree).depth_first()

    @abstractmethod
    def _first(self, answer: Answer) -> Distribution:
        """The drafter's distribution after the root of a new tree."""

    @abstractmethod
    def _room(self) -> int:
        """How many rows of the tree the next pass can hold."""

    @abstractmethod
    def _ask(self, tree: Tree, rows: list[int]) -> dict[int, Distribution]:
        """The drafter's distributions after rows of the tree."""


class TreeProposer(GrowingProposer):
    """Drafts trees with a drafter that answers for one level in a pass.

    TreeProposer(follower, Best(), Kind.COUPLED).propose(context, budget=8)
    """

    _follower: LevelFollower

    def _first(self, answer: Answer) -> Distribution:
        self._slots: dict[int, int] = {}
        """The slot of each row of the tree in the drafter's cache, after the cursor."""
        return self._chooser.draft_distribution(answer)

    def _room(self) -> int:
        room = self.graph.draft_room(len(self._slots))
        return min(self.graph.contract.max_width, room)

    def _ask(self, tree: Tree, rows: list[int]) -> dict[int, Distribution]:
        slots, filled = self._slots, len(self._slots)
        # From the root's child to the row's parent, the last, as in `Rows.ancestors`.
        ancestors = [[slots[r] for r in tree.path(row)[-2:0:-1]] for row in rows]
        answer = self._follower.branch(
            [tree.tokens[row] for row in rows],
            [tree.depths[row] - 1 for row in rows],
            ancestors,
            filled,
        )
        slots.update((row, filled + i) for i, row in enumerate(rows))
        return {
            row: self._chooser.draft_distribution(answer.rows(slice(i, i + 1)))
            for i, row in enumerate(rows)
        }


def observe(follower: AnyFollower, seen: Seen) -> None:
    """Let a follower see the accepted rows of a pass."""
    path, features = seen.path, seen.answer.features
    if features is not None:
        tokens, end = seen.rows.tokens, len(path)
        if path[-1] == end - 1:  # the rows of a chain lie side by side
            tokens, rows = tokens[:end], features[:end].copy()
        else:
            tokens, rows = [tokens[row] for row in path], features[list(path)]
        follower.observe(seen.length - 1 - end, tokens, rows)


def check_trees(*graphs: Graph) -> None:
    """Raise `OptionError` unless all of these graphs can branch."""
    if not all(graph.contract.tree for graph in graphs):
        raise DraftingError(
            "the bundle verifies chains only, since one of its models attends in "
            "sliding windows; leave the tree out"
        )


def drafter_of(parts: Parts, method: str) -> Follower:
    """The drafter of a bundle; raises `OptionError` if there is no drafter."""
    follower = parts.follower
    if not isinstance(follower, Follower) or lacks_drafter(parts.bundle):
        raise needs_drafter(method, "a drafter", "--drafter")
    return follower


def needs_drafter(method: str, needed: str, flag: str) -> OptionError:
    """The error of a method without the graph that it drafts with."""
    return OptionError(
        f"{method} needs {needed}; export with {flag}, and do not pass "
        "--drafter-provider off",
        "method",
    )


def lacks_drafter(bundle: Bundle) -> str:
    """What an export must add to a bundle for a drafter; "" if nothing."""
    entry = bundle.drafter
    is_model = entry is not None and entry.contract.stands_alone
    return "" if is_model else "export with --drafter"


def drafting(
    parts: Parts, options: DraftOptions, follower: LevelFollower, name: str
) -> Proposer:
    """The proposer of a method of that name; raises `OptionError`."""
    ms = parts.curve.drafter
    if not options.branched:
        stopping = draft_stop(options.stopping, options.stop_threshold, parts)
        return DraftProposer(follower, ms, stopping, name)
    check_trees(parts.target, follower.graph)
    return TreeProposer(follower, options.shape, options.kind, ms, name)


def _make(parts: Parts, options: DraftOptions) -> Proposer:
    return drafting(parts, options, drafter_of(parts, NAME), NAME)


SAMPLES = ({"tree": "best"}, {"tree": "heap"}, {"tree": "comb"})
"""Options that `jetdraft check` tries beside the defaults."""

METHOD = Method(
    NAME,
    "the drafter",
    _make,
    DraftOptions,
    lacks=lacks_drafter,
    trees=True,
    cost="drafter",
    samples=SAMPLES,
    alone={},
)
