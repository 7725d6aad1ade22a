"""Trains prompt tokens for a target that stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from jetdraft.checkpoints.folder import checkpoint_folder
from jetdraft.checkpoints.prompts import RANKS, Prompts, PromptSettings
from jetdraft.cli.command import option
from jetdraft.errors import (
    CheckpointError,
    OptionError,
    TrainingError,
    UnsupportedModelError,
)
from jetdraft.train.block.block_places import Blocks
from jetdraft.train.data import Batch
from jetdraft.train.ppd.prompt_losses import PromptObjective, Sums, total
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.taught.taught_training import Stages, TaughtTraining
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import regenerate_option

VALIDATED = 64
"""Places of a validation sequence where prompt tokens guess, evenly spread."""


@dataclass(frozen=True)
class Lessons:
    """Where prompt tokens are inserted, and in whose texts.

    `insertions` are the random places of each sequence in each step. With `regenerate`
    the target completes the texts itself. Raises `OptionError`.

        Lessons(insertions=32)
    """

    insertions: int = 32
    regenerate: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.insertions <= 4096:
            raise OptionError(
                f"insertions {self.insertions} is out of range; give 1 to 4096"
            )


def lesson_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `lessons`, a `Lessons`."""

    @wraps(function)
    def command(insertions: int, regenerate: bool, **options: Any) -> Any:
        return function(lessons=Lessons(insertions, regenerate), **options)

    places = option(
        "training",
        "--insertions",
        default=Lessons.insertions,
        show_default=True,
        help="Random places of a sequence where a step inserts what is trained.",
    )
    return places(regenerate_option(command))


