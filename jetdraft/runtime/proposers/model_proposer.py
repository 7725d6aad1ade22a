"""Drafting with a graph, token by token or level by level, and when a draft ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.contracts.tensors import Float32s
from jetdraft.errors import DraftingError, StoreError
from jetdraft.files import read_arrays
from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.drafts.noise import Distribution
from jetdraft.runtime.drafts.rows import Rows, Tokens
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.halves import PlacedRows
from jetdraft.runtime.passes.prefix import common_length
from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Seen, Traits
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.trees.shapes import Shape, Static, Tree

REPEATS = 3  # How often an acceptance head applies its block (D in SpecDec++).

THRESHOLDS = {"confidence": 0.6, "product": 0.3, "learned": 0.3}
"""The rules, and the rate below which each stops where no threshold is given.

confidence  the drafter's highest probability for the last token (Kangaroo)
product     the product of these over the draft
learned     the product of the rates of an acceptance head (SpecDec++, 2405.19715)
"""


@dataclass
class DraftStop:
    """Ends a draft after a token whose `rate` or `product` is below the threshold."""

    rate: Callable[[Answer], float]
    threshold: float
    product: bool = True
    _rate: float = 1.0

    def begin(self) -> None:
        self._rate = 1.0

    def ends_draft(self, answer: Answer) -> bool:
        """Add the rate of the token after `answer`; whether the draft ends with it."""
        rate = self.rate(answer)
        self._rate = self._rate * rate if self.product else rate
        return self._rate < self.threshold


def confidence(answer: Answer) -> float:
    """The drafter's highest probability, before temperature and filters."""
    return float(np.exp(answer.candidate_logits[0, 0] - answer.logsumexp[0]))


def make_draft_stop(
    rule: str | None, threshold: float | None, loaded: LoadedBundle
) -> DraftStop | None:
    """Make the rule of that name, None without a name.

    The threshold of "learned" is 1 minus the product. Raises `DraftingError` without a
    drafter, and `StoreError` without an acceptance head.
    """
    if rule is None:
        return None
    if loaded.drafter is None:
        fact = f"stopping {rule!r} needs a drafter, and the bundle has none or it is "
        fact += "off; leave stopping out"
        raise DraftingError(fact)
    least = THRESHOLDS[rule] if threshold is None else threshold
    if rule != "learned":
        return DraftStop(confidence, least, product=rule == "product")
    size, file = loaded.drafter.contract.hidden_size, loaded.profiles.acceptance_file
    head = AcceptanceHead.load(file, loaded.bundle.sha256, size)
    return DraftStop(head.rate_after, least if threshold is None else 1.0 - threshold)


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


@dataclass(frozen=True)
class AcceptanceHead:
    """The chance that a drafted token is accepted, from the drafter's hidden state.

    One residual block x + SiLU(W x), applied `REPEATS` times, and a linear layer:
    `block` float32 [h, h], `out` [h], `bias` []; `scale` [] scales to unit size.
    """

    block: Float32s
    out: Float32s
    bias: Float32s
    scale: Float32s

    def rate(self, hidden: Float32s) -> float:
        """The chance that the token drafted from a hidden state [h] is accepted."""
        x = hidden * self.scale
        for _ in range(REPEATS):
            z = self.block @ x
            x = x + z * _sigmoid(z)
        return float(_sigmoid(self.out @ x + self.bias))

    def rate_after(self, answer: Answer) -> float:
        """The rate of the token drafted from an answer, a pass before its own state."""
        assert answer.hidden is not None
        return self.rate(answer.hidden[0])

    def save(self, file: Path, bundle: str) -> None:
        """Write an npz with the hash of the bundle whose drafter it reads."""
        with file.open("wb") as handle:
            np.savez(handle, bundle=np.array(bundle), **vars(self))

    @classmethod
    def load(cls, file: Path, bundle: str, size: int) -> "AcceptanceHead":
        """Read the file that `save` wrote; raises `StoreError`."""
        if not file.exists():
            fact = "the bundle has no acceptance head"
            raise StoreError(f"{fact}; make one with jetdraft train acceptance")
        fix = "make one with jetdraft train acceptance"
        refusal = StoreError(f"{file} is not an acceptance head; {fix}")
        arrays = read_arrays(file, refusal)
        owner = str(arrays.pop("bundle", ""))
        shapes = {"block": (size, size), "out": (size,), "bias": (), "scale": ()}
        if arrays.keys() != shapes.keys():
            raise refusal
        if owner != bundle:
            fact = f"{file} belongs to another bundle"
            raise StoreError(f"{fact}; run jetdraft train acceptance again")
        for name, array in arrays.items():
            fits = array.dtype == np.float32 and array.shape == shapes[name]
            if not fits or not np.isfinite(array).all():
                raise refusal
        return cls(**arrays)


