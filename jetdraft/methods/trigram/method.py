"""Drafting from a table of the tokens that follow two tokens (ADED, 2407.12021)."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.tensors import WIDEST
from jetdraft.errors import StoreError
from jetdraft.files import read_arrays, write_arrays
from jetdraft.runtime.drafts.rows import Rows, Tokens
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Traits
from jetdraft.runtime.sampling.chooser import Chooser

MAX_SUCCESSORS = 12  # Successors kept per pair, the most frequent first.
WINDOW = 16  # How many last tokens of the context a round learns from.
WEIGHT_STEP, MAX_WEIGHT = 0.04, 3.0
# The most pairs that decoding learns, half a kilobyte each, for each model and user.
MAX_LEARNED = 8192
C1, C2 = 32.0, 8.0  # The constants of `puct`: a larger C1 explores more.
ITERATIONS, DEPTH = 48, 4  # Of a search: its rollouts, and the levels of its tree.
Successors = Callable[[int, int], Mapping[int, float]]


@dataclass(frozen=True)
class Counts:
    """The trigrams of a corpus: `pairs` uint64 [n], ascending, 32 bits for each id.

    Pair i has the successors `tokens[offsets[i]:offsets[i + 1]]` (uint32, the most
    frequent first). Their float32 `weights` are shares of all tokens after the pair.
    """

    pairs: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.float32]

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]]) -> "Counts":
        """Count the trigrams of documents."""
        (pairs, tokens), times = _count_trigrams(documents)
        # The trigrams are sorted; a new pair starts at each place in `first`.
        first = np.flatnonzero(np.r_[True, np.diff(pairs) > 0])
        pair = np.repeat(np.arange(len(first)), np.diff(np.r_[first, len(times)]))
        shares = times / np.add.reduceat(times, first)[pair] if len(times) else times
        order = np.lexsort((-times, pair))  # by pair, the most frequent first
        kept_places = order[np.arange(len(order)) - first[pair] < MAX_SUCCESSORS]
        sizes = np.bincount(pair[kept_places], minlength=len(first))
        return cls(
            pairs=pairs[first] if len(times) else pairs,
            offsets=np.r_[0, np.cumsum(sizes)].astype(np.uint32),
            tokens=tokens[kept_places].astype(np.uint32),
            weights=shares[kept_places].astype(np.float32),
        )

    def successors(self, one: int, two: int) -> dict[int, float]:
        """The successors of a pair and their weights; empty for an unknown pair."""
        pair = np.uint64(one << 32 | two)
        place = int(np.searchsorted(self.pairs, pair))
        if place == len(self.pairs) or self.pairs[place] != pair:
            return {}
        part = slice(int(self.offsets[place]), int(self.offsets[place + 1]))
        tokens, weights = self.tokens[part].tolist(), self.weights[part].tolist()
        return dict(zip(tokens, weights, strict=True))

    def save(self, file: Path, tokenizer: str) -> None:
        """Write an npz with the hash of their `tokenizer`; raises `OutputError`."""
        write_arrays(file, {"tokenizer": np.array(tokenizer), **vars(self)})

    @classmethod
    def load(cls, file: Path, tokenizer: str, vocab_size: int) -> "Counts":
        """Read what `save` wrote; raise `StoreError` for another tokenizer's file."""
        fix = "give a file of jetdraft train trigram"
        refusal = StoreError(f"cannot read a table from {file}; {fix}")
        arrays = read_arrays(file, refusal)
        owner = str(arrays.pop("tokenizer", ""))
        if arrays.keys() != cls.__dataclass_fields__.keys():
            raise refusal
        if owner != tokenizer:
            fact = f"the table {file} belongs to another tokenizer"
            raise StoreError(f"{fact}; train a table for this bundle")
        counts = cls(**arrays)
        if not counts.is_whole(vocab_size):
            raise refusal
        return counts

    def is_whole(self, vocab_size: int) -> bool:
        """Whether the arrays fit each other and all tokens are in the vocabulary."""
        arrays = self.pairs, self.offsets, self.tokens, self.weights
        types = [(array.dtype.str, array.ndim) for array in arrays]
        if types != [("<u8", 1), ("<u4", 1), ("<u4", 1), ("<f4", 1)]:
            return False
        ends = self.offsets.astype(np.int64)
        return bool(
            len(ends) == len(self.pairs) + 1
            and (ends[0], ends[-1]) == (0, len(self.tokens))
            and len(self.weights) == len(self.tokens)
            and (np.diff(ends) > 0).all()
            and (self.pairs[1:] > self.pairs[:-1]).all()
            and (self.tokens < vocab_size).all()
            and np.isfinite(self.weights).all()
            and (self.weights > 0).all()
        )