def _has_windows(config: Any) -> bool:
    """Whether a layer of a model attends to less than all rows before."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) != {"full_attention"}
    used = getattr(config, "use_sliding_window", True)
    return bool(used and getattr(config, "sliding_window", None))


class PromptTraining(TaughtTraining):
    """A training whose output is a checkpoint: the target's files and prompt tokens.

    With a prefix the prompt tokens are called forecasts.

    PromptTraining("target", Path("out"), [Path("a.txt")], PromptSettings()).run(print)
    """

    module: PromptObjective

    def __init__(
        self,
        target: str,
        output: Path,
        data: Sequence[Path],
        settings: PromptSettings | None = None,
        lessons: Lessons | None = None,
        options: TrainingOptions | None = None,
        progress: Stages = lambda *state: None,
    ) -> None:
        settings = settings or PromptSettings()
        settings.check()
        self.product = "forecasts" if settings.prefix else "prompt tokens"
        self.lessons = lessons or Lessons()
        folder = RunFolder(output, learned=self.product)
        super().__init__(folder, options or TrainingOptions())
        least = settings.gamma + 3
        if self.options.sequence_length < least:
            raise OptionError(
                f"sequences of {self.options.sequence_length} tokens are too short for "
                f"{settings.gamma} {self.product}; give {least} or more"
            )
        self.load_target(target, self.product)
        self._check_target(target)
        self.source = checkpoint_folder(target)
        self.settings = replace(settings, base=self.base)
        self.read_texts(data, least, self.lessons.regenerate, progress)
        torch.manual_seed(self.options.seed)
        self._build()

    def _check_target(self, source: str) -> None:
        """Refuse a target that drafts already, or attends in windows."""
        if self.target.streams is not None:
            raise CheckpointError(
                f"{source} already has streams or prompt tokens; give a checkpoint "
                "without"
            )
        if _has_windows(self.target.model.config.get_text_config(decoder=True)):
            raise UnsupportedModelError(
                f"{source} attends in sliding windows; {self.product} need plain "
                "attention, so choose another model"
            )

    def _build(self) -> None:
        """The prompt tokens, which start as frequent words, and their loss."""
        prompts = self._new_prompts()
        self.module = PromptObjective(prompts, self.target.model)
        self.weights = {f"prompts.{n}": w for n, w in prompts.named_parameters()}

    def _new_prompts(self) -> Prompts:
        """Frequent words, and as a prefix the rows of the first learned text."""
        settings, model = self.settings, self.target.model
        words = self.frequent_tokens(settings.gamma * settings.members)
        if words is None:
            words = torch.arange(settings.gamma * settings.members)
            words = words % self.target.vocab_size
        # A target that has written texts is on a GPU; the words are not yet.
        embeddings = model.get_input_embeddings()(words.to(model.device))
        if not settings.prefix:
            return Prompts(settings, embeddings)
        ids = torch.tensor([self.corpus.training[0].ids], device=model.device)
        repeats = -(-settings.prefix // ids.shape[1])
        ids = ids.repeat(1, repeats)[:, : settings.prefix]
        with torch.no_grad():
            layers = model(input_ids=ids, use_cache=True).past_key_values.layers
        if len({layer.keys.shape for layer in layers}) > 1:
            raise UnsupportedModelError(
                f"{self.target.source} has layers of several head sizes, which a "
                "prefix cannot have; choose another model"
            )
        keys = torch.cat([layer.keys for layer in layers])
        values = torch.cat([layer.values for layer in layers])
        return Prompts(settings, embeddings, keys, values)

    @property
    def parameters(self) -> int:
        """The number of trained weights."""
        return sum(weight.numel() for weight in self.weights.values())

    def summary(self) -> str:
        """What is trained, what share of the target it is, on how many sequences."""
        share = 100 * self.parameters / self.target.parameters
        return (
            f"training {self.parameters} weights of {self.settings.gamma} "
            f"{self.product}, {share:.2g}% of the target's, on {self.reading}"
        )

    def told(self, figures: Mapping[str, Any]) -> str:
        """The loss of the first prompt token, and how often each is right."""
        rates = " ".join(f"{share:.2f}" for share in figures["acceptance"])
        return f"validation loss {figures['losses'][0]:.2f}, right by place {rates}"

    def settings_of_run(self) -> dict[str, Any]:
        """The settings, and the target's hash."""
        # What validations measure is a result.
        return replace(self.settings, ranks=()).to_json() | asdict(self.lessons)

    def make_folder(self) -> None:
        """Copy the target's files into the output folder."""
        with PartialState().main_process_first():
            self.folder.copy_base(self.source, self.base)

    def begin(self) -> None:
        """Copy the target's files, unless they are there."""
        self.folder.copy_base(self.source, self.base)

    def loss(self, accelerator: Any, module: Any, batch: Batch) -> Tensor:
        """The decayed sum of the means by prompt token, over all processes."""
        self.target.model.to(accelerator.device)
        sums = module(batch, self._drawn(accelerator, batch))
        places = accelerator.reduce(sums.places, "sum")
        # Processes average their gradients, and each has a part of the sum.
        loss: Tensor = total(sums, places) * accelerator.num_processes
        return loss

    def _drawn(self, accelerator: Any, batch: Batch) -> Blocks:
        generators = self.generators(accelerator, batch)
        return Blocks.drawn(batch, self.lessons.insertions, 1, 0.0, generators)

    def validate(self, accelerator: Any, module: Any) -> dict[str, Any]:
        """Losses, and how often each rank of each prompt token is right."""
        objective = accelerator.unwrap_model(module)
        self.target.model.to(accelerator.device)
        parts: list[Sums] = []
        for batch in self.corpus.validation_batches(self.options.batch_size):
            on_device = batch.to(accelerator.device)
            parts.append(objective(on_device, Blocks.spread(on_device, VALIDATED)))
        lost, places, right = (
            torch.stack([getattr(part, name) for part in parts]).sum(0).cpu()
            for name in ("lost", "places", "right")
        )
        if not torch.isfinite(lost).all():
            raise TrainingError(self.failure())
        places = places.clamp(min=1)
        ranks = (right / places[:, None])[:, :RANKS].tolist()
        rounded = tuple(tuple(round(rate, 4) for rate in rates) for rates in ranks)
        self.settings = replace(self.settings, ranks=rounded)
        return {
            "losses": [round(loss, 4) for loss in (lost / places).tolist()],
            "acceptance": [rates[0] for rates in rounded],
        }

    def save(
        self, weights: dict[str, Tensor], state: Any, figures: dict[str, Any] | None
    ) -> None:
        """Write the prompt tokens beside the target's files."""
        description = {
            **self.settings.to_json(),
            "step": self.step,
            "parameters": self.parameters,
            "validation": figures,
        }
        self.folder.save(weights, description, state, self.finished)
        if self.finished:
            self.forget_texts()
