"""Drafting from a table of the tokens that follow two tokens (ADED, 2407.12021)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jetdraft.contracts.tensors import WIDEST
from jetdraft.runtime.drafts.rows import Rows, Tokens
from jetdraft.runtime.history.trigrams import WINDOW, Counts, TreeSearch, Trigrams
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Traits
from jetdraft.runtime.sampling.chooser import Chooser


@dataclass(frozen=True)
class TrigramOptions(MethodOptions):
    """`table` is a file that `jetdraft train trigram` wrote."""

    table: Path | None = None


class TrigramProposer(Proposer):
    """Drafts a chain or tree of the likeliest tokens; learns from each generation."""

    traits = Traits("trigram", max_draft_tokens=WIDEST - 1, branches=True)

    def __init__(self, trigrams: Trigrams) -> None:
        self.trigrams = trigrams
        self._search = TreeSearch(trigrams.successors)

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        for end in range(3, len(prompt), WINDOW - 3):
            self.trigrams.learn(prompt[max(0, end - WINDOW) : end])

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """Draft what the table has after the last two tokens; a tree if `parents`."""
        root = context[-1]
        if len(context) < 2:
            return Rows.chain([root])
        self.trigrams.learn(context[-WINDOW:])
        if parents is not None:
            tokens, tree_parents = self._search.run(context[-2], root, budget)
            return Rows([root, *tokens], [-1, *tree_parents]).depth_first()
        chain = [context[-2], root]
        while len(chain) < budget + 2:
            chances = self.trigrams.successors(chain[-2], chain[-1])
            if not chances:
                break
            chain.append(max(chances, key=lambda token: (chances[token], -token)))
        return Rows.chain(chain[1:])

    def forget(self) -> None:
        """Unlearn the trigrams of earlier generations; a corpus table stays."""
        self.trigrams.forget()


def _make_proposer(loaded: LoadedBundle, options: TrigramOptions) -> Proposer:
    counts = None
    if options.table is not None:
        vocabulary = loaded.bundle.target.contract.vocab_size
        counts = Counts.load(options.table, loaded.bundle.tokenizer_sha256, vocabulary)
    return TrigramProposer(Trigrams(counts))


METHOD = Method(
    "trigram",
    "a table of the tokens that follow two tokens, learned on the way",
    _make_proposer,
    TrigramOptions,
    in_auto=lambda options: options.table is not None,
    task="jetdraft.methods.trigram.task:command",
)
