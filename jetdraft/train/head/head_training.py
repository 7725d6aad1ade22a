"""Trains heads: EAGLE-3 with training-time test, EAGLE-1 and Medusa."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.errors import OptionError, TrainingError
from jetdraft.train.data import Batch
from jetdraft.train.head.head_layout import (
    EAGLE1,
    EAGLE3,
    MEDUSA,
    new_config,
    new_head,
    published,
)
from jetdraft.train.head.head_losses import Objective, Sums, total
from jetdraft.train.head.teacher import StateCache, Teacher
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.taught.place_training import PlaceTraining
from jetdraft.train.taught.taught_training import Stages
from jetdraft.train.taught.tensor_cache import check_cache
from jetdraft.train.training import TrainingOptions

KINDS = (EAGLE3, EAGLE1, MEDUSA)


@dataclass(frozen=True)
class HeadSettings:
    """What head to train.

    `draft_vocabulary` is the most tokens that an EAGLE-3 head can draft; they are the
    most frequent in the data. `taps` are what it reads, by default 2, N // 2 and N - 3
    of N layers. `unrolled` are the steps of its training-time test, or the tokens that
    Medusa guesses; EAGLE-1 learns one step, and they are its validation's.

        HeadSettings(kind="eagle3", draft_vocabulary=32000, unrolled=7)
    """

    kind: str = EAGLE3
    draft_vocabulary: int = 32000
    taps: tuple[int, ...] = ()
    unrolled: int = 7
    regenerate: bool = False
    inner: int = 0
    """The width inside the MLP of an EAGLE head; 0 is the target's."""

    half: bool = False
    """Whether the head is written in float16."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(
                f"unknown kind {self.kind!r}; choose {', '.join(KINDS[:-1])} or "
                f"{KINDS[-1]}"
            )
        for name, value, least, most in (
            ("draft vocabulary", self.draft_vocabulary, 1, 10**7),
            ("unrolled", self.unrolled, 1, 32),
            ("inner", self.inner, 0, 10**6),
        ):
            if not least <= value <= most:
                raise OptionError(
                    f"{name} {value} is out of range; give {least} to {most}"
                )


class HeadTraining(PlaceTraining):
    """A training whose output is the folder of a head, in its published layout.

        HeadTraining("target", Path("head"), [Path("notes.txt")]).run(print)

    `cache` is a folder for the target's states; without it they are computed again in
    each step. `progress` gets a stage, and how many of its texts are written.
    """

    most_norm = 0.5
    module: Objective
    product = "a head"

    def __init__(
        self,
        target: str,
        output: Path,
        data: Sequence[Path],
        settings: HeadSettings | None = None,
        options: TrainingOptions | None = None,
        cache: Path | None = None,
        progress: Stages = lambda *state: None,
    ) -> None:
        self.settings = settings or HeadSettings()
        if cache is not None:
            check_cache(cache)
        folder = RunFolder(output, "model.safetensors", "config.json", "head")
        super().__init__(folder, options or TrainingOptions())
        least = self.settings.unrolled + 2
        if self.options.sequence_length < least:
            raise OptionError(
                f"sequences of {self.options.sequence_length} tokens are too short for "
                f"{self.settings.unrolled} steps; give {least} or more"
            )
        self.load_target(target, "heads")
        self.taps = self._taps()
        self.read_texts(data, least, self.settings.regenerate, progress)
        self.ids = self._draft_vocabulary()
        self.cache = cache
        torch.manual_seed(self.options.seed)
        self._build()

    def _taps(self) -> tuple[int, ...]:
        """The taps of an EAGLE-3 head; raises `OptionError` for others than layers."""
        if self.settings.kind != EAGLE3:
            return ()
        layers = len(decoder_layers(self.target.model))
        taps = self.settings.taps or (2, layers // 2, layers - 3)
        if any(not 0 <= tap < layers for tap in taps):
            raise OptionError(
                f"the taps {list(taps)} are not all layers of this target; give "
                f"--taps with numbers from 0 to {layers - 1}"
            )
        return taps

    def _draft_vocabulary(self) -> Tensor | None:
        """The tokens that an EAGLE-3 head can draft; None for all."""
        if self.settings.kind != EAGLE3:
            return None
        return self.frequent_tokens(self.settings.draft_vocabulary)

    def _build(self) -> None:
        """The head and its loss, and what of it is learned."""
        settings = self.settings
        vocabulary = self.target.vocab_size if self.ids is None else len(self.ids)
        self.config = new_config(
            self.target,
            settings.kind,
            self.taps,
            vocabulary,
            settings.unrolled,
            settings.inner,
        )
        head = new_head(self.target, self.config, self.ids)
        self.learn(head)
        self.module = Objective(head, settings.unrolled, settings.kind == EAGLE1)
        self._teacher: Teacher | None = None

    def summary(self) -> str:
        """What is trained, over how many tokens, on how many sequences."""
        return (
            f"training {self.parameters} weights of an {self.settings.kind} head over "
            f"{self.config.draft_vocab_size} tokens on {self.reading}"
        )

    def told(self, figures: Mapping[str, Any]) -> str:
        """The loss of the first place, and how often each place is right."""
        rates = " ".join(f"{share:.2f}" for share in figures["acceptance"])
        return f"validation loss {figures['losses'][0]:.2f}, right by place {rates}"

    def settings_of_run(self) -> dict[str, Any]:
        """The settings of the head, and the target's hash."""
        return asdict(self.settings) | {"taps": list(self.taps), "target": self.base}

    def loss(self, accelerator: Any, module: Any, batch: Batch) -> Tensor:
        """The decayed sum of the steps' means, over the places of all processes."""
        sums = module(self._taught(accelerator).lesson(batch))
        places = accelerator.reduce(sums.places, "sum")
        # Processes average their gradients, and each has a part of the sum.
        loss: Tensor = total(sums, places) * accelerator.num_processes
        return loss

    def _taught(self, accelerator: Any) -> Teacher:
        """The teacher, on the device of this process."""
        if self._teacher is None:
            model = self.target.model.to(accelerator.device)
            cache = None
            if self.cache is not None:
                owner = f"{self.base} {list(self.taps)}"
                cache = StateCache(self.cache, owner, accelerator.process_index)
            self._teacher = Teacher(model, self.taps, self.ids, cache)
        return self._teacher

    def validate(self, accelerator: Any, module: Any) -> dict[str, Any]:
        """Losses and the share of right tokens, by the place in a draft."""
        parts: list[Sums] = []
        teacher = self._taught(accelerator)
        objective = accelerator.unwrap_model(module)
        for batch in self.corpus.validation_batches(self.options.batch_size):
            parts.append(objective(teacher.lesson(batch.to(accelerator.device))))
        if teacher.cache is not None:
            teacher.cache.flush()
        lost, right, places = (
            torch.stack([getattr(part, name) for part in parts]).sum(0)
            for name in ("lost", "right", "places")
        )
        if not torch.isfinite(lost).all():
            raise TrainingError(self.failure())

        def shares(counts: Tensor) -> list[float]:
            return [round(x, 4) for x in (counts / places.clamp(min=1)).tolist()]

        return {"losses": shares(lost), "acceptance": shares(right)}

    def published(
        self, weights: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The config.json and the tensors, as the authors publish theirs."""
        return published(self.config, weights, self.ids, self.settings.half)
