"""How Medusa heads are trained: `jetdraft train medusa`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from jetdraft.methods.medusa.module import Medusa, MedusaConfig
from jetdraft.train.heads import (
    HeadSettings,
    HeadTask,
    StepObjective,
    config_of,
    stored,
)
from jetdraft.train.teacher import Lesson, shifted
from jetdraft.train.training import Training


class MedusaObjective(StepObjective):
    """Heads that learn the text (Medusa, 2.2.1); step i is of head i."""

    def predictions(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor]]:
        """The states and the logits of each head."""
        hidden = self.drafter(lesson.final)
        logits = self.drafter.logits(hidden)
        for step in range(self.steps):
            yield hidden[:, :, step], logits[:, :, step]

    def lost(
        self, step: int, carried: Tensor, scores: Tensor, lesson: Lesson
    ) -> Tensor:
        """The cross entropy to the text."""
        labels = shifted(lesson.labels, 2 + step, 0).clamp(min=0)
        return -scores.gather(-1, labels[..., None])[..., 0]


class MedusaTask(HeadTask):
    """Heads on the target's last state, in the layout of their authors."""

    Settings = HeadSettings
    help = "Train heads that guess the next tokens of TARGET from its last state."
    product = "a head"

    def pupil(self, run: Training) -> nn.Module:
        """New heads, which begin with the target's own next token (2.2.1)."""
        count, target = self.settings.unrolled, run.target
        self.config = config_of(target, MedusaConfig, slots=count)
        rows = target.model.get_output_embeddings().weight.detach().float()
        medusa = Medusa(self.config)
        for weight in medusa.lm_heads.parameters():
            weight.data.copy_(rows)
        for weight in medusa.blocks.parameters():
            nn.init.zeros_(weight)
        return MedusaObjective(medusa, count)

    def headline(self, run: Training) -> str:
        return (
            f"training {run.parameters} weights of {self.config.slots} Medusa heads "
            f"over {self.config.draft_vocab_size} tokens on {run.reading}"
        )

    def published(
        self, run: Training, weights: dict[str, Tensor], figures: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The config.json and the tensors, as the authors publish theirs."""
        blocks = self.config.blocks

        def name(own: str) -> str:
            kind, head, rest = own.split(".", 2)
            if kind == "lm_heads":
                return f"{head}.{blocks}.weight"
            block, part = rest.split(".")
            return f"{head}.{block}.linear.{part}"

        fields = {"medusa_num_heads": self.config.slots, "medusa_num_layers": blocks}
        return fields, stored(weights, self.settings.half, name)[1]
