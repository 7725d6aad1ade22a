"""Rules that end a drafter's draft early, by how sure the drafter is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.contracts.tensors import Float32s
from jetdraft.errors import DraftingError, StoreError
from jetdraft.files import read_arrays
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.answer import Answer

REPEATS = 3
"""How often an acceptance head applies its block (D in SpecDec++)."""

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
    """Make the rule of that name; None if no rule is named.

    The threshold of "learned" is the rate of a rejection, 1 minus the product. Raises
    `DraftingError` without a drafter, and `StoreError` without an acceptance head.
    """
    if rule is None:
        return None
    if loaded.drafter is None:
        raise DraftingError(
            f"stopping {rule!r} needs a drafter, and the bundle has none or it is off; "
            "leave stopping out"
        )
    least = THRESHOLDS[rule] if threshold is None else threshold
    if rule != "learned":
        return DraftStop(confidence, least, product=rule == "product")
    size, file = loaded.drafter.contract.hidden_size, loaded.profiles.acceptance_file
    head = AcceptanceHead.load(file, loaded.bundle.sha256, size)
    return DraftStop(head.rate_after, least if threshold is None else 1.0 - threshold)


def _sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), without overflow at either end."""
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
    def load(cls, file: Path, bundle: str, size: int) -> AcceptanceHead:
        """Read the file that `save` wrote; raises `StoreError`."""
        if not file.exists():
            raise StoreError(
                "the bundle has no acceptance head; make one with jetdraft train "
                "acceptance"
            )
        refusal = StoreError(
            f"{file} is not an acceptance head; make one with jetdraft train acceptance"
        )
        arrays = read_arrays(file, refusal)
        owner = str(arrays.pop("bundle", ""))
        shapes = {"block": (size, size), "out": (size,), "bias": (), "scale": ()}
        if arrays.keys() != shapes.keys():
            raise refusal
        if owner != bundle:
            raise StoreError(
                f"{file} belongs to another bundle; run jetdraft train acceptance again"
            )
        for name, array in arrays.items():
            fits = array.dtype == np.float32 and array.shape == shapes[name]
            if not fits or not np.isfinite(array).all():
                raise refusal
        return cls(**arrays)