# Makes a draft of a graph's answer after the root of a tree without other rows yet.
Grow = Callable[[DraftCache, Answer, Tree], Rows]
GrowShape = Callable[[Shape, DraftCache, Answer, Tree], Rows]


class ModelProposer(Proposer):
    """Drafts with the graph that a `cache` keeps in step with the sequence.

    Without `grow` drafts are chains, which choose with the target's noise and end where
    the rule `stop`, or `least`, doubts them. With a `lookup`, each pass of a model also
    reads what lookup guesses next, and drafts each guess that the model chooses too
    (Cascade Drafting, 2312.11462). Proposers of one graph share its cache.

        ModelProposer(DraftCache(graph), Traits("draft", 15)).propose([5, 8, 9], 3)
    """

    def __init__(
        self,
        cache: DraftCache,
        traits: Traits,
        grow: Grow | None = None,
        stop: DraftStop | None = None,
        lookup: LookupProposer | None = None,
    ) -> None:
        contract = cache.graph.contract
        blind = not (contract.feature_input or contract.reads)
        self.traits = replace(traits, blind=blind)
        self.cache, self.grow, self.stop, self.lookup = cache, grow, stop, lookup
        self.chooser = Chooser(Sampling())

    @property
    def session_seconds(self) -> float:
        return self.cache.graph.seconds

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        self.cache.begin(prompt)
        self.chooser = chooser
        if self.lookup is not None:
            self.lookup.begin(prompt, chooser)

    def keep(self, kept: int) -> int:
        return self.cache.keep(kept)

    def observe(self, seen: Seen) -> None:
        """Give the cache the features of the accepted rows, whoever proposed them."""
        path, features = seen.path, seen.answer.features
        if features is None:
            return
        tokens, end = seen.rows.tokens, len(path)
        if path[-1] == end - 1:  # the rows of a chain lie side by side
            tokens, rows = tokens[:end], features[:end].copy()
        else:
            tokens, rows = [tokens[row] for row in path], features[list(path)]
        self.cache.observe(seen.length - 1 - end, tokens, rows)

    def catch_up(self, context: Tokens) -> None:
        self.cache.catch_up(context)
        if self.lookup is not None:
            self.lookup.read(context)

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        """Catch up with the context, then draft a chain or what `grow` makes."""
        cache, lookup, drafted = self.cache, self.lookup, list[int]()
        tree = Tree(self.traits.kind, self.chooser, len(context), budget, [context[-1]])
        grow, answer = self.grow, None
        if parents is not None:
            grow = partial(grow_guesses, Static(parents))
        if grow is not None:
            answer = cache.follow(context)
            if answer is None:
                return Rows.chain(tree.tokens, tree.kind)
            return grow(cache, answer, tree)
        stop = DraftStop(confidence, self.least) if self.least else self.stop
        if stop is not None:
            stop.begin()
        if lookup is not None:
            lookup.read(context)
        is_sure, guess, text = True, list[int](), [*context] if lookup else []
        while is_sure and len(drafted) < budget:
            if lookup is not None:
                guess = lookup.guess_after(drafted, budget - len(drafted) - 1).tokens
                answer = cache.review(text, guess)
            else:
                answer = cache.step(drafted[-1]) if drafted else cache.follow(context)
            if answer is None:
                break
            place = len(context) + len(drafted)
            tokens, is_sure = choose(answer, place, self.chooser, stop, guess)
            drafted += tokens
            text += tokens
        return Rows.chain([*tree.tokens, *drafted], tree.kind)


def choose(
    answer: Answer,
    place: int,
    chooser: Chooser,
    stop: DraftStop | None = None,
    guess: Sequence[int] | None = None,
) -> tuple[list[int], bool]:
    """Choose a token after each row, the first at `place`; return them.

    If the rows behind the first have read a `guess`, the last token returned is the
    first that differs from it. `stop` may end them earlier: then returns False too.
    """
    tokens = chooser.choose(answer, range(place, place + len(answer.candidates)))
    if guess is not None:
        tokens = tokens[: 1 + common_length(tokens, guess)]
    for row in range(len(tokens)):
        if stop is not None and stop.ends_draft(answer.rows(slice(row, row + 1))):
            return tokens[: row + 1], False
    return tokens, True


