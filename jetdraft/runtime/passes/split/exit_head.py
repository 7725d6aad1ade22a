"""A head that stops a text or lets it leave the target early (SEC, 2401.09964).

Both are lossy: a stopped text lacks its end, fewer layers guess the token of an exit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

import numpy as np

from jetdraft.contracts.tensors import Float32s
from jetdraft.errors import OptionError, PairError, printable
from jetdraft.files import read_arrays

FILE = "exit.npz"
"""The name of the file in the folder of a head."""

FIELD = "stop_and_exit"
"""The name of the option that gives the folder, for errors."""


class Decision(IntEnum):
    """What to do after the lower layers of a row; the order of the head's outputs."""

    STOP = 0
    EXIT = 1
    CONTINUE = 2


@dataclass(frozen=True)
class ExitHead:
    """The head after one layer of a target, for states float32 [n, h].

    `weight` [h, h] makes of a state what the target's final norm reads, h + W h.
    `classifier` [3, h] and `bias` [3] rate the decisions by the state at unit size.
    """

    weight: Float32s
    classifier: Float32s
    bias: Float32s

    def rates(self, states: Float32s) -> Float32s:
        """The probability of each decision, float32 [n, 3]."""
        size = np.sqrt((states**2).mean(-1, keepdims=True) + 1e-6)
        logits = (states / size) @ self.classifier.T + self.bias
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        rates: Float32s = weights / weights.sum(-1, keepdims=True)
        return rates

    def exit_states(self, states: Float32s) -> Float32s:
        """The states that the final norm reads after an exit, float32 [n, h]."""
        return states + states @ self.weight.T

    @classmethod
    def load(cls, folder: Path, base: str, layer: int, size: int) -> ExitHead:
        """Read the head after `layer` layers, for a target with the hash `base`.

        Raises `OptionError` where it is missing, `PairError` for another target's head.
        """
        try:
            modified = (folder / FILE).stat().st_mtime_ns
        except (OSError, ValueError):  # so it cannot be read either
            modified = 0
        return _read_head(folder, modified, base, layer, size)


@lru_cache(maxsize=4)
def _read_head(folder: Path, time: int, base: str, layer: int, size: int) -> ExitHead:
    """As `ExitHead.load`; read again only if `time`, the file's time, changes."""
    fact = f"{folder / FILE} is missing or damaged, or its training still runs"
    if not os.path.isdir(folder):  # of any name
        fact = f"there is no folder {folder}"
    refusal = OptionError(f"{fact}; give a head that jetdraft train sec made", FIELD)
    arrays = read_arrays(folder / FILE, refusal)
    owner = arrays.pop("base", None)
    trained = sorted(n.partition(".")[2] for n in arrays if n.startswith("weight."))
    if owner is None or not trained:
        raise refusal
    if str(owner) != base:
        raise PairError(
            f"{folder} was trained for another target than the bundle's; train a "
            "head for this target"
        )
    if str(layer) not in trained:
        raise OptionError(
            f"{folder} has heads behind layers {printable(', '.join(trained))}, and "
            f"the bundle leaves the target behind layer {layer}; train that layer, "
            "or export with another --exit-after",
            FIELD,
        )
    shapes = {"weight": (size, size), "classifier": (3, size), "bias": (3,)}
    missing = np.zeros(0, np.float32)
    parts = {name: arrays.get(f"{name}.{layer}", missing) for name in shapes}
    for name, part in parts.items():
        fits = part.dtype == np.float32 and part.shape == shapes[name]
        if not fits or not np.isfinite(part).all():
            raise refusal
    return ExitHead(**parts)


@dataclass(frozen=True)
class ExitRule:
    """Decides by a head and two thresholds, probabilities; 1 is never."""

    head: ExitHead
    stop: float
    exit: float

    def decide(self, states: Float32s) -> list[Decision]:
        """The decision after each row, whose state is in `states` float32 [n, h].

        stop if it is the likeliest, and c(stop) > the threshold of stops;
        exit if it is the likeliest, and c(exit) > the threshold of exits;
        else continue                                           (SEC, section 3.3)
        """
        least = {Decision.STOP: self.stop, Decision.EXIT: self.exit}
        decisions = []
        for rates in self.head.rates(states):
            best = Decision(int(rates.argmax()))
            is_sure = float(rates[best]) > least.get(best, 0.0)
            decisions.append(best if is_sure else Decision.CONTINUE)
        return decisions
