"""The target of `tests.toy_eagle` with drafters that fill a block, made by hand.

A guess is right as often as the head's, but rests on the best guess before it unless
that token is known. The cache keeps the token and the features of each row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jetdraft.contracts.step_contract import StepContract
from tests.toy_eagle import COMMON, GUESSES, IDS, WIDTH, write_toy

BLOCK = 5
"""Tokens of a block."""

DFLASH = StepContract(
    **COMMON,
    feature_input=WIDTH,
    draft_vocab=len(IDS),
    guesses=BLOCK,
    spare_slots=2 * (BLOCK + 1),
)
DIFFUSION = StepContract(**COMMON, guesses=BLOCK, spare_slots=2 * BLOCK)
METHODS = {"dflash": DFLASH, "diffusion": DIFFUSION}


def toy_block(folder: Path, method: str, guesses: np.ndarray = GUESSES) -> Path:
    """Write the bundle with the drafter of a method."""
    return write_toy(folder, METHODS[method], guesses)