def _count_trigrams(
    documents: Iterable[Sequence[int]],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
    """The distinct trigrams, uint64 [2, n] (pair and successor), and their counts."""
    empty = np.zeros(0, np.uint64)
    pairs, tokens = [empty], [empty]
    for document in documents:
        ids = np.asarray(document, np.uint64)
        pairs.append(ids[:-2] << np.uint64(32) | ids[1:-1])
        tokens.append(ids[2:])
    trigrams = np.stack([np.concatenate(pairs), np.concatenate(tokens)])
    trigrams = trigrams[:, np.lexsort((trigrams[1], trigrams[0]))]
    new = np.r_[True, np.any(np.diff(trigrams) != 0, axis=0)] if trigrams.size else []
    first = np.flatnonzero(new)
    counts = np.diff(np.r_[first, trigrams.shape[1]])
    return trigrams[:, first], counts.astype(np.float64)


class Trigrams:
    """The counts of a corpus, and what decoding adds to them."""

    def __init__(self, counts: Counts | None = None) -> None:
        self.counts = counts or Counts.of([])
        self._learned: dict[tuple[int, int], dict[int, float]] = {}

    def learn(self, context: Sequence[int]) -> None:
        """Add the trigrams at the end of a context; call it once per round."""
        last = context[-WINDOW:]
        for one, two, three in zip(last, last[1:], last[2:], strict=False):
            weights = self.successors(one, two)
            weights[three] = min(weights.get(three, 0.0) + WEIGHT_STEP, MAX_WEIGHT)
            if len(weights) > MAX_SUCCESSORS:
                others = (token for token in weights if token != three)
                del weights[min(others, key=weights.__getitem__)]
            self._learned.pop((one, two), None)  # the pair becomes the youngest
            self._learned[one, two] = weights
        while len(self._learned) > MAX_LEARNED:
            del self._learned[next(iter(self._learned))]

    def forget(self) -> None:
        """Drop what decoding added."""
        self._learned.clear()

    def successors(self, one: int, two: int) -> dict[int, float]:
        """A pair's successors and weights, learned in decoding or from the corpus."""
        learned = self._learned.get((one, two))
        return self.counts.successors(one, two) if learned is None else learned


@dataclass
class Node:
    """A token of the tree, its share among siblings, its visits and sum of scores."""

    token: int
    parent: int
    share: float
    visits: int = 0
    score: float = 0.0
    children: list[int] = field(default_factory=list)
    expanded: bool = False


def puct(score: float, visits: int, parent_visits: int, share: float) -> float:
    """The priority of a child's visit, infinite for the first; see `TreeSearch`."""
    if not visits:
        return math.inf
    explore = C1 + math.log((parent_visits + C2 + 1) / C2)
    return score / visits + explore * share * math.sqrt(parent_visits) / (1 + visits)


class TreeSearch:
    """Grows a tree below two tokens and keeps the rows with the most visits.

    The Monte Carlo tree search of ADED (2407.12021), which visits the child c of a node
    n with the largest

        puct(c) = s_c / v_c + (C1 + log((v_n + C2 + 1) / C2)) p_c sqrt(v_n) / (1 + v_c)

        v visits, s sum of scores, p_c the child's share among its siblings

    The score of a rollout sums the probabilities of the tokens that it adds, and not,
    as in the released code, of the tokens that the tree has already.
    """

    def __init__(self, successors: Successors, iterations: int = ITERATIONS) -> None:
        self.successors, self.iterations = successors, iterations

    def run(self, one: int, two: int, budget: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of at most `budget` rows; `two` is row 0."""
        self._nodes = [Node(two, -1, 1.0)]
        self._before = one
        self._random = random.Random(one << 32 | two)
        for _ in range(self.iterations):
            path = self._descend()
            shares = sum(self._nodes[index].share for index in path[1:])
            score = 1.0 + shares + self._rollout(path)
            for index in path:
                self._nodes[index].visits += 1
                self._nodes[index].score += score
        # A parent has at least as many visits as its children, so it comes first.
        order = sorted(range(1, len(self._nodes)), key=lambda i: -self._nodes[i].visits)
        nodes = [i for i in order[:budget] if self._nodes[i].visits]
        rows = {0: 0} | {index: row for row, index in enumerate(nodes, start=1)}
        kept = [self._nodes[index] for index in nodes]
        return [node.token for node in kept], [rows[node.parent] for node in kept]

    def _descend(self) -> list[int]:
        """Choose the path from the root to a leaf, and expand the nodes on it."""
        path = [0]
        while len(path) <= DEPTH:
            node = self._nodes[path[-1]]
            if not node.expanded:
                node.expanded = True
                for token, share in self._shares(self._last_two(path)).items():
                    node.children.append(len(self._nodes))
                    self._nodes.append(Node(token, path[-1], share))
            if not node.children:
                break
            below = (self._nodes[child] for child in node.children)
            values = [puct(c.score, c.visits, node.visits, c.share) for c in below]
            path.append(node.children[values.index(max(values))])
            if not self._nodes[path[-1]].visits:
                break
        return path

    def _last_two(self, path: list[int]) -> tuple[int, int]:
        """The last two tokens of a path; of the root, the two that `run` was given."""
        before = self._nodes[path[-2]].token if len(path) > 1 else self._before
        return before, self._nodes[path[-1]].token

    def _shares(self, pair: tuple[int, int]) -> dict[int, float]:
        weights = self.successors(*pair)
        total = sum(weights.values())
        order = sorted(weights, key=lambda token: (-weights[token], token))
        return {token: weights[token] / total for token in order}

    def _rollout(self, path: list[int]) -> float:
        """Draw tokens below a path to the full depth; the result sums their shares."""
        (one, two), score = self._last_two(path), 0.0
        for _ in range(DEPTH + 1 - len(path)):
            shares = self._shares((one, two))
            if not shares:
                break
            [token] = self._random.choices(list(shares), list(shares.values()))
            score += shares[token]
            one, two = two, token
        return score


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
