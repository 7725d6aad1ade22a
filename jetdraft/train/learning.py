"""Trains a drafter where its drafts were wrong (2310.07177), by LoRA (2106.09685)."""

import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetdraft import errors
from jetdraft.checkpoints.layers import add_lora, merge_lora
from jetdraft.devices.detection import module_rails, watts_of
from jetdraft.errors import as_error
from jetdraft.export.drafters import Arrays
from jetdraft.files import check_writable
from jetdraft.learning import lessons as kept
from jetdraft.learning.lessons import Choice, Lesson, Lessons, WeightSets
from jetdraft.manifest import sha256_of
from jetdraft.options import Checked, setting
from jetdraft.train.students import Missed, Student, join_missed
from jetdraft.train.training import ReportStage

ADAPTER = "use"  # The name of the LoRA.
HELD_OUT, MAX_HELD_OUT = 8, 32  # One lesson of 8, and at most 32.
STEPS_BETWEEN_LOOKS = 10  # Steps between two measurements of the held-out loss.
WARM_UP_STEPS = 10  # Steps in which the learning rate rises.
REST_SECONDS = 1.0  # Seconds between two looks at the power while a training waits.
LOOK_SECONDS = 5.0  # Between two looks at the lessons in the background.


class Pace:
    """Bounds on seconds and watts; `DeviceError` if the machine tells no power."""

    def __init__(
        self,
        seconds: float | None = None,
        watts: float | None = None,
        root: Path = Path("/"),
    ) -> None:
        self.seconds, self.watts = seconds, watts
        self.spent = 0.0
        self._began: float | None = None
        self._rails = [] if watts is None else module_rails(root)
        if watts is not None and not self._rails:
            fact = "this machine has no power monitors (INA3221) to read watts from"
            raise errors.DeviceError(f"{fact}; leave --watts out")

    @property
    def has_time(self) -> bool:
        """Whether `seconds` are not spent yet."""
        return self.seconds is None or self.spent < self.seconds

    def wait_for_step(self) -> bool:
        """Wait while the module draws too much; returns whether time is left."""
        self.pause()
        # Where a rail has vanished, the seconds still bound the training.
        while self.watts and (watts_of(self._rails) or 0.0) > self.watts:
            time.sleep(REST_SECONDS)
        self._began = time.monotonic()
        return self.has_time

    def pause(self) -> None:
        """Add the time since the last wait to `spent`, and stop the clock."""
        if self._began is not None:
            self.spent += time.monotonic() - self._began
        self._began = None


@dataclass(frozen=True)
class UseOptions(Checked):
    """Options of a training on the lessons of use.

    source: The drafter's checkpoint in floats; default: where the export read it.
    target: The target's checkpoint, whose states a head reads; default: where the
        export read it.
    steps: Steps of training.
    batch_size: Texts per step.
    learning_rate: Learning rate of the first step; it falls to zero.
    lora_rank: Rank of the LoRA adapters.
    least: Fewest wrong places to learn from.
    seconds: The most seconds of training, without waiting; default: no limit.
    watts: Wait while the module draws more; a Jetson tells.
    background: At idle priority, and again whenever there is enough to learn from,
        until the seconds are spent.
    seed: Seed of the random numbers; the same seed gives the same training.
    """

    source: str = setting("", names=("--from",), metavar="CHECKPOINT")
    target: str = setting("", metavar="CHECKPOINT")
    steps: int = setting(200, allowed=(1, 10**9))
    batch_size: int = setting(8, allowed=(1, 10**6))
    learning_rate: float = setting(2e-3, allowed=(0.0, 1.0))
    lora_rank: int = setting(16, allowed=(1, 1024))
    least: int = setting(64, allowed=(1, 10**9))
    seconds: float | None = setting(None, above=0)
    watts: float | None = setting(None, above=0)
    background: bool = setting(False)
    seed: int = setting(0, group="sampling", show_default=True)


@dataclass(frozen=True)
class Learned:
    """Figures of held-out lessons, before and after, and the published set or None."""

    steps: int
    places: int
    before: Missed
    after: Missed
    name: str | None


