"""A training as its task sees it: options, target, texts, devices and seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.errors import TrainingError
from jetdraft.options import Checked, setting
from jetdraft.train.data import Batch, Corpus
from jetdraft.train.machine import has_fast_halves, this_process
from jetdraft.train.run_folder import RunFolder

SEED_HELP = "Seed of the random numbers; the same seed gives the same training."
"""The help of the option `seed`."""


@dataclass(frozen=True)
class TrainingOptions(Checked):
    """How long and how fast to train; `steps` None is `Task.advised_steps`."""

    steps: int | None = setting(
        200,
        "Steps of training.",
        (1, 10**9),
        unset="what the drafter's size asks for, at most 50 readings",
    )
    batch_size: int = setting(8, "Sequences per step.", (1, 10**6))
    sequence_length: int = setting(256, "Tokens per sequence.", (2, 10**6))
    learning_rate: float = setting(
        5e-4, "Learning rate of the first step; it falls to zero.", (0.0, 1.0)
    )
    validation_share: float = setting(
        0.05, "Share of the sequences held out for validation.", (0.0, 0.5)
    )
    validate_every: int = setting(
        50, "Steps between validations; each saves what was learned.", (1, 10**9)
    )
    seed: int = setting(0, SEED_HELP, group="sampling", show_default=True)


class Run:
    """A training as its task sees it; `Training` sets the attributes.

    `target` is the loaded checkpoint, `source` its folder, and `base` the hash of its
    weights. `module` is the task's pupil, and `weights` are the trained weights in it,
    by name. `step` of `steps` steps are done.
    """

    options: TrainingOptions
    folder: RunFolder
    target: Checkpoint
    source: Path
    base: str
    corpus: Corpus
    module: Any
    weights: dict[str, Tensor]
    step: int
    steps: int

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self.step == self.steps

    @property
    def parameters(self) -> int:
        """The number of trained weights; a tied weight counts once."""
        return sum(weight.numel() for weight in self.weights.values())

    @property
    def reading(self) -> str:
        """The number of sequences and how often each is read, for the headline."""
        count = len(self.corpus.training)
        read = self.steps * self.options.batch_size / max(1, count)
        times = f"{read:.0f}" if read >= 10 else f"{read:.2g}"
        return f"{count} sequences, each {times} times in {self.steps} steps"

    @cached_property
    def accelerator(self) -> Any:
        """The `Accelerator` of all processes, with bfloat16 where that is fast."""
        halves = has_fast_halves(this_process().device)
        return Accelerator(mixed_precision="bf16" if halves else "no")

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def processes(self) -> int:
        """The number of processes that train together."""
        return int(self.accelerator.num_processes)

    @cached_property
    def teacher(self) -> Any:
        """The target's model, moved to the device of this process."""
        return self.target.model.to(self.device)

    def sum_over_processes(self, numbers: Tensor) -> Tensor:
        """Add a tensor up over all processes, each of which must call this."""
        total: Tensor = self.accelerator.reduce(numbers, "sum")
        return total

    @property
    def seed_of_step(self) -> int:
        """A seed of this step, the same in all processes."""
        return 1_000_003 * self.options.seed + self.step

    def sequence_numbers(self, count: int) -> list[int]:
        """Return the numbers of this process's `count` sequences in the training."""
        first, stride = self.accelerator.process_index, self.processes
        start = self.step * self.options.batch_size + first
        return [start + row * stride for row in range(count)]

    def sequence_generators(self, count: int) -> list[torch.Generator]:
        """Make a generator for each sequence of this step, seeded by its number."""
        seed, numbers = 1_000_003 * self.options.seed, self.sequence_numbers(count)
        return [torch.Generator().manual_seed(seed + n) for n in numbers]

    def held_out_batches(self) -> Iterator[Batch]:
        """Yield the batches of validation texts, on the device of this process."""
        for batch in self.corpus.validation_batches(self.options.batch_size):
            yield batch.to(self.device)

    def frequent_tokens(self, count: int) -> Tensor | None:
        """The `count` most frequent learned token ids, int64 [count], ascending.

        None if the vocabulary has no more than `count` tokens.
        """
        rows = self.target.vocab_size
        if count >= rows:
            return None
        learned = [
            token
            for example in self.corpus.training
            for token, is_learned in zip(example.ids, example.learned, strict=True)
            if is_learned
        ]
        counts = torch.bincount(torch.tensor(learned), minlength=rows)
        return counts.argsort(descending=True, stable=True)[:count].sort().values

    def check_finite(self, lost: Tensor) -> None:
        """Raise `TrainingError` if a number in `lost` is infinite or NaN."""
        if torch.isfinite(lost).all():
            return
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
        raise TrainingError(
            f"the loss of step {self.step + 1} is not a number; {outcome}; {advice}"
        )
