"""Trains streams: their embeddings, LoRA and the pruning adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from jetdraft.checkpoints.checkpoint import (
    Checkpoint,
    checkpoint_folder,
    weights_sha256,
)
from jetdraft.checkpoints.gguf import is_gguf
from jetdraft.checkpoints.parameters import convert
from jetdraft.checkpoints.streamed import (
    SHARED,
    Streamed,
    Streams,
    StreamSettings,
    add_adapters,
    decoder_layers,
    stream_weights,
)
from jetdraft.errors import CheckpointError, DataError, OptionError, TrainingError
from jetdraft.train.data import Corpus
from jetdraft.train.losses import Losses, losses
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.stream_attention import IMPLEMENTATION

WARM_UP = 0.03
"""The share of the steps in which the learning rate rises."""

Report = Callable[["Progress"], None]


@dataclass(frozen=True)
class TrainingOptions:
    """How long and how fast to train.

    `sequence_length` is in tokens. The `learning_rate` falls linearly to zero.

    TrainingOptions(steps=200, batch_size=8, sequence_length=256)
    """

    steps: int = 200
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
            if not least <= value <= most:
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


class StreamTraining:
    """A training that can be stopped and resumed.

    The output is a checkpoint folder: copies of the target's files, and beside them the
    streams. A second run with the same settings resumes where the first run stopped.

        StreamTraining("target", "output", [Path("notes.txt")]).run(print)
    """

    def __init__(
        self,
        target: str,
        output: Path,
        data: Sequence[Path],
        settings: StreamSettings | None = None,
        options: TrainingOptions | None = None,
    ) -> None:
        self.options = options or TrainingOptions()
        settings = settings or StreamSettings()
        settings.check(1 << 20)
        self.folder = RunFolder(output)
        if self.options.sequence_length < settings.gamma + 2:
            raise OptionError(
                f"sequences of {self.options.sequence_length} tokens are too short for "
                f"{settings.gamma} streams; give {settings.gamma + 2} or more"
            )
        if is_gguf(target):
            raise CheckpointError(
                f"{target} is a GGUF file, and streams are trained for a folder; give "
                "the model's Hugging Face folder"
            )
        checkpoint = Checkpoint.load(target, torch.float32)
        convert(checkpoint.model, torch.float32)
        if checkpoint.packed is not None and settings.mode == SHARED:
            raise CheckpointError(
                f"{target} is quantized already, so its weights cannot be tuned; give "
                "mode lossless, or the checkpoint before quantization"
            )
        if checkpoint.streams is not None:
            raise CheckpointError(
                f"{target} already has streams; give a checkpoint without streams"
            )
        self.source = checkpoint_folder(target)
        self.settings = replace(settings, base=weights_sha256(self.source))
        model = checkpoint.model
        self.settings.check(len(decoder_layers(model)))
        self._check_length(model)
        self.corpus = self._read(checkpoint, data)
        torch.manual_seed(self.options.seed)
        add_adapters(model, self.settings)
        model.set_attn_implementation(IMPLEMENTATION)
        hidden = model.get_input_embeddings().embedding_dim
        self.streamed = Streamed(model, Streams(self.settings, hidden))
        self.weights = stream_weights(self.streamed)
        for parameter in self.weights.values():
            parameter.requires_grad_(True)
        self.step = 0

    @property
    def parameters(self) -> dict[str, int]:
        """The number of trained weights: in the streams themselves, and in LoRA."""
        stream_count = sum(p.numel() for p in self.streamed.streams.parameters())
        total = sum(weight.numel() for weight in self.weights.values())
        return {"streams": stream_count, "lora": total - stream_count}

    def _read(self, checkpoint: Checkpoint, data: Sequence[Path]) -> Corpus:
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
            self.settings.gamma + 2,
            self.options.validation_share,
            self.options.seed,
        )

    def _check_length(self, model: PreTrainedModel) -> None:
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
        accelerator = Accelerator(mixed_precision="bf16")
        optimizer = torch.optim.AdamW(self.weights.values(), lr=0.0)
        if accelerator.is_main_process:
            self.folder.copy_base(self.source, self.settings.base)
        accelerator.wait_for_everyone()
        self._resume(optimizer)
        streamed, optimizer = accelerator.prepare(self.streamed, optimizer)
        figures: dict[str, Any] = {}
        try:
            figures = self._validate(accelerator, streamed)
            self._report(accelerator, report, math.nan, figures)
            while self.step < self.options.steps:
                loss = self._advance(accelerator, streamed, optimizer)
                last = self.step == self.options.steps
                validates = last or self.step % self.options.validate_every == 0
                if validates:
                    figures = self._validate(accelerator, streamed)
                    self._save(accelerator, optimizer, figures)
                self._report(accelerator, report, loss, figures if validates else None)
        except KeyboardInterrupt:
            self._save(accelerator, optimizer, None)
            raise
        return figures

    def _report(
        self,
        accelerator: Any,
        report: Report,
        loss: float,
        figures: dict[str, Any] | None,
    ) -> None:
        if accelerator.is_main_process:
            report(Progress(self.step, self.options.steps, loss, figures))

    def _advance(self, accelerator: Any, streamed: Any, optimizer: Any) -> float:
        """Train one step; gives its loss."""
        batch = self.corpus.batch(
            self.step,
            self.options.batch_size,
            accelerator.process_index,
            accelerator.num_processes,
        ).to(accelerator.device)
        with accelerator.autocast():
            loss = losses(streamed, batch, self.settings.gamma).total(
                self.settings.mode
            )
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(self.weights.values(), 1.0)
        # An infinite gradient would spoil the weights without a warning.
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            raise TrainingError(self._failure())
        for group in optimizer.param_groups:
            group["lr"] = self._rate()
        optimizer.step()
        optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def _rate(self) -> float:
        """The learning rate of the next step: a warm-up, then a linear decay."""
        done = self.step / self.options.steps
        return self.options.learning_rate * min(
            1.0, (self.step + 1) / max(1.0, WARM_UP * self.options.steps), 1.0 - done
        )

    def _failure(self) -> str:
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

    def _validate(self, accelerator: Any, streamed: Any) -> dict[str, Any]:
        """Means over the validation sequences."""
        streamed.eval()
        parts: list[Losses] = []
        with torch.no_grad(), accelerator.autocast():
            for batch in self.corpus.validation_batches(self.options.batch_size):
                on_device = batch.to(accelerator.device)
                parts.append(losses(streamed, on_device, self.settings.gamma))
        streamed.train()

        if not all(torch.isfinite(part.main) for part in parts):
            raise TrainingError(self._failure())

        def mean(name: str) -> Any:
            values = torch.stack([getattr(part, name) for part in parts]).float()
            return [round(x, 4) for x in values.mean(0).reshape(-1).tolist()]

        return {
            "main_loss": mean("main")[0],
            "stream_losses": mean("streams"),
            "early_loss": mean("early")[0],
            "acceptance": mean("acceptance"),
        }

    # --- saving -----------------------------------------------------------------------

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        """Continue from the state in the output folder, if there is one."""
        state = self.folder.read_state(self._identity())
        if state is None:
            return
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def _identity(self) -> dict[str, Any]:
        """What must not change between the runs of one training."""
        return {
            "settings": asdict(self.settings),
            "options": asdict(self.options),
            "data": self.corpus.sha256,
        }

    def _save(
        self,
        accelerator: Any,
        optimizer: torch.optim.Optimizer,
        figures: dict[str, Any] | None,
    ) -> None:
        """Save the checkpoint; `figures` are this step's validation, if it had one."""
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            return
        weights = {name: w.detach().cpu() for name, w in self.weights.items()}
        description = {
            **self.settings.to_json(),
            "step": self.step,
            "parameters": self.parameters,
            "validation": figures,
        }
        state = {
            "run": self._identity(),
            "step": self.step,
            "weights": weights,
            "optimizer": optimizer.state_dict(),
        }
        finished = self.step == self.options.steps
        self.folder.save(weights, description, state, finished)