def grow_levels(shape: Shape, cache: DraftCache, answer: Answer, tree: Tree) -> Rows:
    """Grow a tree with a pass of the graph per level; the graph keeps no row."""
    widest = cache.graph.contract.max_width
    # Of each row, past the cursor in the graph's buffers.
    slots: dict[int, int] = {}
    answers = {0: tree.chooser.draft_distribution(answer)}
    while rows := shape.grow(tree, answers):
        # A wide level is cut, and a full buffer or mask ends the draft.
        filled = len(slots)
        rows = rows[: min(widest, cache.graph.draft_room(filled))]
        if not rows:
            break
        # From the root's child to the row's parent, the last, as `Rows.ancestors`.
        above = [[slots[r] for r in tree.path(row)[-2:0:-1]] for row in rows]
        tokens = [tree.tokens[row] for row in rows]
        depths = [tree.depths[row] - 1 for row in rows]
        answer = cache.branch(PlacedRows(tokens, depths, above, filled))
        slots.update(zip(rows, range(filled, filled + len(rows)), strict=True))
        answers = dict(zip(rows, distributions(answer, tree.chooser), strict=True))
    return shape.rows_to_verify(tree).depth_first()


class Guesses:
    """A chain up to what `stop` doubts; with 2 `steps` its later half guessed again."""

    def __init__(self, stop: DraftStop | None = None, steps: int = 1) -> None:
        self.stop, self.steps = stop, steps

    def __call__(self, cache: DraftCache | None, answer: Answer, tree: Tree) -> Rows:
        count, place = min(tree.budget, len(answer.candidates)), tree.position
        half = count if self.steps == 1 else (count + 1) // 2
        if self.stop is not None:
            self.stop.begin()
        tokens, is_sure = choose(answer.first(half), place, tree.chooser, self.stop)
        if half < count and is_sure and cache is not None:
            rest, place = cache.refine(tokens).first(count - half), place + half
            tokens += choose(rest, place, tree.chooser, self.stop)[0]
        return Rows.chain([*tree.tokens, *tokens], tree.kind)


def grow_guesses(shape: Shape, cache: object, answer: Answer, tree: Tree) -> Rows:
    """Grow a tree of guesses: all rows of a depth draw from the same guess."""
    levels, rows = distributions(answer, tree.chooser), [0]
    while rows:
        deep = ((row, tree.depths[row]) for row in rows)
        answers = {row: levels[depth] for row, depth in deep if depth < len(levels)}
        rows = shape.grow(tree, answers) if answers else []
    return shape.rows_to_verify(tree).depth_first()


class ProbeProposer(Proposer):
    """Drafts what the probes of the target's last accepted row guessed, at no cost.

    Without a `shape` drafts are chains, or trees if a controller asks for `branches`.
    """

    def __init__(self, traits: Traits, shape: Shape | None = None) -> None:
        self.traits, self.shape = traits, shape
        self.chooser = Chooser(Sampling())
        self._last_guesses: tuple[int, Answer] | None = None

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        self.chooser, self._last_guesses = chooser, None

    def observe(self, seen: Seen) -> None:
        """Keep the answer of the probes of the last accepted row."""
        probes = seen.answer.probes.get(seen.path[-1])
        self._last_guesses = None if probes is None else (seen.length, probes)

    def guesses(self, context: Tokens) -> Answer | None:
        """The answer of the last pass's probes; None unless it is after `context`."""
        guesses = self._last_guesses
        return guesses[1] if guesses and guesses[0] == len(context) else None

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        answer = self.guesses(context)
        if answer is None:
            return Rows.chain([context[-1]], self.traits.kind)
        shape = self.shape if parents is None else Static(parents)
        return self.grow(shape, answer, context, budget)

    def grow(
        self, shape: Shape | None, answer: Answer, context: Tokens, budget: int
    ) -> Rows:
        """Draft guesses after a context: a tree of this shape, or a chain for None."""
        root = [context[-1]]
        tree = Tree(self.traits.kind, self.chooser, len(context), budget, root)
        if shape is None:
            return Guesses()(None, answer, tree)
        return grow_guesses(shape, None, answer, tree)


def distributions(answer: Answer, chooser: Chooser) -> list[Distribution]:
    """Copy the distribution of each row of an answer, before a pass overwrites it."""
    rows = (slice(row, row + 1) for row in range(len(answer.candidates)))
    return [chooser.draft_distribution(answer.rows(row)) for row in rows]
