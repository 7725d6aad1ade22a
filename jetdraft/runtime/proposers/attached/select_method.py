"""Drafting with the target itself over selected KV rows (TokenSelect, 2411.02886).

A draft reads a part of the rows, the pass that verifies reads all. Weights and buffers
are the target's own. It gains where reading the rows takes longer than the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.bundle import Bundle
from jetdraft.contracts.selection import Reading
from jetdraft.devices.providers import SELECTION, cpu_only
from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.cache import Cache
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Tokens, Traits
from jetdraft.runtime.sampling.chooser import Chooser, Sampling


class SelectingFollower:
    """Drafts over the target's own buffers, with the selected rows only.

    It writes drafted rows past the committed rows, and the pass that verifies a draft
    overwrites them. So this follower never lags behind the target.

        follower = SelectingFollower(target.beside())
        follower.follow(context)
        follower.end()    # before the target verifies
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._committed = 0

    @property
    def _cache(self) -> Cache:
        return self.graph.cache

    def begin(self) -> None:
        """Start a new sequence, whose rows are selected anew."""
        self.graph.prepare(exact=False, reading=Reading.SELECTED)

    def follow(self, context: Sequence[int]) -> Answer:
        """The answer for the last row of `context`, over the committed rows."""
        self._committed = self._cache.length
        return self._run(context[self._committed :])

    def step(self, token: int) -> Answer | None:
        """The answer for a drafted token; None at the end of the buffers."""
        return self._run([token]) if self._cache.room else None

    def end(self) -> None:
        """Take the drafted rows back."""
        self._cache.rewind(self._committed)

    def _run(self, tokens: Sequence[int]) -> Answer:
        answer = self.graph.run(tokens, last_only=True)
        self._cache.advance(len(tokens))
        return answer


NAME = "select"


class SelectProposer(Proposer):
    """Drafts chains, and chooses with the target's noise.

    SelectProposer(SelectingFollower(target.beside())).propose([5, 8, 9], budget=3)
    """

    def __init__(self, follower: SelectingFollower, ms_per_token: float = 0.0) -> None:
        self.graph, self._follower = follower.graph, follower
        widest = self.graph.contract.max_width - 1
        self.traits = Traits(NAME, widest, Kind.COUPLED, ms_per_token=ms_per_token)
        self._chooser = Chooser(Sampling())

    @property
    def session_seconds(self) -> float:
        """The seconds inside `session.run` of its passes."""
        return self.graph.seconds

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Select rows anew."""
        self._follower.begin()
        self._chooser = chooser

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """Draft token by token, over the rows that the target has committed."""
        tokens, follower = [context[-1]], self._follower
        try:
            answer: Answer | None = follower.follow(context)
            while answer is not None:
                position = len(context) + len(tokens) - 1
                tokens.append(self._chooser.choose(answer, [position])[0])
                if len(tokens) > budget:
                    break
                answer = follower.step(tokens[-1])
        finally:
            follower.end()
        return Rows.chain(tokens, self.traits.kind)


def _lacks(bundle: Bundle) -> str:
    return "" if bundle.target.selection else "export with --select-kv"


def _make(parts: Parts, options: MethodOptions) -> Proposer:
    if _lacks(parts.bundle):
        raise OptionError(f"{NAME} needs selected KV rows; {_lacks(parts.bundle)}")
    if refusal := cpu_only(SELECTION, parts.provider, "choose --provider cpu"):
        raise OptionError(refusal, "method")
    ms = parts.curve.pass_ms(1)
    return SelectProposer(SelectingFollower(parts.target.beside()), ms)


METHOD = Method(
    NAME,
    "the target itself, which reads selected KV rows only",
    _make,
    lacks=_lacks,
    fills_target=True,
    # The curve is measured over few rows, where a draft costs as much as a plain pass.
    in_auto=lambda options: False,
)
