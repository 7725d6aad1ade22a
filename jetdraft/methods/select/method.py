"""Drafting with the target itself over selected KV rows (TokenSelect, 2411.02886)."""

from collections.abc import Sequence

from jetdraft.contracts.step_contract import Reading
from jetdraft.devices.providers import SELECTION, check_on_cpu
from jetdraft.runtime.drafts.rows import Kind, Rows, Tokens
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Traits
from jetdraft.runtime.sampling.chooser import Chooser, Sampling

NAME = "select"


class SelectProposer(Proposer):
    """Drafts chains in the target's buffers, which the verifying pass overwrites."""

    def __init__(self, graph: Graph, ms_per_token: float = 0.0) -> None:
        self.graph, widest = graph, graph.contract.max_width - 1
        self.traits = Traits(NAME, widest, Kind.COUPLED, ms_per_token=ms_per_token)
        self._chooser = Chooser(Sampling())

    @property
    def session_seconds(self) -> float:
        return self.graph.seconds

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        self.graph.prepare(exact=False, reading=Reading.SELECTED)
        self._chooser = chooser

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        cache, tokens = self.graph.cache, [context[-1]]
        committed = cache.length
        try:
            answer = self._run_pass(context[committed:])
            while True:
                position = len(context) + len(tokens) - 1
                tokens.append(self._chooser.choose(answer, [position])[0])
                if len(tokens) > budget or not cache.room:
                    break
                answer = self._run_pass(tokens[-1:])
        finally:
            cache.rewind(committed)
        return Rows.chain(tokens, self.traits.kind)

    def _run_pass(self, tokens: Sequence[int]) -> Answer:
        answer = self.graph.run(tokens, last_only=True)
        self.graph.cache.advance(len(tokens))
        return answer


def _make_proposer(loaded: LoadedBundle, options: MethodOptions) -> Proposer:
    check_on_cpu(SELECTION, loaded.provider, "choose --provider cpu", "method")
    return SelectProposer(loaded.target.make_selecting(), loaded.curve.pass_ms(1))


METHOD = Method(
    NAME,
    "the target itself, which reads selected KV rows only",
    _make_proposer,
    lacks=lambda b: "" if b.target.selection else "export with --select-kv",
    fills_target=True,
    # The curve is measured over few rows, where a draft costs as much as a plain pass.
    in_auto=lambda options: False,
)
