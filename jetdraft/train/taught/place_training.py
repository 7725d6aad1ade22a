"""A training whose validation says how often each place of a draft is accepted."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.errors import TrainingError
from jetdraft.train.head.head_layout import trained_weights
from jetdraft.train.taught.muon import Muon
from jetdraft.train.taught.place_sums import Sums
from jetdraft.train.taught.taught_training import TaughtTraining

FIGURES = "training.json"
"""What was trained, for how long, and how often it was right."""


class PlaceTraining(TaughtTraining):
    """Trains a drafter that is written as a folder of its own, for `export --head`.

    A trainer calls `learn` with the new drafter.
    """

    betas = (0.9, 0.95)

    def learn(self, drafter: nn.Module) -> None:
        """Train all weights of a drafter that are not the target's."""
        self.weights = trained_weights(drafter, self.target)
        for weight in self.weights.values():
            weight.requires_grad_(True)

    @abstractmethod
    def published(
        self, weights: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The config.json and the tensors of the drafter's folder."""

    @property
    def parameters(self) -> int:
        """The number of trained weights."""
        return sum(weight.numel() for weight in self.weights.values())

    def told(self, figures: Mapping[str, Any]) -> str:
        """The loss of the first guess, and how often guesses are accepted."""
        rates = " ".join(f"{rate:.2f}" for rate in figures["acceptance"])
        return (
            f"validation loss {figures['losses'][0]:.2f}, accepted by place {rates}, "
            f"so {figures['tokens_per_pass']:.2f} tokens a pass"
        )

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the layers, AdamW for tables and vectors.

        Few steps are made, and Muon makes more of each than AdamW (docs/heads.md).
        """
        inner = {
            name: weight
            for name, weight in self.weights.items()
            if weight.ndim == 2 and not name.startswith(("embed_tokens", "lm_head"))
        }
        others = [w for name, w in self.weights.items() if name not in inner]
        optimizers: list[torch.optim.Optimizer] = [
            Muon(inner.values(), lr=0.0, adjust_lr_fn="match_rms_adamw")
        ]
        if others:
            optimizers.append(torch.optim.AdamW(others, lr=0.0, betas=self.betas))
        return optimizers

    def begin(self) -> None:
        """Make the folder, which holds no copy of the target."""
        self.folder.create()

    def figures(self, parts: Sequence[Sums]) -> dict[str, Any]:
        """The figures of a validation; raises `TrainingError` for no numbers."""
        lost, places, reached, accepted = (
            torch.stack([getattr(part, name) for part in parts]).sum(0).cpu()
            for name in ("lost", "places", "reached", "accepted")
        )
        if not torch.isfinite(lost).all():
            raise TrainingError(self.failure())
        rates = accepted / reached.clamp(min=1)
        return {
            "losses": _rounded(lost / places.clamp(min=1)),
            "acceptance": _rounded(rates),
            "tokens_per_pass": round(1 + rates.cumprod(0).sum().item(), 3),
        }

    def save(
        self, weights: dict[str, Tensor], state: Any, figures: dict[str, Any] | None
    ) -> None:
        """Write the drafter's folder, and the figures beside it."""
        fields, tensors = self.published(weights)
        run = {**self.settings_of_run(), "step": self.step, "validation": figures}
        self.folder.write(FIGURES, json.dumps(run, indent=2) + "\n")
        self.folder.save(tensors, fields, state, self.finished)
        if self.finished:
            self.forget_texts()


def _rounded(numbers: Tensor) -> list[float]:
    return [round(number, 4) for number in numbers.tolist()]
