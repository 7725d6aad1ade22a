"""What a prompt must be before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from jetdraft.contract import StepContract
from jetdraft.errors import PromptError
from jetdraft.runtime.drafts.noise import Int64s


def check_ids(given: Any, contract: StepContract) -> Int64s:
    """A prompt's ids, int64 [length], or a `PromptError` that says why not."""
    try:
        found = np.asarray(given)
    except ValueError as error:
        raise PromptError("token_ids must be a list of integers") from error
    if found.ndim == 1 and not len(found):
        raise PromptError("the prompt is empty; give at least one token")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise PromptError("token_ids must be a list of integers")
    ids = found.astype(np.int64)
    if len(ids) > contract.capacity:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, the capacity is "
            f"{contract.capacity}; shorten it or export with a larger --capacity"
        )
    if ids.min() < 0 or ids.max() >= contract.vocab_size:
        wrong = ids[(ids < 0) | (ids >= contract.vocab_size)][0]
        raise PromptError(
            f"token id {wrong} is outside the vocabulary; "
            f"ids are 0 to {contract.vocab_size - 1}"
        )
    return ids
