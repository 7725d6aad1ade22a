"""Checks a prompt, its characters and its token ids, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import LengthError, OptionError
from jetdraft.runtime.drafts.arrays import Int64s

CHARACTERS_PER_TOKEN = 64
"""A prompt with more characters for each token of the capacity is not even encoded."""


def check_characters(count: int, capacity: int) -> None:
    """Raise `LengthError` for a text that cannot fit: to encode it may take minutes."""
    most = CHARACTERS_PER_TOKEN * capacity
    if count > most:
        raise LengthError(
            f"the prompt has {count} characters, at most {most} are read for a "
            f"capacity of {capacity} tokens; shorten it"
        )


def check_ids(token_ids: Any, contract: StepContract) -> Int64s:
    """The ids as int64 [length]; raises `OptionError` for an invalid prompt."""
    try:
        array = np.asarray(token_ids)
    except ValueError as error:
        raise OptionError("token_ids must be a list of integers", "prompt") from error
    if array.ndim == 1 and not len(array):
        raise OptionError("the prompt is empty; give at least one token", "prompt")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise OptionError("token_ids must be a list of integers", "prompt")
    ids = array.astype(np.int64)
    if len(ids) > contract.capacity:
        raise LengthError(
            f"the prompt has {len(ids)} tokens, the capacity is "
            f"{contract.capacity}; shorten it or export with a larger --capacity"
        )
    if ids.min() < 0 or ids.max() >= contract.vocab_size:
        wrong_id = ids[(ids < 0) | (ids >= contract.vocab_size)][0]
        raise OptionError(
            f"token id {wrong_id} is outside the vocabulary; "
            f"ids are 0 to {contract.vocab_size - 1}",
            "prompt",
        )
    return ids
