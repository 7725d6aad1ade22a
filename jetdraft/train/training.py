"""A training that can be stopped and resumed, on one device or several."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.errors import DataError, OptionError, TrainingError
from jetdraft.runtime.text.template import ChatTemplate
from jetdraft.train.data import Batch, Corpus
from jetdraft.train.interrupt import held_back
from jetdraft.train.processes import this_process
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.taught.precision import is_fast

WARM_UP = 0.03
"""The share of the steps in which the learning rate rises."""

Report = Callable[["Progress"], None]


@dataclass(frozen=True)
class TrainingOptions:
    """How long and how fast to train.

    `sequence_length` is in tokens. The `learning_rate` falls linearly to zero. With
    `steps` of None the trainer says how many.

    TrainingOptions(steps=200, batch_size=8, sequence_length=256)
    """

    steps: int | None = 200
    batch_size: int = 8
    sequence_length: int = 256
    learning_rate: float = 5e-4
    validation_share: float = 0.05
    validate_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("steps", self.steps, 1, 10**9),
            ("batch size", self.batch_size, 1, 10**6),
            ("sequence length", self.sequence_length, 2, 10**6),
            ("learning rate", self.learning_rate, 0.0, 1.0),
            ("validation share", self.validation_share, 0.0, 0.5),
            ("validate every", self.validate_every, 1, 10**9),
        ):
            if value is not None and not least <= value <= most:
                raise OptionError(
                    f"{name} {value} is out of range; give {least} to {most}"
                )


@dataclass(frozen=True)
class Progress:
    """The state of a training; `validation` has figures after a validation."""

    step: int
    steps: int
    loss: float
    validation: dict[str, Any] | None = None


class Training(ABC):
    """What every training does: steps, validations, saving, stopping and resuming.

    A second run with the same settings resumes where the first run stopped. A trainer
    gives `module`, which computes losses, and the `weights` that it learns.
    """

    module: nn.Module
    weights: dict[str, Tensor]
    corpus: Corpus
    product: str
    """What it makes."""

    betas = (0.9, 0.999)
    most_norm = 1.0
    """Gradients of a larger norm are cut to it."""

    def __init__(self, folder: RunFolder, options: TrainingOptions) -> None:
        self.folder = folder
        self.options = options
        self.step = 0

    # --- what a trainer says ----------------------------------------------------------

    @abstractmethod
    def summary(self) -> str:
        """A line that says what will be trained on what."""

    @abstractmethod
    def told(self, figures: Mapping[str, Any]) -> str:
        """The figures of a validation in words."""

    def advised_steps(self) -> int:
        """The steps of a training without a number of them."""
        return 200

    @abstractmethod
    def settings_of_run(self) -> Mapping[str, Any]:
        """What must not change between the runs, beside the options and the data."""

    @abstractmethod
    def begin(self) -> None:
        """Make the output folder; the main process calls it."""

    @abstractmethod
    def loss(self, accelerator: Any, module: Any, batch: Batch) -> Tensor:
        """The loss of a batch."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """What moves the weights; the learning rate of a step is set in each."""
        return [torch.optim.AdamW(self.weights.values(), lr=0.0, betas=self.betas)]

    @abstractmethod
    def validate(self, accelerator: Any, module: Any) -> dict[str, Any]:
        """Figures of the validation texts; raises `TrainingError` for no numbers."""

    @abstractmethod
    def save(
        self, weights: dict[str, Tensor], state: Any, figures: dict[str, Any] | None
    ) -> None:
        """Write the weights, in the type of the training, and the state."""

    # --- what every training does -----------------------------------------------------

    @cached_property
    def steps(self) -> int:
        """The steps of the whole training."""
        return self.options.steps or self.advised_steps()

    @property
    def reading(self) -> str:
        """How many texts are read, and how often, for `summary`."""
        count = len(self.corpus.training)
        read = self.steps * self.options.batch_size / max(1, count)
        times = f"{read:.0f}" if read >= 10 else f"{read:.2g}"
        return f"{count} sequences, each {times} times in {self.steps} steps"

    def read(
        self,
        checkpoint: Checkpoint,
        data: Sequence[Path],
        least: int,
        prompts_alone: bool = False,
    ) -> Corpus:
        """The texts as sequences of at least `least` tokens; raises `DataError`."""
        if checkpoint.tokenizer is None:
            raise DataError(
                f"{checkpoint.source} has no tokenizer to read the data with; add a "
                "tokenizer"
            )
        return Corpus.read(
            data,
            Tokenizer.from_str(checkpoint.tokenizer),
            checkpoint.eos_token_ids,
            self.options.sequence_length,
            least,
            self.options.validation_share,
            self.options.seed,
            prompts_alone,
            _template(checkpoint),
        )

    def check_length(self, model: Any) -> None:
        """Raise `OptionError` for sequences longer than the target's positions."""
        length = self.options.sequence_length
        config = model.config.get_text_config(decoder=True)
        most: int = config.max_position_embeddings
        if length > most:
            raise OptionError(
                f"sequence length {length} is more than the target's {most} positions; "
                f"give at most {most}"
            )

    def run(self, report: Report) -> dict[str, Any]:
        """Train to the end and return the figures of the last validation.

        Raises `TrainingError` if the loss is no longer a number. A `KeyboardInterrupt`
        saves the checkpoint first.
        """
        halves = is_fast(this_process().device)
        accelerator = Accelerator(mixed_precision="bf16" if halves else "no")
        self._check_share(accelerator.num_processes)
        optimizers = self.optimizers()
        if accelerator.is_main_process:
            self.begin()
        accelerator.wait_for_everyone()
        self._resume(optimizers)
        module, *optimizers = accelerator.prepare(self.module, *optimizers)
        figures: dict[str, Any] = {}
        try:
            figures = self._validated(accelerator, module)
            self._report(accelerator, report, math.nan, figures)
            if self.finished:  # an earlier run was killed in its last save
                self._save(accelerator, optimizers, figures)
            while self.step < self.steps:
                loss = self._advance(accelerator, module, optimizers)
                last = self.finished
                validates = last or self.step % self.options.validate_every == 0
                if validates:
                    figures = self._validated(accelerator, module)
                    self._save(accelerator, optimizers, figures)
                self._report(accelerator, report, loss, figures if validates else None)
        except KeyboardInterrupt:
            self._save(accelerator, optimizers, None)
            raise
        return figures

    def _check_share(self, processes: int) -> None:
        """Raise `OptionError` if a process had no part of a batch."""
        size = self.options.batch_size
        if size < processes:
            raise OptionError(
                f"batches of {size} sequences cannot be shared by {processes} "
                f"processes; give --batch-size {processes} or more"
            )

    def _report(
        self,
        accelerator: Any,
        report: Report,
        loss: float,
        figures: dict[str, Any] | None,
    ) -> None:
        if accelerator.is_main_process:
            report(Progress(self.step, self.steps, loss, figures))

    def _advance(
        self, accelerator: Any, module: Any, optimizers: Sequence[Any]
    ) -> float:
        """Train one step; gives its loss."""
        batch = self.batch(accelerator).to(accelerator.device)
        with accelerator.autocast():
            loss = self.loss(accelerator, module, batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(self.weights.values(), self.most_norm)
        # An infinite gradient would spoil the weights without a warning.
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            raise TrainingError(self.failure())
        # A run that resumes from half of a step would do the other half twice.
        with held_back():
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self._rate()
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
        return loss.item()

    def batch(self, accelerator: Any) -> Batch:
        """The sequences of the next step, or the part of this process."""
        return self.corpus.batch(
            self.step,
            self.options.batch_size,
            accelerator.process_index,
            accelerator.num_processes,
        )

    def _rate(self) -> float:
        """The learning rate of the next step: a warm-up, then a linear decay."""
        done = self.step / self.steps
        return self.options.learning_rate * min(
            1.0, (self.step + 1) / max(1.0, WARM_UP * self.steps), 1.0 - done
        )

    def failure(self) -> str:
        """The message for a loss that is not a number."""
        outcome = (
            f"the last good checkpoint is in {self.folder.path}"
            if self.folder.has_weights
            else "nothing had been learned yet"
        )
        advice = (
            "train again into another folder with a lower --learning-rate"
            if self.step
            else "check the target, whose own loss on this data is not a number"
        )
        return f"the loss of step {self.step + 1} is not a number; {outcome}; {advice}"

    def _validated(self, accelerator: Any, module: Any) -> dict[str, Any]:
        module.eval()
        with torch.no_grad(), accelerator.autocast():
            figures = self.validate(accelerator, module)
        module.train()
        return figures

    def _resume(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Continue from the state in the output folder, if there is one."""
        state = self.folder.read_state(self._identity())
        if state is None:
            return
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step = state["step"]

    def _identity(self) -> dict[str, Any]:
        """What must not change between the runs of one training."""
        return {
            "settings": dict(self.settings_of_run()),
            "options": asdict(self.options) | {"steps": self.steps},
            "data": self.corpus.sha256,
        }

    def _save(
        self,
        accelerator: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        figures: dict[str, Any] | None,
    ) -> None:
        """Save the checkpoint; `figures` are this step's validation, if it had one."""
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            return
        weights = {name: w.detach().cpu() for name, w in self.weights.items()}
        state = {
            "run": self._identity(),
            "step": self.step,
            "weights": weights,
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        self.save(weights, state, figures)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step == self.steps


def _template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """The chat template, with the names of the special tokens."""
    source = checkpoint.chat_template
    return ChatTemplate(source, checkpoint.special_tokens) if source else None
