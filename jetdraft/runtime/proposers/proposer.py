"""The interface that every proposer has; the generator knows nothing else of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.graph import Answer
from jetdraft.runtime.sampling.chooser import Chooser


class Proposer(Protocol):
    """Guesses how a sequence goes on. A wrong guess costs time, never text.

    `name` is the method's name, `kind` how its drafts come about, `max_draft_tokens`
    the longest draft it can make, `ms_per_token` a first guess of a drafted token's
    time, and `session_seconds` its time inside `session.run` so far. One that reads its
    drafts off the target's probes says how many `streams` a row can carry, others 0.
    `branches` says whether it drafts trees for the asking.
    """

    name: str
    kind: Kind
    max_draft_tokens: int
    ms_per_token: float
    streams: int
    branches: bool

    @property
    def session_seconds(self) -> float: ...

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """A new generation: forget the last one. `chooser` is the target's own."""
        ...

    def propose(
        self,
        context: Sequence[int],
        budget: int,
        parents: Sequence[int] | None = None,
    ) -> Rows:
        """At most `budget` >= 1 rows below the root, `context[-1]`.

        `parents`, which only one that `branches` is given, says how: see `Static`.

        `context` is the public sequence, prompt and committed tokens; it may end with
        some that are not proven yet and can still be withdrawn. Only the root comes
        back where there is nothing to propose.
        """
        ...

    def observe(self, length: int, answer: Answer, row: int) -> None:
        """A round has ended, whoever proposed; the next context has `length` tokens.

        `answer` is the target's for its rows, valid until its next pass, and `row` the
        last accepted one, whose chosen token ends that context.
        """
        ...


class ModelFree:
    """What proposers without a model share: drafts cost nothing to speak of, and all
    they know is the context.

        class RecallProposer(ModelFree): ...
    """

    kind = Kind.DETERMINISTIC
    session_seconds = 0.0
    ms_per_token = 0.0
    streams = 0
    branches = False

    def observe(self, length: int, answer: Answer, row: int) -> None:
        """Nothing to learn."""
