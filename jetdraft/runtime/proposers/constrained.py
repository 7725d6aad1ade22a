"""Drafting where the text is constrained: some tokens must come, others may not."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.contracts.constants import WIDEST
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Tokens, Traits
from jetdraft.runtime.text.constraint import Matcher


class ForcedProposer(Proposer):
    """Drafts the tokens that a constraint leaves no choice about.

    ForcedProposer(matcher).propose(context, budget=8)   # after {"na: me":
    """

    traits = Traits("forced", max_draft_tokens=WIDEST - 1)

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """The tokens that must come next, if any must."""
        return Rows.chain([context[-1], *self._matcher.forced(context, budget)])


class ConstrainedProposer(Proposer):
    """Drafts forced tokens first, then the rows of `inner` that the constraint allows.

    Only the walk can verify such drafts: they are no longer draws of the drafter's
    distribution. `inner` itself observes the generation.
    """

    def __init__(self, inner: Proposer, matcher: Matcher) -> None:
        self._inner, self._matcher, self.traits = inner, matcher, inner.traits

    @property
    def session_seconds(self) -> float:
        """The inner proposer's time inside `session.run`."""
        return self._inner.session_seconds

    def keep(self, kept: int) -> int:
        """As the inner proposer says."""
        return self._inner.keep(kept)

    def catch_up(self, context: Tokens) -> None:
        """Let the inner proposer catch up."""
        self._inner.catch_up(context)

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """The forced tokens, and below them the inner rows that may come."""
        forced, self.evidence = self._matcher.forced(context, budget), 0
        if len(forced) == budget:
            return Rows.chain([context[-1], *forced], self.traits.kind)
        if forced:
            rows = self._inner.propose([*context, *forced], budget - len(forced))
            rows = rows.under([context[-1], *forced[:-1]])
        else:
            rows = self._inner.propose(context, budget, parents)
            self.evidence = self._inner.evidence
        return self._matcher.allowed(rows, context)


def constrained(proposers: Sequence[Proposer], matcher: Matcher) -> list[Proposer]:
    """The proposers of a generation with a constraint."""
    if not proposers:
        return []
    wrapped = [ConstrainedProposer(inner, matcher) for inner in proposers]
    return [*wrapped, ForcedProposer(matcher)]
