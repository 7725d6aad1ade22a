"""Rules that end a drafter's draft early, by how sure the drafter is.

A doubtful token is still verified, but nothing is drafted behind it.
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
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.parts import Parts

REPEATED = 3
"""Applications of an acceptance head's one block (D in SpecDec++)."""


class DraftStop(ABC):
    """Ends a draft that it doubts; `threshold` is a probability, or None.

    A rule of a name has a `default` threshold.
    """

    name: ClassVar[str]
    default: ClassVar[float]

    def __init__(self, threshold: float | None = None) -> None:
        self.threshold = self.default if threshold is None else threshold
        self._product = 1.0

    def begin(self) -> None:
        """A new draft."""
        self._product = 1.0

    @abstractmethod
    def stop(self, answer: Answer) -> bool:
        """Whether the token drafted from this one-row answer is the draft's last."""


class Confidence(DraftStop):
    """Stop behind a token whose distribution peaks below the threshold (Kangaroo)."""

    name = "confidence"
    default = 0.6

    def stop(self, answer: Answer) -> bool:
        """By the last token alone."""
        return _confidence(answer) < self.threshold


class Product(DraftStop):
    """Stop when the product of all confidences falls below the threshold."""

    name = "product"
    default = 0.3

    def stop(self, answer: Answer) -> bool:
        """By the whole draft."""
        self._product *= _confidence(answer)
        return self._product < self.threshold


class Learned(DraftStop):
    """Stop when a token of the draft is likely to be rejected (SpecDec++, 2405.19715).

    A is the product of the head's acceptance rates; the draft ends when 1 - A exceeds
    the threshold. The head reads the hidden state that a token was drafted from: it is
    known one drafter pass earlier than the hidden state of the token itself.
    """

    name = "learned"
    default = 0.7

    def __init__(self, head: AcceptanceHead, threshold: float | None = None) -> None:
        super().__init__(threshold)
        self.head = head

    def stop(self, answer: Answer) -> bool:
        """By the whole draft."""
        assert answer.hidden is not None
        self._product *= self.head.rate(answer.hidden[0])
        return 1.0 - self._product > self.threshold


DRAFT_STOPS = (Confidence.name, Product.name, Learned.name)


def draft_stop(
    rule: str | None, threshold: float | None, parts: Parts
) -> DraftStop | None:
    """The rule of that name; None for no rule."""
    if rule is None or parts.drafter is None:
        return None
    if rule == Learned.name:
        size = parts.drafter.contract.hidden_size
        file = parts.profiles.acceptance_file
        head = AcceptanceHead.load(file, parts.bundle.sha256, size)
        return Learned(head, threshold)
    return (Confidence if rule == Confidence.name else Product)(threshold)


def _confidence(answer: Answer) -> float:
    """The drafter's highest probability, before temperature and filters."""
    return float(np.exp(answer.candidate_logits[0, 0] - answer.logsumexp[0]))


def _sigmoid(x: Any) -> Any:
    """Without overflow at either end."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


@dataclass(frozen=True)
class AcceptanceHead:
    """The chance that a drafted token is accepted, from the drafter's hidden state.

    One residual block x + SiLU(W x), applied `REPEATED` times, and a linear layer:
    `block` float32 [h, h], `out` [h], `bias` []. `scale` [] scales hidden states to
    unit size.

        AcceptanceHead.load(file, bundle.sha256, 192).rate(hidden)    # hidden [h]
    """

    block: Float32s
    out: Float32s
    bias: Float32s
    scale: Float32s

    def rate(self, hidden: Float32s) -> float:
        """The chance that the token drafted from a hidden state [h] is accepted."""
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
        """Read the file that `save` wrote, for hidden states of that size.

        Raises `StoreError` if it is missing, damaged or belongs to another bundle.
        """
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
