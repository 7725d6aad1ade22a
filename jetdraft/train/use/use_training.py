"""Trains a bundle's drafter on the places where its drafts were wrong.

Online Speculative Decoding (2310.07177) trains all weights while the model serves. Here
LoRA is trained beside it and merged, and the running model judges the result.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from jetdraft.errors import DataError, OptionError, TrainingError
from jetdraft.files import check_place
from jetdraft.learning.lessons import Lesson, Lessons
from jetdraft.learning.weight_sets import CHOICE, WeightSets, base_of
from jetdraft.train.taught.taught_training import Stages
from jetdraft.train.use.adapters import add_lora, merge_lora
from jetdraft.train.use.pace import Pace
from jetdraft.train.use.publication import judged_weights, publish
from jetdraft.train.use.student import Student
from jetdraft.train.use.wrong_places import Missed, together

HELD_OUT, MOST_HELD_OUT = 8, 32
"""One lesson in `HELD_OUT` is held out, and at most `MOST_HELD_OUT` lessons are."""

LOOK_EVERY = 10
"""Steps between two looks at the lessons that are held out."""

WARM_UP = 10
"""Steps in which the learning rate rises."""


@dataclass(frozen=True)
class UseOptions:
    """How a drafter learns from use.

    `least` is the fewest wrong places to learn from. LoRA has the rank `lora_rank`.

        UseOptions(steps=100, learning_rate=1e-3)
    """

    steps: int = 200
    batch_size: int = 8
    learning_rate: float = 2e-3
    lora_rank: int = 16
    least: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("steps", self.steps, 1, 10**9),
            ("batch size", self.batch_size, 1, 10**6),
            ("learning rate", self.learning_rate, 0.0, 1.0),
            ("lora rank", self.lora_rank, 1, 1024),
            ("least", self.least, 1, 10**9),
        ):
            if not least <= value <= most:
                raise OptionError(
                    f"{name} {value} is out of range; give {least} to {most}"
                )


@dataclass(frozen=True)
class Learned:
    """What a training did: held-out figures before and after, and the set's name.

    The name is None if nothing was published, since the loss did not fall, or since
    the lessons were erased meanwhile.
    """

    steps: int
    places: int
    before: Missed
    after: Missed
    name: str | None


class UseTraining:
    """Trains the drafter of a bundle on the lessons in a folder.

    Raises `OptionError` or `StoreError`.

        training = UseTraining(student_of(bundle, "drafter/"), Path("learned"))
        training.run(Pace(seconds=60.0)).after.right
    """

    def __init__(
        self, student: Student, folder: Path, options: UseOptions | None = None
    ) -> None:
        self._student, bundle = student, student.bundle
        self.options = options or UseOptions()
        vocab_size = bundle.target.contract.vocab_size
        self.lessons = Lessons(folder, bundle.tokenizer_sha256, vocab_size)
        self.sets = WeightSets(folder, base_of(bundle))
        self.sets.check()
        check_place(folder / CHOICE)

    def run(
        self, pace: Pace, report: Stages = lambda stage, done, total: None
    ) -> Learned:
        """Train once, and put the weights on trial if the held-out loss has fallen.

        Raises `DataError` for too few wrong places, and `TrainingError` if the loss is
        not a number; then, and at a `KeyboardInterrupt`, nothing is published.
        """
        cleared = self.sets.choice().cleared  # before the lessons are read
        lessons = self.lessons.read()
        places = sum(len(lesson.places) for lesson in lessons)
        if places < self.options.least:
            raise DataError(
                f"there are {places} wrong places to learn from, and "
                f"{self.options.least} are needed; use the model for longer"
            )
        run = _Run(self._student, judged_weights(self.sets), lessons, self.options)
        before = run.held_out()
        done = run.train(pace, report)
        after = run.held_out()
        name = None
        if after.loss < before.loss:
            changed = merge_lora(run.model)
            text = torch.cat([torch.from_numpy(lesson.tokens) for lesson in lessons])
            report("export", 0, 1)
            arrays = self._student.arrays(changed, text)
            name = publish(self.sets, arrays, changed, cleared)
            report("export", 1, 1)
        return Learned(done, places, before, after, name)


class _Run:
    """One training of LoRA in a drafter, which begins with some weights."""

    def __init__(
        self,
        student: Student,
        weights: Mapping[str, Tensor],
        lessons: Sequence[Lesson],
        options: UseOptions,
    ) -> None:
        torch.manual_seed(options.seed)
        self._student, self.options = student, options
        self.model = student.load(weights)
        layers = student.layers(self.model)
        self._lora = add_lora(self.model, layers, options.lora_rank)
        self._draw = random.Random(options.seed)
        order = self._draw.sample(lessons, len(lessons))
        held_out = order[::HELD_OUT][:MOST_HELD_OUT]
        self._held = held_out if len(order) >= HELD_OUT else order
        held = set(map(id, self._held))
        self._training = [o for o in order if id(o) not in held] or order

    def train(self, pace: Pace, report: Stages) -> int:
        """Train, and keep the LoRA of the least held-out loss; gives the steps."""
        optimizer = torch.optim.AdamW(self._lora, lr=0.0, weight_decay=0.0)
        least, best, step = math.inf, list[Tensor](), 0
        while step < self.options.steps and pace.goes_on():
            optimizer.param_groups[0]["lr"] = self._rate(step)
            self._step(optimizer)
            step += 1
            report("train", step, self.options.steps)
            if step % LOOK_EVERY == 0 or step == self.options.steps:
                loss = self.held_out().loss.item()
                if loss < least:
                    least, best = loss, [w.detach().clone() for w in self._lora]
        pace.rest()
        with torch.no_grad():
            for weight, kept in zip(self._lora, best, strict=bool(best)):
                weight.copy_(kept)
        return step

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        size = min(self.options.batch_size, len(self._training))
        loss = self._missed(self._draw.sample(self._training, size)).loss
        if not torch.isfinite(loss):
            raise TrainingError(
                "the loss is not a number, and nothing was published; train with a "
                "lower --learning-rate"
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._lora, 1.0)
        optimizer.step()

    def _rate(self, step: int) -> float:
        """A warm-up, then a linear decay."""
        warm, rest = (step + 1) / WARM_UP, 1.0 - step / self.options.steps
        return self.options.learning_rate * min(1.0, warm, rest)

    @torch.no_grad()
    def held_out(self) -> Missed:
        """The figures of the lessons that are held out, in batches."""
        size, held = self.options.batch_size, self._held
        parts = [held[start : start + size] for start in range(0, len(held), size)]
        return together([self._missed(part) for part in parts])

    def _missed(self, lessons: Sequence[Lesson]) -> Missed:
        return self._student.missed(self.model, lessons)