class UseTraining:
    """Trains the drafter of a bundle on the lessons in a folder."""

    def __init__(
        self, student: Student, folder: Path, options: UseOptions | None = None
    ) -> None:
        self._student, bundle = student, student.bundle
        self.options = options or UseOptions()
        vocab_size = bundle.target.contract.vocab_size
        self.lessons = Lessons(folder, bundle.tokenizer_sha256, vocab_size)
        self.sets = WeightSets(folder, kept.drafter_sha256(bundle))
        self.sets.check()
        check_writable(folder / kept.CHOICE_FILE)

    def run(self, pace: Pace, report: ReportStage = lambda *state: None) -> Learned:
        """Train once, and put the weights on trial if the held-out loss has fallen.

        Raises `DataError` for too few wrong places, and `TrainingError` if the loss is
        not a number; then, and at a `KeyboardInterrupt`, nothing is published.
        """
        cleared = self.sets.read_choice().cleared  # before the lessons are read
        lessons = self.lessons.read()
        places = sum(len(lesson.places) for lesson in lessons)
        if places < self.options.least:
            raise errors.DataError(
                f"there are {places} wrong places to learn from, and "
                f"{self.options.least} are needed; use the model for longer"
            )
        run = _LoraRun(self._student, judged_weights(self.sets), lessons, self.options)
        before = run.held_out()
        done = run.train(pace, report)
        after = run.held_out()
        name = None
        if after.loss < before.loss:
            changed = merge_lora(run.model, ADAPTER)
            text = torch.cat([torch.from_numpy(lesson.tokens) for lesson in lessons])
            report("export", 0, 1)
            arrays = self._student.arrays(changed, text)
            name = publish(self.sets, arrays, changed, cleared)
            report("export", 1, 1)
        return Learned(done, places, before, after, name)


class _LoraRun:
    """One training of LoRA in a drafter; `weights` replace some of its own at first."""

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
        # Embedding and LM head stay: frequent tokens must not push rare tokens out.
        self._lora = add_lora(self.model, layers, options.lora_rank, ADAPTER)
        for weight in self._lora:
            weight.requires_grad_(True)
        self._least, self._best = math.inf, self._copy_lora()
        self._draw = random.Random(options.seed)
        order = self._draw.sample(lessons, len(lessons))
        held_out = order[::HELD_OUT][:MAX_HELD_OUT]
        self._held = held_out if len(order) >= HELD_OUT else order
        held = set(map(id, self._held))
        self._training = [o for o in order if id(o) not in held] or order

    def train(self, pace: Pace, report: ReportStage) -> int:
        """Train, and restore the LoRA of the least held-out loss; returns the steps."""
        optimizer = torch.optim.AdamW(self._lora, lr=0.0, weight_decay=0.0)
        step = 0
        while step < self.options.steps and pace.wait_for_step():
            warm, rest = (step + 1) / WARM_UP_STEPS, 1.0 - step / self.options.steps
            rate = self.options.learning_rate * min(1.0, warm, rest)
            optimizer.param_groups[0]["lr"] = rate
            self._train_step(optimizer)
            step += 1
            report("train", step, self.options.steps)
            if step % STEPS_BETWEEN_LOOKS == 0:
                self._keep_if_best()
        pace.pause()
        if step % STEPS_BETWEEN_LOOKS:  # also where the time has ended before
            self._keep_if_best()
        with torch.no_grad():
            for weight, best in zip(self._lora, self._best, strict=True):
                weight.copy_(best)
        return step

    def _keep_if_best(self) -> None:
        loss = self.held_out().loss.item()
        if loss < self._least:
            self._least, self._best = loss, self._copy_lora()

    def _copy_lora(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self._lora]

    def _train_step(self, optimizer: torch.optim.Optimizer) -> None:
        size = min(self.options.batch_size, len(self._training))
        lessons = self._draw.sample(self._training, size)
        loss = self._student.missed(self.model, lessons).loss
        if not torch.isfinite(loss):
            fact = "the loss is not a number, and nothing was published"
            raise errors.TrainingError(f"{fact}; train with a lower --learning-rate")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._lora, 1.0)
        optimizer.step()

    @torch.no_grad()
    def held_out(self) -> Missed:
        size, held = self.options.batch_size, self._held
        parts = [held[start : start + size] for start in range(0, len(held), size)]
        return join_missed([self._student.missed(self.model, part) for part in parts])


