"""Trains block drafters of encoder-decoders: Spec-Drafter (SpecDec, 2203.16487)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.checkpoints.source_attention import implement
from jetdraft.errors import DataError, OptionError
from jetdraft.export.seams import most_positions
from jetdraft.methods.block.module import (
    SourceDrafter,
    decoder_list,
    source_config,
    source_fields,
)
from jetdraft.train.block.block_losses import BlockObjective
from jetdraft.train.block.block_settings import SourceBlockSettings
from jetdraft.train.block.block_training import TOKENS_PER_WEIGHT, BlockTraining
from jetdraft.train.block.source_losses import (
    SourceBatch,
    SourceObjective,
    SourceTeacher,
)
from jetdraft.train.data import Batch, Corpus
from jetdraft.train.taught.source_continuation import source_continuations
from jetdraft.train.training import Training

LAYERS = 2
"""Layers of a new drafter's decoder: the paper's is as shallow."""


class SourceBlockTraining(BlockTraining):
    """Trains a drafter for an encoder-decoder, on pairs of a source and a text.

    Encoder and decoder begin as the target's own, so AdamW moves all weights a little.
    """

    product = "a block drafter"
    settings: SourceBlockSettings
    module: SourceObjective
    first_anchor = 0

    def check_target(self) -> None:
        """Raise `UnsupportedModelError` for a target that reads no source of text."""
        source_config(self.target, 1, 1)
        implement(self.target.model, "sdpa")

    def check_length(self, model: Any) -> None:
        """Raise `OptionError` for sequences longer than a table of positions."""
        length, most = self.options.sequence_length, most_positions(model)
        if most is not None and length > most:
            raise OptionError(
                f"sequence length {length} is more than the target's {most} positions; "
                f"give at most {most}"
            )

    def read(self, *args: Any, **options: Any) -> Corpus:
        """Read the pairs; raise `DataError` for a text without a source."""
        corpus = super().read(*args, **options)
        if any(not t.prompt_size for t in (*corpus.training, *corpus.validation)):
            raise DataError(
                "an encoder-decoder writes about a source, and the data has texts "
                "without one; give .jsonl with prompt and completion"
            )
        return corpus

    @property
    def writer(self) -> Any:
        """Writes about sources."""
        return partial(source_continuations, start=self.target.start_token_ids)

    def count_layers(self) -> int:
        """The layers of the target's decoder."""
        return len(decoder_list(self.target.model)[1])

    def new_config(self) -> HeadConfig:
        """The config that the settings ask for; two layers if they name none."""
        layers = self.settings.layers or min(LAYERS, self.layers)
        if layers > self.layers:
            raise OptionError(
                f"a drafter begins with the target's layers, of which its decoder has "
                f"{self.layers}; give --layers 1 to {self.layers}"
            )
        return source_config(self.target, layers, self.settings.block_rows)

    def new_objective(self, of_text: bool) -> BlockObjective:
        """A drafter that begins as the target, with its loss."""
        drafter = SourceDrafter(self.config, self.target.model)
        words = drafter.get_input_embeddings().weight
        nn.init.normal_(drafter.masks, std=float(words.std()))
        return SourceObjective(drafter, of_text)

    def new_teacher(self, model: Any) -> Any:
        """The target, which reads sources."""
        return SourceTeacher(model)

    def prepared(self, batch: Batch) -> Batch:
        """The batch with each source apart from its text."""
        return SourceBatch.of(batch, self.target.start_token_ids)

    def loss(self, accelerator: Any, module: Any, batch: Batch) -> Tensor:
        """The loss of other blocks; the share of told tokens falls to 0."""
        share = self.settings.glancing * (1 - self.step / self.steps)
        accelerator.unwrap_model(module).glancing = share
        return super().loss(accelerator, module, batch)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW for all: the weights have learned much already."""
        return Training.optimizers(self)

    def advised_steps(self) -> int:
        """The steps that learn twenty guesses for each weight of the decoder."""
        decoder = self.module.drafter.get_decoder()
        weights = sum(weight.numel() for weight in decoder.parameters())
        blocks: int = self.settings.anchors * self.options.batch_size
        guesses: int = blocks * self.config.slots
        steps: int = TOKENS_PER_WEIGHT * weights // guesses
        return max(200, steps)

    def published(
        self, weights: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json, and the tensors by their names in the drafter."""
        dtype = torch.float16 if self.settings.half else torch.float32
        fields = source_fields(self.target, self.config)
        return fields, {n: w.to(dtype).contiguous() for n, w in weights.items()}
