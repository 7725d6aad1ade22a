"""The one loop of all trainings: steps, validations, saving, stopping and resuming."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import checkpoint_folder, weights_sha256
from jetdraft.errors import DataError, OptionError, TrainingError
from jetdraft.runtime.text.template import ChatTemplate
from jetdraft.train.data import Batch, Corpus, Example
from jetdraft.train.machine import held_back, is_fast, this_process
from jetdraft.train.task import Task, TrainingOptions
from jetdraft.train.written_texts import Writing, WrittenTexts

WARM_UP_SHARE = 0.03
"""The share of the steps in which the learning rate rises."""

WRITTEN_AT_ONCE, MOST_WRITTEN_AT_ONCE = 32, 256
"""Texts that are written at a time; each step reads all weights once."""

GPU_BYTES = 16 << 30
"""A GPU writes `WRITTEN_AT_ONCE` texts for every 16 GiB of its memory."""

Stages = Callable[[str, int, int], None]
"""Gets a stage, and how much of it is done: (stage, done, total)."""


@dataclass(frozen=True)
class Progress:
    """The state of a training; `validation` has figures after a validation."""

    step: int
    steps: int
    loss: float
    validation: dict[str, Any] | None = None


Report = Callable[[Progress], None]


def train(
    target: str,
    data: Sequence[Path],
    task: Task,
    output: Path,
    options: TrainingOptions | None = None,
    report: Report = lambda progress: None,
) -> dict[str, Any]:
    """Train to the end; gives the figures of the last validation.

    train("target", [Path("notes.txt")], Chimera(), Path("drafter"))
    """
    return Training(task, target, output, data, options).run(report)


class Training:
    """One training of a task, which can be stopped and resumed.

    A second run with the same settings resumes where the first run stopped. `target` is
    the loaded checkpoint, `base` the hash of its weights and `source` its folder;
    `module` is what learns, and `weights` are its weights that do. `progress` gets a
    stage, and how many of its texts are written.
    """

    def __init__(
        self,
        task: Task,
        target: str,
        output: Path,
        data: Sequence[Path],
        options: TrainingOptions | None = None,
        progress: Stages = lambda *state: None,
    ) -> None:
        self.task, self.options = task, options or task.options
        self.step = 0
        self._written: WrittenTexts | None = None
        self.folder = task.folder(output)
        shortest, purpose = task.shortest()
        if self.options.sequence_length < shortest:
            raise OptionError(
                f"sequences of {self.options.sequence_length} tokens are too short for "
                f"{purpose}; give {shortest} or more"
            )
        self.target, tuned = task.load(target)
        task.check_target(self.target)
        self.source = checkpoint_folder(target)
        self.base = weights_sha256(self.source) + tuned
        self._check_positions()
        torch.manual_seed(self.options.seed)
        task.check(self)
        self.corpus = self._read(data)
        task.check_texts(self)
        self._complete_texts(progress)
        torch.manual_seed(self.options.seed)
        self.module: Any = task.pupil(self)
        self.weights = task.weights(self)
        for weight in self.weights.values():
            weight.requires_grad_(True)

    # --- what a task asks for ---------------------------------------------------------

    @cached_property
    def steps(self) -> int:
        """The steps of the whole training."""
        return self.options.steps or self.task.advised_steps(self)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step == self.steps

    @property
    def parameters(self) -> int:
        """The number of trained weights; a tied weight counts once."""
        return sum(weight.numel() for weight in self.weights.values())

    @property
    def reading(self) -> str:
        """How many texts are read, and how often, in words."""
        count = len(self.corpus.training)
        read = self.steps * self.options.batch_size / max(1, count)
        times = f"{read:.0f}" if read >= 10 else f"{read:.2g}"
        return f"{count} sequences, each {times} times in {self.steps} steps"

    @cached_property
    def accelerator(self) -> Any:
        """What shares the work among processes."""
        halves = is_fast(this_process().device)
        return Accelerator(mixed_precision="bf16" if halves else "no")

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def processes(self) -> int:
        """How many processes train together."""
        return int(self.accelerator.num_processes)

    @cached_property
    def teacher(self) -> Any:
        """The target's model, on the device of this process."""
        return self.target.model.to(self.device)

    def reduced(self, numbers: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        total: Tensor = self.accelerator.reduce(numbers, "sum")
        return total

    def draw(self) -> torch.Generator:
        """Random numbers of this step, the same in all processes."""
        return torch.Generator().manual_seed(self.seed_of_step)

    @property
    def seed_of_step(self) -> int:
        """A seed of this step."""
        return 1_000_003 * self.options.seed + self.step

    def numbers(self, count: int) -> list[int]:
        """The numbers of this process's `count` sequences of the step."""
        first, stride = self.accelerator.process_index, self.processes
        start = self.step * self.options.batch_size + first
        return [start + row * stride for row in range(count)]

    def draws(self, count: int) -> list[torch.Generator]:
        """Random numbers for each sequence, whichever process learns it."""
        seed = 1_000_003 * self.options.seed
        return [torch.Generator().manual_seed(seed + n) for n in self.numbers(count)]

    def held_out_batches(self) -> Iterator[Batch]:
        """The validation texts, on the device."""
        for batch in self.corpus.validation_batches(self.options.batch_size):
            yield batch.to(self.device)

    def frequent_tokens(self, count: int) -> Tensor | None:
        """The `count` learned tokens that are most frequent, int64, ascending.

        None if the vocabulary has no more.
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
        """Raise `TrainingError` for a loss that is not a number."""
        if not torch.isfinite(lost).all():
            raise TrainingError(self.failure())

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

    # --- the texts --------------------------------------------------------------------

    def _check_positions(self) -> None:
        """Raise `OptionError` for sequences longer than the target's positions."""
        length = self.options.sequence_length
        most = self.task.positions(self.target.model)
        if most is not None and length > most:
            raise OptionError(
                f"sequence length {length} is more than the target's {most} positions; "
                f"give at most {most}"
            )

    def _read(self, data: Sequence[Path]) -> Corpus:
        target, options = self.target, self.options
        if target.tokenizer is None:
            raise DataError(
                f"{target.source} has no tokenizer to read the data with; add a "
                "tokenizer"
            )
        return Corpus.read(
            data,
            Tokenizer.from_str(target.tokenizer),
            target.eos_token_ids,
            options.sequence_length,
            self.task.least_tokens,
            options.validation_share,
            options.seed,
            self.task.completes_prompts,
            _template(target),
        )

    def _complete_texts(self, progress: Stages) -> None:
        """Let the target complete prompts alone, or with `regenerate` all prompts."""
        regenerate = getattr(self.task.settings, "regenerate", False)
        count = len(self.corpus.training)
        # A corpus of one text validates with it too.
        apart = self.corpus.validation[0] is not self.corpus.training[0]
        texts = self.corpus.training + (self.corpus.validation if apart else [])
        chosen = [
            n for n, text in enumerate(texts) if regenerate or not text.is_written
        ]
        if not chosen:
            return
        with this_process().main_process_first():
            self.task.begin(self)
        texts = self._completed(texts, chosen, progress)
        self.corpus.training = texts[:count]
        self.corpus.validation = texts[count:] or texts

    def _completed(
        self, texts: list[Example], chosen: list[int], progress: Stages
    ) -> list[Example]:
        """The texts, of which the target has written the chosen, now or earlier."""
        options, state = self.options, this_process()
        parts = (options.seed, options.sequence_length, options.validation_share)
        self._written = WrittenTexts(
            self.folder.path,
            f"{self.base} {self.corpus.sha256} {parts} {len(chosen)}",
            state.process_index,
            state.num_processes,
        )
        writing = Writing(
            self.target.model.to(state.device),
            self.target.eos_token_ids,
            options.sequence_length,
            max(options.batch_size, _written_at_once(state.device)),
            options.seed,
            self.task.writer(self.target),
        )
        return self._written.completed(
            writing, texts, chosen, lambda done, total: progress("write", done, total)
        )

    # --- the loop ---------------------------------------------------------------------

    def run(self, report: Report = lambda progress: None) -> dict[str, Any]:
        """Train to the end and return the figures of the last validation.

        Raises `TrainingError` if the loss is no longer a number. A `KeyboardInterrupt`
        saves the checkpoint first.
        """
        accelerator = self.accelerator
        check_share(self.options.batch_size, self.processes)
        optimizers = self.task.optimizers(self)
        if accelerator.is_main_process:
            self.task.begin(self)
        accelerator.wait_for_everyone()
        self._resume(optimizers)
        module, *optimizers = accelerator.prepare(self.module, *optimizers)
        figures: dict[str, Any] = {}
        try:
            figures = self._validated(module)
            self._report(report, math.nan, figures)
            if self.finished:  # an earlier run was killed in its last save
                self._save(optimizers, figures)
            while not self.finished:
                loss = self._advance(module, optimizers)
                validates = (
                    self.finished or self.step % self.options.validate_every == 0
                )
                if validates:
                    figures = self._validated(module)
                    self._save(optimizers, figures)
                self._report(report, loss, figures if validates else None)
        except KeyboardInterrupt:
            self._save(optimizers, None)
            raise
        return figures

    def _report(
        self, report: Report, loss: float, figures: dict[str, Any] | None
    ) -> None:
        if self.accelerator.is_main_process:
            report(Progress(self.step, self.steps, loss, figures))

    def _advance(self, module: Any, optimizers: Sequence[Any]) -> float:
        """Train one step; gives its loss."""
        accelerator = self.accelerator
        batch = self.task.batch(self, self._batch()).to(self.device)
        with accelerator.autocast():
            loss = self.task.loss(self, module, batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(
            self.weights.values(), self.task.largest_norm
        )
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

    def _batch(self) -> Batch:
        """The sequences of the next step, or the part of this process."""
        return self.corpus.batch(
            self.step,
            self.options.batch_size,
            self.accelerator.process_index,
            self.processes,
        )

    def _rate(self) -> float:
        """The learning rate of the next step: a warm-up, then a linear decay."""
        done = self.step / self.steps
        return self.options.learning_rate * min(
            1.0, (self.step + 1) / max(1.0, WARM_UP_SHARE * self.steps), 1.0 - done
        )

    def _validated(self, module: Any) -> dict[str, Any]:
        module.eval()
        with torch.no_grad(), self.accelerator.autocast():
            figures = self.task.validate(self, self.accelerator.unwrap_model(module))
        module.train()
        return figures

    # --- the state --------------------------------------------------------------------

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
            "settings": dict(self.task.settings_of_run(self)),
            "options": asdict(self.options) | {"steps": self.steps},
            "data": self.corpus.sha256,
        }

    def _save(self, optimizers: Sequence[Any], figures: dict[str, Any] | None) -> None:
        """Save the checkpoint; `figures` are this step's validation, if it had one."""
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        weights = {name: w.detach().cpu() for name, w in self.weights.items()}
        state = {
            "run": self._identity(),
            "step": self.step,
            "weights": weights,
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        self.task.save(self, weights, state, figures)
        if self.finished and self._written is not None:
            self._written.forget()  # only a training that goes on needs them


def check_share(batch_size: int, processes: int) -> None:
    """Raise `OptionError` if a process had no part of a batch."""
    if batch_size < processes:
        raise OptionError(
            f"batches of {batch_size} sequences cannot be shared by {processes} "
            f"processes; give --batch-size {processes} or more"
        )


def _written_at_once(device: torch.device) -> int:
    """Texts that a device writes at a time."""
    if device.type != "cuda":
        return WRITTEN_AT_ONCE
    memory = torch.cuda.get_device_properties(device).total_memory
    return min(
        MOST_WRITTEN_AT_ONCE, WRITTEN_AT_ONCE * max(1, round(memory / GPU_BYTES))
    )


def _template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """The chat template, with the names of the special tokens."""
    source = checkpoint.chat_template
    return ChatTemplate(source, checkpoint.special_tokens) if source else None
