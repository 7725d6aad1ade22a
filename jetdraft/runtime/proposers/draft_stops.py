"""When a drafter had better stop: while it drafts, from how sure it is.

A token that it doubts is still verified, but nothing is drafted behind it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jetdraft.errors import StoreError
from jetdraft.files import read_arrays
from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.runtime.passes.graph import Answer

REPEATED = 3
"""Applications of an acceptance head's one block (D in SpecDec++)."""


class Stopping(ABC):
    """Stops drafts that are in doubt; `threshold` is a probability."""

    name: ClassVar[str]
    usual: ClassVar[float]

    def __init__(self, threshold: float | None = None) -> None:
        self.threshold = self.usual if threshold is None else threshold
        self._product = 1.0

    def begin(self) -> None:
        """A new draft."""
        self._product = 1.0

    @abstractmethod
    def stop(self, answer: Answer) -> bool:
        """Whether the token that was drafted from a one-row answer is the last."""


class Confidence(Stopping):
    """Stop behind a token whose distribution peaks below the threshold (Kangaroo)."""

    name = "confidence"
    usual = 0.6

    def stop(self, answer: Answer) -> bool:
        """By the last token alone."""
        return _confidence(answer) < self.threshold


class Product(Stopping):
    """Stop when the product of all confidences falls below the threshold."""

    name = "product"
    usual = 0.3

    def stop(self, answer: Answer) -> bool:
        """By the whole draft."""
        self._product *= _confidence(answer)
        return self._product < self.threshold


class Learned(Stopping):
    """Stop when a token of the draft is likely to be rejected (SpecDec++, 2405.19715).

    With A the product of a head's acceptance rates, when 1 - A exceeds the threshold.
    The head reads the hidden state that each token was drafted from, which is known a
    drafter pass earlier than that of the token itself.
    """

    name = "learned"
    usual = 0.7

    def __init__(self, head: AcceptanceHead, threshold: float | None = None) -> None:
        super().__init__(threshold)
        self.head = head

    def stop(self, answer: Answer) -> bool:
        """By the whole draft."""
        assert answer.hidden is not None
        self._product *= self.head.rate(answer.hidden[0])
        return 1.0 - self._product > self.threshold


STOPPING = {rule.name: rule for rule in (Confidence, Product)}
NAMES = (*STOPPING, Learned.name)


def _confidence(answer: Answer) -> float:
    """The drafter's highest probability, before temperature and filters."""
    return float(np.exp(answer.candidate_logits[0, 0] - answer.logsumexp[0]))


def _sigmoid(x: Any) -> Any:
    """Without overflow at either end."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


@dataclass(frozen=True)
class AcceptanceHead:
    """How likely a drafted token is to be accepted, from the drafter's hidden state.

    One residual block x + SiLU(W x), applied `REPEATED` times, and a linear layer:
    `block` float32 [h, h], `out` [h], `bias` []. `scale` [] brings hidden states to
    unit size.

        AcceptanceHead.load(file, bundle.sha256, 192).rate(hidden)    # hidden [h]
    """

    block: Float32s
    out: Float32s
    bias: Float32s
    scale: Float32s

    def rate(self, hidden: Float32s) -> float:
        """The chance of being accepted."""
        x = hidden * self.scale
        for _ in range(REPEATED):
            z = self.block @ x
            x = x + z * _sigmoid(z)
        return float(_sigmoid(self.out @ x + self.bias))

    def save(self, file: Path, bundle: str) -> None:
        """Write an npz with the hash of the bundle whose drafter it reads."""
        with file.open("wb") as handle:
            np.savez(handle, bundle=np.array(bundle), **vars(self))

    @classmethod
    def load(cls, file: Path, bundle: str, size: int) -> AcceptanceHead:
        """Read `save`'s file for hidden states of that size.

        Raises `StoreError` if it is damaged or for another bundle.
        """
        if not file.exists():
            raise StoreError(
                "the bundle has no acceptance head; make one with jetdraft train "
                "acceptance"
            )
        refusal = StoreError(
            f"{file} is no acceptance head; make one with jetdraft train acceptance"
        )
        arrays = read_arrays(file, refusal)
        owner = str(arrays.pop("bundle", ""))
        if arrays.keys() != cls.__dataclass_fields__.keys():
            raise refusal
        if owner != bundle:
            raise StoreError(
                f"{file} belongs to another bundle; run jetdraft train acceptance again"
            )
        shapes = {"block": (size, size), "out": (size,), "bias": (), "scale": ()}
        for name, array in arrays.items():
            if array.dtype != np.float32 or array.shape != shapes[name]:
                raise refusal
            if not np.isfinite(array).all():
                raise refusal
        return cls(**arrays)
