"""The one loop of all trainings: steps, validations, saving, stopping and resuming."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from jetdraft.checkpoints.folder import checkpoint_folder, weights_sha256
from jetdraft.errors import DataError, OptionError
from jetdraft.runtime.text.template import ChatTemplate
from jetdraft.train.data import Corpus, TextReader
from jetdraft.train.machine import defer_interrupts, this_process
from jetdraft.train.task import Run, Task, TrainingOptions
from jetdraft.train.written_texts import WrittenTexts

WARM_UP_SHARE = 0.03  # The share of the steps in which the learning rate rises.
# Texts that the target writes at a time; each step reads all weights once.
TEXTS_AT_ONCE, MAX_TEXTS_AT_ONCE = 32, 256
GPU_BYTES = 16 << 30  # A GPU writes `TEXTS_AT_ONCE` texts for each 16 GiB.
ReportStage = Callable[[str, int, int], None]  # Stage, steps done, steps in all.


@dataclass(frozen=True)
class Progress:
    """How far a training is; `validation` has figures if this step was validated."""

    step: int
    steps: int
    loss: float
    validation: dict[str, Any] | None = None


Report = Callable[[Progress], None]  # Called after each step, and before the first one.


class Training(Run):
    """One training of a task, which can be stopped and resumed.

    A second run with the same settings resumes where the first run stopped. While the
    target completes texts, `progress` gets "write", the texts done, and all texts.

        Training(ChimeraTask(), "target", Path("drafter"), [Path("notes.txt")]).run()
    """

    def __init__(
        self,
        task: Task,
        target: str,
        output: Path,
        data: Sequence[Path],
        options: TrainingOptions | None = None,
        progress: ReportStage = lambda *state: None,
    ) -> None:
        self.task, self.options = task, options or task.options
        self.step = 0
        self._written: WrittenTexts | None = None
        self.folder = task.folder(output)
        length = self.options.sequence_length
        shortest, purpose = task.shortest_sequence()
        if length < shortest:
            fact = f"sequences of {length} tokens are too short for {purpose}"
            raise OptionError(f"{fact}; give {shortest} or more")
        self.target, tuned = task.load(target)
        task.check_target(self.target)
        self.source = checkpoint_folder(target)
        self.base = weights_sha256(self.source) + tuned
        most = task.max_positions(self.target.model)
        if most is not None and length > most:
            raise OptionError(
                f"sequence length {length} is more than the target's {most} positions; "
                f"give at most {most}"
            )
        torch.manual_seed(self.options.seed)
        task.check(self)
        self.corpus = self._read_corpus(data)
        task.check_texts(self)
        self._complete_texts(progress)
        torch.manual_seed(self.options.seed)
        self.module: Any = task.pupil(task.new_drafter(self))
        self.weights = task.weights(self)
        for weight in self.weights.values():
            weight.requires_grad_(True)
        self.steps = self.options.steps or task.advised_steps(self)

    def _read_corpus(self, data: Sequence[Path]) -> Corpus:
        target, options = self.target, self.options
        if target.tokenizer is None:
            fact = f"{target.source} has no tokenizer to read the data with"
            raise DataError(f"{fact}; add a tokenizer")
        chat = target.chat_template
        reader = TextReader(
            Tokenizer.from_str(target.tokenizer),
            target.eos_token_ids,
            options.sequence_length,
            self.task.least_tokens,
            self.task.completes_prompts,
            ChatTemplate(chat, target.special_tokens) if chat else None,
        )
        return Corpus.read(data, reader, options.validation_share, options.seed)

    def _complete_texts(self, progress: ReportStage) -> None:
        regenerate = getattr(self.task.settings, "regenerate", False)
        count = len(self.corpus.training)
        apart = self.corpus.validation[0] is not self.corpus.training[0]
        texts = self.corpus.training + (self.corpus.validation if apart else [])
        chosen = [n for n, t in enumerate(texts) if regenerate or not t.is_written]
        if not chosen:
            return
        options, state = self.options, this_process()
        with state.main_process_first():
            self.task.begin(self)
        parts = (options.seed, options.sequence_length, options.validation_share)
        together = TEXTS_AT_ONCE
        if state.device.type == "cuda":
            memory = torch.cuda.get_device_properties(state.device).total_memory
            together *= max(1, round(memory / GPU_BYTES))
        self._written = WrittenTexts(
            self.folder.path / "written",
            f"{self.base} {self.corpus.sha256} {parts} {len(chosen)}",
            self.target.model.to(state.device),
            self.target.eos_token_ids,
            options.sequence_length,
            max(options.batch_size, min(together, MAX_TEXTS_AT_ONCE)),
            options.seed,
            self.task.writer(self.target),
            state.process_index,
            state.num_processes,
        )
        texts = self._written.complete(texts, chosen, partial(progress, "write"))
        self.corpus.training = texts[:count]
        self.corpus.validation = texts[count:] or texts

    def run(self, report: Report = lambda progress: None) -> dict[str, Any]:
        """Train to the end; returns the figures of the last validation.

        Raises `TrainingError` for a loss that is no number; an interrupt saves first.
        """
        accelerator = self.accelerator
        check_batch_size(self.options.batch_size, self.processes)
        optimizers = self.task.optimizers(self)
        if accelerator.is_main_process:
            self.task.begin(self)
        accelerator.wait_for_everyone()
        state = self.folder.read_state(self._identity())
        if state is not None:
            with torch.no_grad():
                for name, weight in self.weights.items():
                    weight.copy_(state["weights"][name])
            for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.step = state["step"]
        module, *optimizers = accelerator.prepare(self.module, *optimizers)
        figures: dict[str, Any] = {}
        try:
            figures = self._run_validation(module)
            self._report(report, math.nan, figures)
            if self.is_finished:  # an earlier run was killed in its last save
                self._save(optimizers, figures)
            while not self.is_finished:
                loss, latest = self._train_step(module, optimizers), None
                if self.is_finished or self.step % self.options.validate_every == 0:
                    figures = latest = self._run_validation(module)
                    self._save(optimizers, figures)
                self._report(report, loss, latest)
        except KeyboardInterrupt:
            self._save(optimizers, None)
            raise
        return figures

    def _report(self, report: Report, loss: float, figures: Any) -> None:
        if self.accelerator.is_main_process:
            report(Progress(self.step, self.steps, loss, figures))

    def _train_step(self, module: Any, optimizers: Sequence[Any]) -> float:
        """Train one step; returns its loss. The rate rises in a warm-up, then falls."""
        accelerator = self.accelerator
        rise = (self.step + 1) / max(1.0, WARM_UP_SHARE * self.steps)
        rate = self.options.learning_rate * min(1.0, rise, 1.0 - self.step / self.steps)
        size, part = self.options.batch_size, accelerator.process_index
        batch = self.corpus.batch(self.step, size, part, self.processes)
        batch = self.task.batch(self, batch).to(self.device)
        with accelerator.autocast():
            loss = self.task.loss(self, module, batch)
        accelerator.backward(loss)
        most = self.task.largest_norm
        norm = accelerator.clip_grad_norm_(self.weights.values(), most)
        # An infinite gradient would spoil the weights without a warning.
        self.check_finite(torch.stack([loss.detach(), norm]))
        # A run that resumes from half of a step would do the other half twice.
        with defer_interrupts():
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1
        return loss.item()

    def _run_validation(self, module: Any) -> dict[str, Any]:
        module.eval()
        with torch.no_grad(), self.accelerator.autocast():
            figures = self.task.validate(self, self.accelerator.unwrap_model(module))
        module.train()
        return figures

    def _identity(self) -> dict[str, Any]:
        return {
            "settings": self.task.settings_of_run(self),
            "options": asdict(self.options) | {"steps": self.steps},
            "data": self.corpus.sha256,
        }

    def _save(self, optimizers: Sequence[Any], figures: dict[str, Any] | None) -> None:
        """Save from the main process; `figures` are None after an interrupt."""
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
        if self.is_finished and self._written is not None:
            self._written.delete()  # a finished training needs them no more


def check_batch_size(batch_size: int, processes: int) -> None:
    """Raise `OptionError` if a batch has fewer sequences than there are processes."""
    if batch_size < processes:
        raise OptionError(
            f"batches of {batch_size} sequences cannot be shared by {processes} "
            f"processes; give --batch-size {processes} or more"
        )
