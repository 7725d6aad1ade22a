"""Drafting with a graph that fills a block.

A DFlash head (2602.06036) fills it from the target's own states, a small masked
diffusion model (2408.05636) from the text, and the drafter of an encoder-decoder
(Spec-Drafter, 2203.16487) from the source and the text.
"""

from __future__ import annotations

from jetdraft.bundle import Bundle
from jetdraft.contracts.step_contract import StepContract
from jetdraft.runtime.followers.block_follower import Refining
from jetdraft.runtime.proposers.draft import SAMPLES
from jetdraft.runtime.proposers.guessing.block_proposer import (
    BlockOptions,
    BlockProposer,
)
from jetdraft.runtime.proposers.guessing.head_guesses import head_traits
from jetdraft.runtime.proposers.head_method import follower_for
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer


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