def lower_priority() -> None:
    """Give this process the lowest priority, and torch one thread."""
    os.nice(19)
    with suppress(AttributeError, OSError):  # Linux has a class below all others
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)


class Background:
    """Trains beside a running model; `say` gets reasons to `wait`, in seconds."""

    def __init__(
        self,
        training: UseTraining,
        pace: Pace,
        say: Callable[[str], None] = lambda reason: None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._training, self._pace = training, pace
        self._say, self._wait = say, wait
        self._known: set[bytes] = set()
        self._cleared = ""

    def run(self, tell: Callable[[Learned], None]) -> None:
        """Train until the time is spent; `tell` is called with each result."""
        said = ""
        while self._pace.has_time:
            lessons = self._training.lessons.read()
            reason = self._obstacle(lessons)
            if reason:
                if reason != said:
                    self._say(reason)
                self._wait(LOOK_SECONDS)
            else:
                self._known = {lesson.tokens.tobytes() for lesson in lessons}
                tell(self._training.run(self._pace))
            said = reason

    def _obstacle(self, lessons: list[Lesson]) -> str:
        """Return why no training can begin now, or "". A clear renews all lessons."""
        choice = self._training.sets.read_choice()
        if choice.cleared != self._cleared:
            # All weights were deleted, so what is left is to be learned again.
            self._cleared, self._known = choice.cleared, set()
        if choice.before is not None:
            return f"{kept.label(choice.name)} is on trial until a model has used it"
        new = [x for x in lessons if x.tokens.tobytes() not in self._known]
        places, least = sum(len(o.places) for o in new), self._training.options.least
        if places < least:
            return f"there are fewer than {least} new wrong places to learn from"
        return ""


TRAINED = "trained.safetensors"


def publish(
    sets: WeightSets, arrays: Arrays, trained: Mapping[str, Tensor], cleared: str
) -> str | None:
    """Write a set and put it on trial; returns its name. Raises `OutputError`.

    `arrays` are for the graph, `trained` the merged weights in floats. A set on trial
    is replaced. None if the folder was cleared since `cleared` was read.
    """
    name = None

    def written(now: Choice) -> Choice | None:
        nonlocal name
        if now.cleared != cleared:
            return None
        name = _write_set(sets.folder, arrays, trained)
        judged = judged_name(now)
        return now if name == judged else replace(now, name=name, before=judged)

    fact, fix = f"cannot write {sets.folder}", "free some space"
    with as_error(errors.OutputError, (OSError, SafetensorError), fact, fix):
        sets.change(written)
    return name


def judged_name(choice: Choice) -> str:
    """Return the set that passed its trial last; "" for the bundle's own weights."""
    return choice.name if choice.before is None else choice.before


def judged_weights(sets: WeightSets) -> dict[str, Tensor]:
    """Load the weights that passed their trial last, or {}; raises `StoreError`."""
    name = judged_name(sets.read_choice())
    if name == kept.OWN:
        return {}
    file = sets.folder / name / TRAINED
    fact, fix = f"{file} is damaged", "clear the folder with jetdraft store clear"
    with as_error(errors.StoreError, (OSError, SafetensorError), fact, fix):
        return load_file(file)


def _write_set(folder: Path, arrays: Arrays, trained: Mapping[str, Tensor]) -> str:
    """Write the folder of a set, whole or not at all; returns its name, a hash."""
    partial = Path(mkdtemp(prefix=kept.PARTIAL, dir=folder))
    np.savez(partial / kept.ARRAYS, **arrays)  # type: ignore[arg-type]
    save_file(dict(trained), partial / TRAINED)
    for file in partial.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    name = sha256_of(partial / kept.ARRAYS)
    if not (folder / name).exists():
        partial.rename(folder / name)
    return name
