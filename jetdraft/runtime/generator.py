"""The round: propose, verify, commit. No method is known by name here.

The public sequence, prompt and committed tokens, is the source of truth. Before each
round the target's cache holds all of it but the last token, the root.

    propose   the controller asks a proposer for rows below the root
    verify    one target pass over root and draft; every row gets one chosen token
    commit    walk from the root to the child that carries the chosen token, as far as
              it goes; commit that path and the last chosen token

In an exact generation a branch only counts as far as it lies without gaps in the
buffer. A row beyond a gap sums its attention in another order than plain decoding does,
so its choice is a good guess but no proof: what it chose is carried into the next pass,
as the beginning of its draft, and committed there. Otherwise the branch is compacted.

Invariants: the cursor is always the length of the sequence minus one; a pass never
reaches past the buffer; whatever was drafted, the chosen tokens are those that plain
decoding would have chosen.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jetdraft.runtime.drafts.probes import Probing
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.measured.stats import Round, Stats
from jetdraft.runtime.passes.graph import Answer, Graph
from jetdraft.runtime.passes.halves import PrunedGraph
from jetdraft.runtime.passes.prefix import Prefix
from jetdraft.runtime.planning.controller import Controller
from jetdraft.runtime.proposers import Proposer
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.sampling.logprobs import Logprob
from jetdraft.runtime.sampling.verifiers import Verifier, Walk
from jetdraft.runtime.text.stops import StopWatcher


@dataclass(frozen=True)
class Commit:
    """Tokens that one round added; the first `accepted` of them had been drafted.

    `logprobs` has one for each token where they were asked for.
    """

    token_ids: list[int]
    accepted: int
    logprobs: list[Logprob] = field(default_factory=list)


class Generator:
    """Decodes one sequence at a time over a target graph.

    `widths` are the pass widths it may use, ascending: one exact class, or all. An
    `exact` generation commits no token that plain decoding in that class might not.
    With `logprobs` every token comes with its own and those of so many others. A
    `prefix` knows which rows need not be read again, and `prefills` are the widths to
    read a prompt in, widest first, where any other would give other bits.

        for commit in Generator(target, widths, proposers).run(prompt, chooser, ...):
            ...
    """

    def __init__(
        self,
        target: Graph | PrunedGraph,
        widths: Sequence[int],
        proposers: Sequence[Proposer],
        verifier: Verifier | None = None,
        exact: bool = True,
        logprobs: int | None = None,
        prefix: Prefix | None = None,
        prefills: Sequence[int] = (),
    ) -> None:
        self.logprobs = logprobs
        self.prefix = prefix or Prefix(target)
        self.prefills = prefills
        self.target = target
        self.widths = sorted(widths)
        self.proposers = proposers
        self.verifier = verifier or Walk()
        self.exact = exact
        self._prefilled = 0.0
        self._carried: list[int] = []

    def run(
        self,
        prompt: Sequence[int],
        chooser: Chooser,
        controller: Controller,
        max_new_tokens: int,
        ending: StopWatcher,
        stats: Stats,
    ) -> Iterator[Commit]:
        """Yield what each round commits, until a limit or the end.

        `prompt` has at least one token; `stats` is filled as it goes.
        """
        start = time.perf_counter()
        capacity = self.target.cache.capacity
        sequence = array("I", prompt)
        # Even the last pass has room for the narrowest width.
        room = capacity + 2 - self.widths[0]
        limit = min(capacity, room, len(prompt) + max_new_tokens)
        for proposer in self.proposers:
            proposer.begin(prompt, chooser)
        self._carried = []
        stats.finish_reason = "length"
        stats.reused_tokens = self.prefix.keep(prompt, self.exact)
        try:
            self._prefill(prompt, stats.reused_tokens, ending)
            yield from self._decode(
                sequence, limit, controller, chooser, ending, stats, start
            )
        finally:
            self.prefix.hold(sequence, self.exact)
            self.target.probing = Probing()
        stats.finish_reason = ending.reason or "length"

    def _decode(
        self,
        sequence: array[int],
        limit: int,
        controller: Controller,
        chooser: Chooser,
        ending: StopWatcher,
        stats: Stats,
        start: float,
    ) -> Iterator[Commit]:
        """Round after round; `sequence` grows by what each commits."""
        while len(sequence) < limit and not (ending.reason or ending.interrupted()):
            round_, found = self._round(sequence, limit, controller, chooser)
            kept = ending.keep(found.token_ids[: limit - len(sequence)])
            count = len(kept)
            sequence.extend(kept)
            self._finish(stats, round_, count, start)
            yield Commit(kept, min(found.accepted, count), found.logprobs[:count])

    def _finish(
        self,
        stats: Stats,
        round_: Round,
        kept: int,
        start: float,
    ) -> None:
        stats.add(round_, kept)
        elapsed = time.perf_counter() - start - stats.waited_seconds
        if stats.target_passes == 1:
            # Prefill and the first round are not decoding.
            stats.time_to_first_token = elapsed
            stats.first_tokens = kept
            stats.generations = 1
            self._prefilled = self._session_seconds()
        stats.session_seconds = self._session_seconds() - self._prefilled
        stats.decode_seconds = elapsed - stats.time_to_first_token

    def _prefill(self, prompt: Sequence[int], kept: int, ending: StopWatcher) -> None:
        """Put all but the last prompt token into the cache, in wide passes."""
        cache = self.target.cache
        cache.rewind(kept)
        while cache.length < len(prompt) - 1 and not ending.interrupted():
            rest = len(prompt) - 1 - cache.length
            width = self._prefill_width(rest)
            tokens = prompt[cache.length : cache.length + min(rest, width)]
            self.target.run(tokens, last_only=True, width=width)
            cache.advance(len(tokens))

    def _prefill_width(self, rest: int) -> int:
        """How wide the next pass over so many tokens of a prompt is."""
        if not self.prefills:
            return min(self.target.contract.max_width, rest)
        wide = next((width for width in self.prefills if width <= rest), None)
        if wide is not None:
            return wide
        width = self._width(min(rest, self.widths[-1]))
        if width <= self.target.cache.room:
            return width
        # What would fill it up has no room: the widest that has, or as it comes.
        fitting = [width for width in self.widths if width <= self.target.cache.room]
        return fitting[-1] if fitting else rest

    def _round(
        self,
        context: Sequence[int],
        limit: int,
        controller: Controller,
        chooser: Chooser,
    ) -> tuple[Round, Commit]:
        """One round after `context`; the committed tokens may exceed `limit`."""
        started = time.perf_counter()
        offers: dict[Proposer, Rows] = {}
        spent: dict[Proposer, float] = {}
        method, rows = self._propose(context, limit, controller, offers, spent)
        draft_seconds, before = time.perf_counter() - started, self.target.seconds
        carried = len(self._carried)
        whole = self._with_carried(context, rows)
        whole, answer = self.target.verify(whole, self._width(len(whole)))
        positions = [len(context) + depth for depth in whole.depths]
        shaped = chooser.process(answer, whole, context)
        chosen = self.verifier.choose(whole, shaped, positions, chooser)
        path = whole.walk(chosen)
        # Each accepted token is the one chosen before it.
        tokens = [chosen[row] for row in path]
        logprobs = self._logprobs(answer, path, tokens)
        proven = self.target.commit(path, self.exact)
        committed, self._carried = tokens[:proven], tokens[proven:]
        for proposer in self.proposers:
            proposer.observe(len(context) + len(tokens), answer, path[-1])
        round_ = Round(
            method=method,
            width=self._width(len(whole)),
            drafted=rows.drafted,
            # Nothing was drafted below what was carried in vain.
            ranks=whole.ranks(path)[carried:],
            target_seconds=self.target.seconds - before,
            draft_seconds=draft_seconds,
            probes=answer.probes,
            off="" if rows.drafted else self._why_off(limit - len(context), offers),
            asked={p.name: (offers[p].drafted, spent[p]) for p in offers},
        )
        controller.observe(round_)
        return round_, Commit(committed, len(path) - 1, logprobs)

    def _logprobs(
        self, answer: Answer, path: Sequence[int], tokens: Sequence[int]
    ) -> list[Logprob]:
        """Those of the tokens chosen along a path, as the model alone has them."""
        if self.logprobs is None:
            return []
        return [
            Logprob.of(answer, row, token, self.logprobs)
            for row, token in zip(path, tokens, strict=True)
        ]

    def _why_off(self, room: int, offers: dict[Proposer, Rows]) -> str:
        """Why a round had no draft."""
        if not self.proposers:
            return "no method was asked for"
        if room <= 1:
            return "the answer was at its end, or the buffers full"
        if self.widths[-1] == 1:
            return "no wider pass is exact here; --no-exact can draft"
        if offers and not any(rows.drafted for rows in offers.values()):
            return "nothing was proposed"
        return "a draft would not pay"

    def _session_seconds(self) -> float:
        """Seconds inside `session.run` so far, of target and proposers."""
        own = self.target.seconds + self.target.cache.seconds
        return own + sum(p.session_seconds for p in self.proposers)

    def _propose(
        self,
        context: Sequence[int],
        limit: int,
        controller: Controller,
        offers: dict[Proposer, Rows],
        spent: dict[Proposer, float],
    ) -> tuple[str, Rows]:
        """Ask until the plan is one that was offered, or to draft nothing.

        Gives the method's name and its rows; `offers` holds what all came up with that
        were asked, `spent` their seconds.
        """
        # The new token takes the last place, so drafts may fill all but that.
        self.target.probing = Probing()
        widest = self.widths[bisect_right(self.widths, self.target.cache.room) - 1]
        room = min(limit - len(context), widest) - 1
        del self._carried[max(room, 0) :]
        room -= len(self._carried)
        if self._carried:
            context = array("I", [*context, *self._carried])
        while room > 0:
            plan = controller.plan(room, {p: r.drafted for p, r in offers.items()})
            proposer, self.target.probing = plan.proposer, plan.probing
            if proposer is None:
                break
            if proposer not in offers:
                how = plan.parents
                before = time.perf_counter()
                offers[proposer] = proposer.propose(context, plan.budget, how)
                spent[proposer] = time.perf_counter() - before
            # Whoever offers all that was planned need not be compared again.
            if offers[proposer].drafted >= plan.budget:
                return proposer.name, offers[proposer].first(plan.budget)
        return "none", Rows.chain([context[-1]])

    def _width(self, rows: int) -> int:
        """The narrowest allowed pass that holds the rows."""
        return self.widths[bisect_left(self.widths, rows)]

    def _with_carried(self, context: Sequence[int], rows: Rows) -> Rows:
        """The draft below what the last pass left to be proven."""
        if not self._carried:
            return rows
        return rows.under([context[-1], *self._carried[:-1]])
