"""How Medusa heads are trained: `jetdraft train medusa`."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from jetdraft.methods.medusa.module import Medusa, MedusaConfig
from jetdraft.train.heads import HeadSettings, HeadTask, make_config, stored_tensors
from jetdraft.train.task import Contents, Run, Tensors
from jetdraft.train.teacher import Lesson, shift_rows


class MedusaTask(HeadTask):
    """Trains heads on the text (Medusa, 2.2.1); step i is head i."""

    Settings = HeadSettings
    help = "Train heads that guess the next tokens of TARGET from its last state."
    product = "a head"

    def new_drafter(self, run: Run) -> Medusa:
        """Make heads that at first predict the target's next token (2.2.1)."""
        count, target = self.settings.unrolled, run.target
        self.config = make_config(target, MedusaConfig, slots=count)
        rows = target.model.get_output_embeddings().weight.detach().float()
        medusa = Medusa(self.config)
        for weight in medusa.lm_heads.parameters():
            weight.data.copy_(rows)
        for weight in medusa.blocks.parameters():
            nn.init.zeros_(weight)
        return medusa

    def predictions(
        self, drafter: Medusa, lesson: Lesson, learns: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        hidden = drafter(lesson.final)
        logits = drafter.logits(hidden)
        for step in range(self.config.slots):
            yield hidden[:, :, step], logits[:, :, step]

    def losses(self, step: int, state: Tensor, scores: Tensor, lesson: Any) -> Tensor:
        """Return the cross entropy to the text, not to the target as the parent."""
        labels = shift_rows(lesson.labels, 2 + step, 0).clamp(min=0)
        return -scores.gather(-1, labels[..., None])[..., 0]

    def description(self, run: Run) -> str:
        config = self.config
        return f"{config.slots} Medusa heads over {config.draft_vocab_size} tokens"

    def contents(self, run: Run, weights: Tensors, figures: Any) -> Contents:
        blocks = self.config.blocks

        def name(own: str) -> str:
            kind, head, rest = own.split(".", 2)
            if kind == "lm_heads":
                return f"{head}.{blocks}.weight"
            block, part = rest.split(".")
            return f"{head}.{block}.linear.{part}"

        fields = {"medusa_num_heads": self.config.slots, "medusa_num_layers": blocks}
        return fields, stored_tensors(weights, self.settings.half, name)[1]
