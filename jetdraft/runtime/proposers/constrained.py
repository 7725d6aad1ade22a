"""Drafting where the text is constrained: what must come is known without guessing."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.contract import WIDEST
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.graph import Answer
from jetdraft.runtime.proposers.proposer import ModelFree, Proposer
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.text.matcher import Matcher


class ForcedProposer(ModelFree):
    """Drafts the tokens that a constraint leaves no choice about.

    ForcedProposer(matcher).propose(context, budget=8)   # after {"na: me":
    """

    name = "forced"
    max_draft_tokens = WIDEST - 1

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Nothing to forget: the matcher belongs to one generation."""

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """What must come next, if anything must."""
        return Rows.chain([context[-1], *self._matcher.forced(context, budget)])


class ConstrainedProposer:
    """Another proposer, `inner`, behind what must come and within what may come.

    Only the walk can verify such drafts: they are no longer draws of the drafter's.

        ConstrainedProposer(DraftProposer(follower), matcher).propose(context, 4)
    """

    def __init__(self, inner: Proposer, matcher: Matcher) -> None:
        self._inner, self._matcher = inner, matcher
        self.name, self.kind = inner.name, inner.kind
        self.max_draft_tokens = inner.max_draft_tokens
        self.ms_per_token = inner.ms_per_token
        self.streams, self.branches = inner.streams, inner.branches

    @property
    def session_seconds(self) -> float:
        """Those of the inner one."""
        return self._inner.session_seconds

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """A new generation."""
        self._inner.begin(prompt, chooser)

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """What must come, and below it the inner proposer's rows that may."""
        forced = self._matcher.forced(context, budget)
        if len(forced) == budget:
            return Rows.chain([context[-1], *forced], self.kind)
        if forced:
            rows = self._inner.propose([*context, *forced], budget - len(forced))
            rows = rows.under([context[-1], *forced[:-1]])
        else:
            rows = self._inner.propose(context, budget, parents)
        return self._matcher.allowed(rows, context)

    def observe(self, length: int, answer: Answer, row: int) -> None:
        """A round has ended."""
        self._inner.observe(length, answer, row)


def constrained(
    proposers: dict[str, Proposer], matcher: Matcher
) -> dict[str, Proposer]:
    """The proposers of a generation whose text is constrained."""
    if not proposers:
        return proposers
    found: dict[str, Proposer] = {
        name: ConstrainedProposer(inner, matcher) for name, inner in proposers.items()
    }
    return {**found, ForcedProposer.name: ForcedProposer(matcher)}
