"""The round: propose, verify, commit. No method is known by name here.

The public sequence, prompt and committed tokens, is the source of truth. Before each
round the target's cache holds all of it but the last token, the root.

    propose   the controller asks a proposer for rows below the root
    verify    one target pass over root and draft; every row gets one chosen token
    commit    walk from the root to the child that carries the chosen token, as far as
              it goes; commit that path and the last chosen token

Invariants: the cursor is always the length of the sequence minus one; a pass never
reaches past the buffer; whatever was drafted, the chosen tokens are those that plain
decoding would have chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jetdraft.runtime.controller import Controller
from jetdraft.runtime.graph import Answer, Graph
from jetdraft.runtime.proposers import Proposer
from jetdraft.runtime.rows import Int64s, Rows
from jetdraft.runtime.sampling import Chooser
from jetdraft.runtime.stats import Round, Stats


@dataclass(frozen=True)
class Commit:
    """Tokens that one round added; the first `accepted` of them came from a draft."""

    token_ids: list[int]
    accepted: int


class Generator:
    """Decodes one sequence at a time over a target graph.

    `widths` are the pass widths it may use, ascending: one exact class, or all.

        for commit in Generator(target, widths, proposers).run(prompt, chooser, ...):
            ...
    """

    def __init__(
        self, target: Graph, widths: Sequence[int], proposers: Sequence[Proposer]
    ) -> None:
        self.target = target
        self.widths = sorted(widths)
        self.proposers = proposers
        self._prefilled = 0.0

    def run(
        self,
        prompt: Int64s,
        chooser: Chooser,
        controller: Controller,
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        stats: Stats,
    ) -> Iterator[Commit]:
        """Yield what each round commits, until a limit or an end-of-text token.

        `prompt` is int64 [length], at least one token; `stats` is filled as it goes.
        """
        start = time.perf_counter()
        capacity = self.target.cache.capacity
        sequence = np.zeros(capacity, np.int64)
        length = len(prompt)
        sequence[:length] = prompt
        # Even the last pass has room for the narrowest width.
        limit = min(capacity, capacity + 2 - self.widths[0], length + max_new_tokens)
        for proposer in self.proposers:
            proposer.begin(prompt, chooser)
        self._prefill(prompt)
        stats.finish_reason = "length"
        while length < limit and stats.finish_reason != "stop":
            round_, committed = self._round(
                sequence[:length], limit, controller, chooser
            )
            kept = _until_stop(committed[: limit - length], eos_token_ids)
            sequence[length : length + len(kept)] = kept
            length += len(kept)
            self._finish(stats, round_, kept, start, eos_token_ids)
            yield Commit(kept, min(round_.accepted, len(kept)))

    def _finish(
        self,
        stats: Stats,
        round_: Round,
        kept: list[int],
        start: float,
        eos_token_ids: Sequence[int],
    ) -> None:
        stats.add(round_, len(kept))
        elapsed = time.perf_counter() - start - stats.waited_seconds
        if stats.target_passes == 1:
            # Prefill and the first round are not decoding.
            stats.time_to_first_token = elapsed
            stats.first_tokens = len(kept)
            stats.generations = 1
            self._prefilled = self._session_seconds()
        stats.session_seconds = self._session_seconds() - self._prefilled
        stats.decode_seconds = elapsed - stats.time_to_first_token
        if kept[-1] in eos_token_ids:
            stats.finish_reason = "stop"

    def _prefill(self, prompt: Int64s) -> None:
        """Put all but the last prompt token into the cache, in wide passes."""
        cache = self.target.cache
        cache.rewind(0)
        while cache.length < len(prompt) - 1:
            width = min(self.target.contract.max_width, len(prompt) - 1 - cache.length)
            self.target.run(prompt[cache.length : cache.length + width], last_only=True)
            cache.advance(width)

    def _round(
        self, context: Int64s, limit: int, controller: Controller, chooser: Chooser
    ) -> tuple[Round, list[int]]:
        """One round after `context`; the committed tokens may exceed `limit`."""
        started = time.perf_counter()
        offers: dict[Proposer, Rows] = {}
        method, rows = self._propose(context, limit, controller, offers)
        draft_seconds, before = time.perf_counter() - started, self.target.seconds
        answer = self._verify(rows)
        positions = [len(context) + depth for depth in rows.depths]
        chosen = chooser.choose(answer, positions).tolist()
        path = rows.walk(chosen)
        # Each accepted token is the one chosen before it.
        committed = [chosen[row] for row in path]
        self.target.cache.advance(len(path))
        for proposer in offers:
            proposer.observe(committed)
        accepted = len(path) - 1
        round_ = Round(
            method=method,
            width=self._width(len(rows)),
            drafted=rows.drafted,
            evaluated=min(accepted + 1, rows.drafted),
            accepted=accepted,
            target_seconds=self.target.seconds - before,
            draft_seconds=draft_seconds,
        )
        controller.observe(round_)
        return round_, committed

    def _session_seconds(self) -> float:
        """Seconds inside `session.run` so far, of target and proposers."""
        return self.target.seconds + sum(p.session_seconds for p in self.proposers)

    def _propose(
        self,
        context: Int64s,
        limit: int,
        controller: Controller,
        offers: dict[Proposer, Rows],
    ) -> tuple[str, Rows]:
        """Ask until the plan is one that was offered, or to draft nothing.

        Gives the method's name and its rows; `offers` holds all that were asked.
        """
        # The new token takes the last place, so drafts may fill all but that.
        widest = max(w for w in self.widths if w <= self.target.cache.room)
        room = min(limit - len(context), widest) - 1
        while room > 0:
            plan = controller.plan(room, {p: r.drafted for p, r in offers.items()})
            proposer = plan.proposer
            if proposer is None:
                break
            if proposer not in offers:
                offers[proposer] = proposer.propose(context, plan.budget)
            # Whoever offers all that was planned need not be compared again.
            if offers[proposer].drafted >= plan.budget:
                return proposer.name, offers[proposer].first(plan.budget)
        return "none", Rows.chain([int(context[-1])])

    def _width(self, rows: int) -> int:
        """The narrowest allowed pass that holds the rows."""
        return next(width for width in self.widths if width >= rows)

    def _verify(self, rows: Rows) -> Answer:
        """One pass; rows that only fill up the width repeat the last token."""
        if not rows.is_chain:
            raise ValueError(
                "the graph verifies chains; a branching draft needs a mask"
            )
        padding = self._width(len(rows)) - len(rows)
        answer = self.target.run(rows.tokens + rows.tokens[-1:] * padding)
        return answer.rows(slice(0, len(rows))) if padding else answer


def _until_stop(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Up to and including the first end-of-text token."""
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: index + 1]
    return tokens
