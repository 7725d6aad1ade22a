"""Trains streams: their embeddings, LoRA and the pruning adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import checkpoint_folder, weights_sha256
from jetdraft.checkpoints.gguf import is_gguf
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.checkpoints.parameters import convert
from jetdraft.checkpoints.streams import (
    SHARED,
    Streamed,
    Streams,
    StreamSettings,
    add_adapters,
)
from jetdraft.errors import CheckpointError, OptionError, TrainingError
from jetdraft.train.data import Batch
from jetdraft.train.losses import Losses, losses
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.stream_attention import IMPLEMENTATION
from jetdraft.train.training import Training, TrainingOptions


class StreamTraining(Training):
    """A training that can be stopped and resumed.

    The output is a checkpoint folder: copies of the target's files, and beside them the
    streams. A second run with the same settings resumes where the first run stopped.

        StreamTraining("target", "output", [Path("notes.txt")]).run(print)
    """

    module: Streamed
    product = "streams"

    def __init__(
        self,
        target: str,
        output: Path,
        data: Sequence[Path],
        settings: StreamSettings | None = None,
        options: TrainingOptions | None = None,
    ) -> None:
        settings = settings or StreamSettings()
        settings.check(1 << 20)
        super().__init__(RunFolder(output), options or TrainingOptions())
        if self.options.sequence_length < settings.gamma + 2:
            raise OptionError(
                f"sequences of {self.options.sequence_length} tokens are too short for "
                f"{settings.gamma} streams; give {settings.gamma + 2} or more"
            )
        checkpoint = _loaded(target, settings.mode)
        self.source = checkpoint_folder(target)
        self.settings = replace(settings, base=weights_sha256(self.source))
        model = checkpoint.model
        self.settings.check(len(decoder_layers(model)))
        self.check_length(model)
        self.corpus = self.read(checkpoint, data, self.settings.gamma + 2)
        torch.manual_seed(self.options.seed)
        add_adapters(model, self.settings)
        model.set_attn_implementation(IMPLEMENTATION)
        hidden = model.get_input_embeddings().embedding_dim
        self.module = Streamed(model, Streams(self.settings, hidden))
        self._begin_embeddings()
        self.weights = self.module.task
        for parameter in self.weights.values():
            parameter.requires_grad_(True)

    @torch.no_grad()
    def _begin_embeddings(self) -> None:
        """Draw embeddings as large as the hidden states that they are added to.

        With small embeddings LoRA can hardly tell a stream from its carrier, and what
        it learns for streams changes the text (docs/log/training.md has figures).
        """
        ids = torch.tensor([self.corpus.training[0].ids])
        positions = torch.arange(ids.shape[1])[None]
        every = torch.arange(self.settings.gamma)
        first = torch.zeros_like(every)
        _, _, hidden = self.module(
            ids, positions, first, every, first[:1], use_cache=False
        )
        # A few entries of some rows are a hundred times as large; the median is not.
        self.module.streams.embeddings.normal_().mul_(hidden.abs().median())

    @property
    def parameters(self) -> dict[str, int]:
        """The number of trained weights: in the streams themselves, and in LoRA."""
        stream_count = sum(p.numel() for p in self.module.streams.parameters())
        total = sum(weight.numel() for weight in self.weights.values())
        return {"streams": stream_count, "lora": total - stream_count}

    def summary(self) -> str:
        """What is trained, on how many sequences."""
        counts = self.parameters
        return (
            f"training {counts['streams']} weights of the streams and "
            f"{counts['lora']} of LoRA on {self.reading}"
        )

    def told(self, figures: Mapping[str, Any]) -> str:
        """The losses, and how often each stream is right."""
        rates = " ".join(f"{share:.2f}" for share in figures["acceptance"])
        stream_losses = " ".join(f"{loss:.2f}" for loss in figures["stream_losses"])
        return (
            f"validation loss {figures['main_loss']:.2f}, streams {stream_losses}, "
            f"predicted acceptance {rates}"
        )

    def settings_of_run(self) -> dict[str, Any]:
        """The settings of the streams."""
        return asdict(self.settings)

    def begin(self) -> None:
        """Copy the target's files into the output folder."""
        self.folder.copy_base(self.source, self.settings.base)

    def loss(self, accelerator: Any, module: Any, batch: Batch) -> Tensor:
        """The loss over the next n-gram."""
        part = losses(module, batch, self.settings.gamma)
        places = accelerator.reduce(part.places, "sum").clamp(min=1)
        # Processes average their gradients, and each has a part of the places.
        weights = part.places * accelerator.num_processes / places
        return part.total(self.settings.mode, weights)

    def validate(self, accelerator: Any, module: Any) -> dict[str, Any]:
        """Means over the validation sequences."""
        parts: list[Losses] = []
        for batch in self.corpus.validation_batches(self.options.batch_size):
            on_device = batch.to(accelerator.device)
            parts.append(losses(module, on_device, self.settings.gamma))

        if not all(torch.isfinite(part.main) for part in parts):
            raise TrainingError(self.failure())

        def mean(name: str) -> Any:
            values = torch.stack([getattr(part, name) for part in parts]).float()
            return [round(x, 4) for x in values.mean(0).reshape(-1).tolist()]

        return {
            "main_loss": mean("main")[0],
            "stream_losses": mean("streams"),
            "early_loss": mean("early")[0],
            "acceptance": mean("acceptance"),
        }

    def save(
        self, weights: dict[str, Tensor], state: Any, figures: dict[str, Any] | None
    ) -> None:
        """Write the streams beside the target's files."""
        description = {
            **self.settings.to_json(),
            "step": self.step,
            "parameters": self.parameters,
            "validation": figures,
        }
        self.folder.save(weights, description, state, self.finished)


def _loaded(target: str, mode: str) -> Checkpoint:
    """The target in float32; raises `CheckpointError` if it cannot learn streams."""
    if is_gguf(target):
        raise CheckpointError(
            f"{target} is a GGUF file, and streams are trained for a folder; give "
            "the model's Hugging Face folder"
        )
    checkpoint = Checkpoint.load(target, torch.float32)
    convert(checkpoint.model, torch.float32)
    if checkpoint.packed is not None and mode == SHARED:
        raise CheckpointError(
            f"{target} is quantized already, so its weights cannot be tuned; give "
            "mode lossless, or the checkpoint before quantization"
        )
    if checkpoint.streams is not None:
        raise CheckpointError(
            f"{target} already has streams; give a checkpoint without streams"
        )
    return checkpoint
