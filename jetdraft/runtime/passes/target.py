"""What a generation needs of a target, however many graphs it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jetdraft.contracts.step_contract import StepContract
from jetdraft.runtime.drafts.rows import NO_PROBING, Probing, Rows, Tokens
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.buffers import Cache


class EarlyStop(Exception):  # noqa: N818  # nothing went wrong
    """Raised by `Target.verify` to end the text before its next token."""


class Target(Protocol):
    """Runs passes over its cache and commits the rows that were right."""

    contract: StepContract

    @property
    def seconds(self) -> float: ...

    @property
    def passes(self) -> int: ...

    @property
    def cache(self) -> Cache: ...

    def run(self, tokens: Tokens, last_only: bool = False, width: int = 0) -> Answer:
        """Run one pass over a chain of tokens at the cursor, which does not move.

        With `last_only` it answers for the last row alone; padding up to the `width`
        repeats the last token.
        """
        ...

    def verify(
        self, rows: Rows, width: int, probing: Probing = NO_PROBING
    ) -> tuple[Rows, Answer]:
        """Run a draft in a pass of that width, and probes beside it.

        Returns the rows that were run, maybe a part of the draft, and their answer.
        Raises `EarlyStop` to end the text.
        """
        ...

    def commit(self, path: Sequence[int], exact: bool) -> int:
        """Commit the rows of a path of the last pass; returns how many.

        An `exact` commit ends where the path leaves a gap in the buffer; an inexact
        commit closes the gaps by moving the rows after them.
        """
        ...
