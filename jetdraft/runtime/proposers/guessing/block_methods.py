"""Drafting with a graph that fills a block.

A DFlash head (2602.06036) fills it from the target's own states, a small masked
diffusion model (2408.05636) from the text, and the drafter of an encoder-decoder
(Spec-Drafter, 2203.16487) from the source and the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetdraft.bundle import Bundle
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import DraftingError
from jetdraft.ranges import Range, check_ranges
from jetdraft.runtime.followers.block_follower import Refining
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.draft import SAMPLES
from jetdraft.runtime.proposers.draft_stops import Product
from jetdraft.runtime.proposers.guessing.head_guesses import HeadGuesses, head_traits
from jetdraft.runtime.proposers.head_method import follower_for
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer, Tokens, Traits
from jetdraft.runtime.proposers.tree_options import TreeOptions

_RANGES = {
    "steps": Range(lambda n: n in (1, 2), "1 or 2", integer=True),
    "confidence": Range(lambda p: 0.0 <= p <= 1.0, "0 (off) to 1"),
}


@dataclass(frozen=True)
class BlockOptions(TreeOptions):
    """How a block is filled, and how much of it is verified.

    steps       2: the second half of a chain is guessed again when the first is known
    confidence  a chain ends behind the token at which the product of the drafter's
                highest probabilities falls below this

        BlockOptions(steps=2, confidence=0.2)
    """

    steps: int = 1
    confidence: float = Product.default

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, _RANGES)
        if self.steps > 1 and self.branched:
            raise DraftingError(
                "a second pass needs the tokens of the first half, and a tree has "
                "several; leave the tree out"
            )

    @property
    def may_branch(self) -> bool:
        """Whether a controller may ask for trees."""
        return self.steps == 1 and super().may_branch


class BlockProposer(HeadGuesses):
    """Drafts the sure beginning of a block, or a tree whose rows of a depth share it.

    BlockProposer(follower, traits, BlockOptions()).propose(context, budget=7)
    """

    def __init__(
        self, follower: Refining, traits: Traits, options: BlockOptions
    ) -> None:
        super().__init__(follower, traits, options.shape if options.branched else None)
        self._block, self.options = follower, options
        self._stop = Product(options.confidence)

    def guesses(self, context: Tokens) -> Answer | None:
        """The answers for the tokens of the block after a context."""
        self._stop.begin()
        return super().guesses(context)

    def chain(self, context: Tokens, guesses: Answer, budget: int) -> list[int]:
        """The tokens of the guesses, up to the first doubt."""
        count = min(budget, len(guesses.candidates))
        half = count if self.options.steps == 1 else (count + 1) // 2
        tokens, is_sure = self._sure(guesses.rows(slice(0, half)), len(context))
        if half == count or not is_sure:
            return tokens
        rest = self._block.refine(tokens).rows(slice(0, count - half))
        return tokens + self._sure(rest, len(context) + half)[0]

    def _sure(self, guesses: Answer, place: int) -> tuple[list[int], bool]:
        """The chosen tokens up to the first doubt, and whether there is no doubt."""
        count = len(guesses.candidates)
        tokens = self._chooser.choose(guesses, range(place, place + count))
        for row in range(count):
            if self._stop.stop(guesses.rows(slice(row, row + 1))):
                return tokens[: row + 1], False
        return tokens, True


def _method_of(contract: StepContract) -> str:
    """The name of the method that drafts with a graph; "" for no such method."""
    if not contract.block:
        return ""
    if contract.feature_input:
        return "dflash"
    return "block" if contract.source_slots else "diffusion"


def _method(name: str, summary: str, needed: str) -> Method[BlockOptions]:
    def lacks(bundle: Bundle) -> str:
        contract = bundle.drafter.contract if bundle.drafter else None
        has_graph = contract and _method_of(contract) == name
        return "" if has_graph else f"export with --head, and {needed}"

    def make(parts: Parts, options: BlockOptions) -> Proposer:
        follower = follower_for(parts, name, needed, lacks(parts.bundle))
        assert isinstance(follower, Refining)
        return BlockProposer(follower, head_traits(parts, options, name), options)

    samples = (*SAMPLES, {"steps": 2})
    return Method(
        name,
        summary,
        make,
        BlockOptions,
        lacks,
        trees=True,
        samples=samples,
        alone={"confidence": 0.0},
    )


DFLASH = _method(
    "dflash", "a head that fills a block from the target's states", "a DFlash head"
)
DIFFUSION = _method(
    "diffusion", "a small diffusion model that fills a block", "a diffusion drafter"
)
BLOCK = _method(
    "block",
    "the drafter of an encoder-decoder, which fills a block",
    "a drafter of train drafter --kind block",
)
