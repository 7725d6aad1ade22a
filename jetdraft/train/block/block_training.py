"""Trains drafters that fill a block: DFlash heads, and diffusion models."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from jetdraft.checkpoints.heads.blocks import BlockConfig
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.errors import OptionError
from jetdraft.methods.dflash.module import default_outputs
from jetdraft.train.block.block_layout import (
    dflash_config,
    diffusion_config,
    new_block_drafter,
    written,
)
from jetdraft.train.block.block_losses import BlockObjective, total
from jetdraft.train.block.block_places import Blocks
from jetdraft.train.block.block_settings import (
    TEXT,
    BlockSettings,
    DFlashSettings,
    DiffusionSettings,
)
from jetdraft.train.data import Batch
from jetdraft.train.head.teacher import Teacher
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.taught.place_training import PlaceTraining
from jetdraft.train.taught.taught_training import Stages
from jetdraft.train.training import TrainingOptions

MOST_LAYERS, FEWEST_TAPS = 5, 3
"""The layers of the published heads, and the taps of a head with one layer or two."""

TOKENS_PER_WEIGHT = 20
"""What a model of a given cost learns most from (2203.15556)."""

VALIDATED = 16
"""Blocks of a sequence that a validation fills."""


class BlockTraining(PlaceTraining):
    """A training whose output is the folder of a drafter, for `export --head`.

    A subclass says what drafter it is. `progress` gets a stage, and how many of its
    texts are written.
    """

    most_norm = 1.0
    module: BlockObjective
    first_anchor = 1
    """The first row of a text behind which a block may begin."""

    def __init__(
        self,
        target: str,
        output: Path,
        data: Sequence[Path],
        settings: BlockSettings,
        options: TrainingOptions | None = None,
        progress: Stages = lambda *state: None,
    ) -> None:
        self.settings: Any = settings
        folder = RunFolder(output, "model.safetensors", "config.json", "drafter")
        super().__init__(folder, options or TrainingOptions())
        least = settings.block_rows + 2
        if self.options.sequence_length < least:
            raise OptionError(
                f"sequences of {self.options.sequence_length} tokens are too short for "
                f"blocks of {settings.block_rows}; give {least} or more"
            )
        self.load_target(target, "drafters")
        self.layers = self.count_layers()
        self.read_texts(data, 3, settings.regenerate, progress)
        torch.manual_seed(self.options.seed)
        self.config = self.new_config()
        self.module = self.new_objective(settings.loss == TEXT)
        self.learn(self.module.drafter)
        self._teacher: Any = None

    def count_layers(self) -> int:
        """The layers of the target."""
        return len(decoder_layers(self.target.model))

    def new_objective(self, of_text: bool) -> BlockObjective:
        """A new drafter with its loss."""
        return BlockObjective(new_block_drafter(self.target, self.config), of_text)

    def new_teacher(self, model: Any) -> Any:
        """What gives the lessons of batches; `model` is the target's."""
        return Teacher(model, self.config.taps, None)

    def prepared(self, batch: Batch) -> Batch:
        """A batch of the corpus as teacher and blocks need it."""
        return batch

    @abstractmethod
    def new_config(self) -> Any:
        """The config of the drafter; raises `OptionError`."""

    def advised_steps(self) -> int:
        """The steps that learn twenty guesses for each weight."""
        blocks = self.settings.anchors * self.options.batch_size
        guesses: int = blocks * self.config.slots
        return max(200, TOKENS_PER_WEIGHT * self.parameters // guesses)

    def summary(self) -> str:
        """What is trained on how many sequences."""
        return (
            f"training {self.parameters} weights of {self.product}, layers: "
            f"{self.config.num_layers}, for blocks of {self.settings.block_rows}, on "
            f"{self.reading}"
        )

    def settings_of_run(self) -> dict[str, Any]:
        """The settings of the drafter, and the target's hash."""
        own = asdict(self.settings) | {"target": self.base}
        return own | {"taps": list(self.config.taps)}

    def loss(self, accelerator: Any, module: Any, batch: Batch) -> Tensor:
        """The decayed sum of the means by distance, over all processes."""
        batch = self.prepared(batch)
        blocks = self._drawn(accelerator, batch)
        sums = module(self._taught(accelerator).lesson(batch), blocks)
        places = accelerator.reduce(sums.places, "sum")
        # Processes average their gradients, and each has a part of the sum.
        loss: Tensor = total(sums, places) * accelerator.num_processes
        return loss

    def _drawn(self, accelerator: Any, batch: Batch) -> Blocks:
        settings, slots = self.settings, self.config.slots
        return Blocks.drawn(
            batch,
            settings.anchors,
            slots,
            settings.known_share,
            self.generators(accelerator, batch),
            self.first_anchor,
        )

    def _taught(self, accelerator: Any) -> Any:
        """The teacher, on the device of this process."""
        if self._teacher is None:
            model = self.target.model.to(accelerator.device)
            self._teacher = self.new_teacher(model)
        return self._teacher

    def validate(self, accelerator: Any, module: Any) -> dict[str, Any]:
        """Losses, and how often a guess is accepted if all before it are, by place."""
        teacher = self._taught(accelerator)
        objective = accelerator.unwrap_model(module)
        parts = []
        for batch in self.corpus.validation_batches(self.options.batch_size):
            on_device = self.prepared(batch.to(accelerator.device))
            blocks = Blocks.spread(on_device, VALIDATED, self.first_anchor)
            parts.append(objective(teacher.lesson(on_device), blocks))
        return self.figures(parts)

    def published(
        self, weights: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The drafter as its authors publish theirs."""
        return written(self.config, weights, self.settings.half, self.layers)


class DFlashTraining(BlockTraining):
    """Trains a DFlash head, in the layout of its authors.

    DFlashTraining("target", Path("head"), [Path("a.txt")], DFlashSettings()).run(print)
    """

    product = "a DFlash head"
    settings: DFlashSettings

    def new_config(self) -> BlockConfig:
        """Layers of the target's sizes: as many as the settings say, or a seventh."""
        settings = self.settings
        advised = min(MOST_LAYERS, max(1, round(self.layers / 7)))
        layers = settings.layers or advised
        spread = default_outputs(max(FEWEST_TAPS, layers), self.layers)
        outputs = sorted(set(settings.taps or spread))
        # Teachers give the last layer's output normed, which a head does not read.
        if any(not 0 <= output < self.layers - 1 for output in outputs):
            raise OptionError(
                f"the taps {list(outputs)} are not outputs of layers that a head can "
                f"read; give --taps with numbers from 0 to {self.layers - 2}"
            )
        taps = [output + 1 for output in outputs]
        slots = settings.block_rows - 1
        return dflash_config(self.target, layers, taps, slots, self._mask_token())

    def _mask_token(self) -> int:
        """A token that texts lack: the last id without a token, or the rarest id."""
        ids = range(self.target.vocab_size)
        named = set(
            Tokenizer.from_str(self.target.tokenizer or "").get_vocab().values()
        )
        if free := [token for token in ids if token not in named]:
            return free[-1]
        counts = Counter(t for text in self.corpus.training for t in text.ids)
        return min(reversed(ids), key=lambda token: counts[token])


class DiffusionTraining(BlockTraining):
    """Trains a masked diffusion model that drafts.

    DiffusionTraining("target", Path("drafter"), data, DiffusionSettings()).run(print)
    """

    product = "a diffusion drafter"
    settings: DiffusionSettings

    def new_config(self) -> BlockConfig:
        """What the settings say, or two layers half as wide as the target."""
        width = self.config_of_target.hidden_size
        own = self.settings.hidden_size or max(16, width // 2 // 16 * 16)
        layers, slots = self.settings.layers or 2, self.settings.block_rows
        return diffusion_config(self.target, layers, own, slots)

    @property
    def config_of_target(self) -> Any:
        """The config of the target's decoder."""
        return self.target.model.config.get_text_config(decoder=True)
