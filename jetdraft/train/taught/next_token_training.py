"""Trains drafters whose row t says what the target says in row t: token t + 1.

A draft that begins at row s has rows s, s + 1, ... Each sequence is cut in such drafts,
so that a drafter that knows less of the later rows of a draft learns from all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.errors import OptionError
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.head.head_layout import layer_fields
from jetdraft.train.head.head_losses import Lesson
from jetdraft.train.head.teacher import Teacher
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.taught.place_sums import Sums, sums_of
from jetdraft.train.taught.place_training import PlaceTraining
from jetdraft.train.taught.precision import precision
from jetdraft.train.taught.taught_training import Stages
from jetdraft.train.training import TrainingOptions

PLACES = 5
"""Rows of a draft, as in GliDe's training."""


@dataclass(frozen=True)
class NextTokenSettings:
    """What all these drafters can be asked for.

    With `regenerate` the target writes the texts, with `half` the drafter is written in
    float16.
    """

    regenerate: bool = False
    half: bool = False


class DraftObjective(nn.Module):
    """A drafter and its loss, as one module, so that several processes can share it.

    sums = Objective(drafter)(lesson, first=3)
    """

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.drafter = drafter

    @abstractmethod
    def sums(self, lesson: Any, first: int) -> Sums:
        """The sums by the place in a draft; drafts begin at `first`, and so on."""

    def forward(self, lesson: Any, first: int) -> Sums:
        """As `sums`, in the precision of the device."""
        with precision(lesson.ids.device):
            return self.sums(lesson, first)


class NextTokenObjective(DraftObjective):
    """The cross entropy of a row to the target's distribution in the same row."""

    @abstractmethod
    def hidden(self, lesson: Any, starts: Tensor) -> Tensor:
        """The states for the LM head, [b, T, h].

        Row t belongs to the draft that begins at row `starts[t]`, int64 [T].
        """

    def sums(self, lesson: Lesson, first: int) -> Sums:
        """The sums by the place in a draft."""
        count = lesson.ids.shape[1]
        rows = torch.arange(count, device=lesson.ids.device)
        starts = rows - (rows - first) % PLACES
        hidden = self.hidden(lesson, starts)
        learned = torch.zeros_like(lesson.labels, dtype=torch.bool)
        learned[:, :-1] = lesson.labels[:, 1:] != IGNORED
        learned &= starts > 0  # no draft begins before the text
        scores = self.drafter.lm_head(hidden[learned]).float().log_softmax(-1)
        teacher = lesson.logits[learned].float()
        lost = -(teacher.softmax(-1) * scores).sum(-1)
        right = scores.argmax(-1) == teacher.argmax(-1)
        before = PLACES - first
        behind = -(before + count) % PLACES
        drafts = F.pad(learned, (before, behind)).view(len(learned), -1, PLACES)
        places = torch.arange(PLACES, device=drafts.device).expand(drafts.shape)
        return sums_of(lost, right, places[drafts], drafts)


class NextTokenTraining(PlaceTraining):
    """A training whose output is the folder of a drafter, for `export --head`.

    A subclass says what drafter it is. `progress` gets a stage, and how many of its
    texts are written.
    """

    most_norm = 0.5
    module: DraftObjective

    def __init__(
        self,
        target: str,
        output: Path,
        data: Sequence[Path],
        settings: NextTokenSettings | None = None,
        options: TrainingOptions | None = None,
        progress: Stages = lambda *state: None,
    ) -> None:
        self.settings: Any = self.default_settings() if settings is None else settings
        folder = RunFolder(output, "model.safetensors", "config.json", "head")
        super().__init__(folder, options or TrainingOptions())
        least = 2 * PLACES
        if self.options.sequence_length < least:
            raise OptionError(
                f"sequences of {self.options.sequence_length} tokens are too short for "
                f"drafts of {PLACES}; give {least} or more"
            )
        self.load_target(target, "heads")
        self.config = self.new_config()
        self.read_texts(data, least, self.settings.regenerate, progress)
        torch.manual_seed(self.options.seed)
        drafter = self.new_drafter()
        self.learn(drafter)
        self.module = self.new_objective(drafter)

    @abstractmethod
    def default_settings(self) -> NextTokenSettings:
        """The settings of a training without any."""

    @abstractmethod
    def new_config(self) -> HeadConfig:
        """The config of the drafter; raises `OptionError`."""

    @abstractmethod
    def new_drafter(self) -> nn.Module:
        """The drafter before its training."""

    @abstractmethod
    def new_objective(self, drafter: nn.Module) -> DraftObjective:
        """The drafter and its loss."""

    def lesson(self, accelerator: Any, batch: Batch) -> Any:
        """What the target says of a batch, and its states at the config's taps.

        On the batch's device.
        """
        model = self.target.model.to(accelerator.device)
        return Teacher(model, self.config.taps, None).lesson(batch)

    @abstractmethod
    def own_fields(self) -> dict[str, Any]:
        """The fields of config.json that only this drafter has."""

    def summary(self) -> str:
        """What is trained on how many sequences."""
        return f"training {self.parameters} weights of {self.product} on {self.reading}"

    def settings_of_run(self) -> dict[str, Any]:
        """The settings of the drafter, and the target's hash."""
        return asdict(self.settings) | self.own_fields() | {"target": self.base}

    def loss(self, accelerator: Any, module: Any, batch: Batch) -> Tensor:
        """The mean over the learned rows of all processes."""
        draw = torch.Generator().manual_seed(1_000_003 * self.options.seed + self.step)
        first = int(torch.randint(1, PLACES + 1, (1,), generator=draw))
        sums = module(self.lesson(accelerator, batch), first)
        places = accelerator.reduce(sums.places.sum(), "sum")
        # Processes average their gradients, and each has a part of the sum.
        loss: Tensor = sums.lost.sum() / places.clamp(min=1) * accelerator.num_processes
        return loss

    def validate(self, accelerator: Any, module: Any) -> dict[str, Any]:
        """Losses, and how often a place of a draft is accepted if all before it are."""
        objective, device = accelerator.unwrap_model(module), accelerator.device
        batches = self.corpus.validation_batches(self.options.batch_size)
        return self.figures(
            [objective(self.lesson(accelerator, b.to(device)), 1) for b in batches]
        )

    def published(
        self, weights: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """A Llama layer under the names of transformers, and what else there is."""
        dtype = torch.float16 if self.settings.half else torch.float32
        tensors = {
            name.removeprefix("stack."): weight.to(dtype).contiguous()
            for name, weight in weights.items()
        }
        fields = {
            "model_type": "llama",
            **layer_fields(self.config),
            "torch_dtype": str(dtype).removeprefix("torch."),
            "tie_word_embeddings": False,
            **self.own_fields(),
        }
        return fields, tensors
