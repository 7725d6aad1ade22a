"""A target whose lower half runs ahead of its upper half (Kangaroo, 2404.18911).

Something is drafted from the states that leave the lower half. Its keys and values lie
in the target's own buffers; the upper half takes up the states when rows are verified:

    the upper half's cursor   the committed rows, as in any target
    the lower half's cursor   the committed rows, and the rows that it ran ahead

With a head that decides after the lower half (SEC, 2401.09964), each row gets the
decision of its own state, so a text does not depend on what was drafted. All widths of
passes agree bit by bit, so a row has the same bits alone and among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jetdraft.contracts.tensors import Float32s
from jetdraft.runtime.drafts.rows import NO_PROBES, NO_PROBING, Probing, Rows, Tokens
from jetdraft.runtime.passes.answer import Answer, EarlyStop
from jetdraft.runtime.passes.buffers import Cache
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.prefix import common_length
from jetdraft.runtime.passes.split.exit_head import Decision, ExitRule
from jetdraft.runtime.passes.split.halves import Halves, PlacedRows, SplitSessions


class LeadingHalf:
    """A `Target` over the buffers of the target `whole`, which reads prompts for it.

    `ahead` has the tokens of the rows that only the lower half has run.
    """

    def __init__(self, whole: Graph, sessions: SplitSessions) -> None:
        self.whole = whole
        self.contract = whole.contract
        buffers, lower = whole.cache.buffers, sessions.contract.lower
        below = {spec.name: buffers[spec.name] for spec in lower.buffers("past")}
        # The upper half counts its layers from 0.
        first, above = len(lower.kv_shapes), {}
        for name in buffers.keys() - below.keys():
            kind, layer = name.split(".")
            above[f"{kind}.{int(layer) - first}"] = buffers[name]
        self.halves = Halves(sessions, below, above)
        self.widths: Sequence[int] = ()
        self.rule: ExitRule | None = None
        self.ahead: list[int] = []
        self._states = np.zeros((0, sessions.contract.hidden_size), np.float32)
        self._base = 0
        """How many rows of the last `lead` are not committed."""
        self._is_first = True
        """Whether no round of this generation has been verified yet."""

    @property
    def cache(self) -> Cache:
        """The buffers of both halves, with the upper half's cursor."""
        return self.whole.cache

    @property
    def seconds(self) -> float:
        return self.whole.seconds + self.halves.seconds

    @property
    def passes(self) -> int:
        return self.whole.passes + self.halves.passes

    def prepare(self, widths: Sequence[int], rule: ExitRule | None = None) -> None:
        """Begin a generation with these widths; a `rule` may skip the upper half."""
        self.widths, self.rule, self._is_first = sorted(widths), rule, True
        self._keep_ahead(0)

    def run(self, tokens: Tokens, last_only: bool = False, width: int = 0) -> Answer:
        self._keep_ahead(0)
        return self.whole.run(tokens, last_only, width)

    def lead(self, text: Tokens) -> Float32s | None:
        """Run the lower half over the rows of `text` that are not committed yet.

        Returns the states [n, h] that leave it, or None if the rows do not fit. The
        text begins with the committed tokens.
        """
        rows = Rows.chain(list(text[self.cache.length :]))
        self._keep_ahead(common_length(self.ahead, rows.tokens))
        self._base = len(rows)
        return self._run_ahead(rows)

    def branch(self, rows: PlacedRows) -> Float32s:
        """Run a draft's rows after the last `lead`; the lower half's states [n, h].

        A row that continues the rows ahead stays; others run again when verified.
        """
        cursor, count = self.cache.length + self._base, len(rows.tokens)
        chain = list(range(rows.filled))
        goes_on = count == 1 and list(rows.ancestors[0]) == chain
        width = self._fitting_width(count, self._base + rows.filled)
        bound = self.halves.run_lower(rows, width or count, cursor)
        states = bound.arrays["hidden"][0, :count].astype(np.float32)
        if goes_on and width and len(self.ahead) == self._base + rows.filled:
            self._append_ahead(rows.tokens, states)
        return states

    def verify(
        self, rows: Rows, width: int, probing: Probing = NO_PROBING
    ) -> tuple[Rows, Answer]:
        rows.check()
        self._keep_ahead(self._count_shared(rows))
        leads = (self.ahead or self.rule) and not probing.streams
        states = self._run_ahead(rows) if leads else None
        if states is None:
            self._keep_ahead(0)
            return self.whole.verify(rows, width, probing)
        if self.rule is not None:
            return self._verify_by_rule(rows, states, self.rule)
        return rows, self._run_upper(rows, states, width)

    def _verify_by_rule(
        self, rows: Rows, states: Float32s, rule: ExitRule
    ) -> tuple[Rows, Answer]:
        """Verify a draft up to the first row whose decision is not the root's.

        `states` [n, h] leave the lower half. By the root's decision the kept rows run
        the upper half or skip it. Returns those rows and their answer; raises
        `EarlyStop` if the decision is to stop.
        """
        decisions = rule.decide(states)
        if self._is_first:
            decisions[0] = Decision.CONTINUE
        self._is_first, decision = False, decisions[0]
        if decision == Decision.STOP:
            raise EarlyStop
        kept = next((i for i, d in enumerate(decisions) if d != decision), len(rows))
        rows, states = rows.only(list(range(kept))), states[:kept]
        width = next(width for width in self.widths if kept <= width)
        if decision == Decision.CONTINUE:
            return rows, self._run_upper(rows, states, width)
        leaving, at = rule.head.exit_states(states), self.cache.length
        answer = self.halves.run_exit(PlacedRows.of(rows), states, leaving, width, at)
        layers = len(self.halves.contract.upper.kv_shapes)
        answer = replace(answer.first(kept), features=states, skipped_layers=layers)
        return rows, answer

    def _run_upper(self, rows: Rows, states: Float32s, width: int) -> Answer:
        """Run the upper half over rows with the lower half's `states`; their answer."""
        size = (width, width, NO_PROBES)
        answer = self.halves.run_upper(
            PlacedRows.of(rows), states, size, self.cache.length
        )
        return replace(answer.first(len(rows)), features=states)

    def commit(self, path: Sequence[int], exact: bool) -> int:
        """Commit the rows of a path, see `Target.commit`; no rows are ahead then."""
        self._keep_ahead(0)
        return self.whole.commit(path, exact)

    def _count_shared(self, rows: Rows) -> int:
        """How many rows at the beginning of a draft the lower half has run."""
        same = common_length(self.ahead, rows.tokens)
        return common_length(rows.parents[:same], range(-1, same - 1))

    def _keep_ahead(self, count: int) -> None:
        """Keep only the first `count` rows that ran ahead, and their states."""
        del self.ahead[count:]
        self._states = self._states[:count]

    def _append_ahead(self, tokens: Tokens, states: Float32s) -> None:
        """Add rows that ran ahead, and their states [n, h]."""
        self.ahead += tokens
        self._states = np.concatenate([self._states, states])

    def _fitting_width(self, rows: int, filled: int) -> int | None:
        """The narrowest allowed width that holds the rows; None if too wide."""
        room = self.whole.draft_room(filled)
        return next((w for w in self.widths if rows <= w <= room), None)

    def _run_ahead(self, rows: Rows) -> Float32s | None:
        """Run the lower half over all rows; states [n, h], or None without room."""
        while (first := len(self.ahead)) < len(rows):
            end = min(len(rows), first + self.widths[-1])
            width = self._fitting_width(end - first, first)
            if width is None:
                return None
            part = PlacedRows.of(rows, first, end)
            bound = self.halves.run_lower(part, width, self.cache.length)
            self._append_ahead(part.tokens, bound.arrays["hidden"][0, : end - first])
        return self._states
