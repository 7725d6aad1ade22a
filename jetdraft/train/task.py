"""What a training and its task know of each other."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.errors import CheckpointError, TrainingError, UnsupportedModelError
from jetdraft.options import Checked, setting
from jetdraft.train.data import Batch, Corpus, collate
from jetdraft.train.machine import Muon, has_fast_halves, precision, this_process
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.teacher import check_cache_folder, load_target
from jetdraft.train.written_texts import continuations


@dataclass(frozen=True)
class TrainingOptions(Checked):
    """How long and how fast to train; `steps` None is `Task.advised_steps`.

    steps: Steps of training.
    batch_size: Sequences per step.
    sequence_length: Tokens per sequence.
    learning_rate: Learning rate of the first step; it falls to zero.
    validation_share: Share of the sequences held out for validation.
    validate_every: Steps between validations; each saves what was learned.
    seed: Seed of the random numbers; the same seed gives the same training.
    """

    steps: int | None = setting(
        200,
        allowed=(1, 10**9),
        unset="what the drafter's size asks for, at most 50 readings",
    )
    batch_size: int = setting(8, allowed=(1, 10**6))
    sequence_length: int = setting(256, allowed=(2, 10**6))
    learning_rate: float = setting(5e-4, allowed=(0.0, 1.0))
    validation_share: float = setting(0.05, allowed=(0.0, 0.5))
    validate_every: int = setting(50, allowed=(1, 10**9))
    seed: int = setting(0, group="sampling", show_default=True)


class Run:
    """A training as its task sees it; `Training` sets the attributes.

    `base` is the hash of the weights of `target`, whose folder is `source`. `module` is
    the task's pupil, and `weights` its trained weights by name.
    """

    options: TrainingOptions
    folder: RunFolder
    target: Checkpoint
    source: Path
    base: str
    corpus: Corpus
    module: Any
    weights: dict[str, Tensor]
    step: int
    steps: int

    @property
    def is_finished(self) -> bool:
        return self.step == self.steps

    @property
    def parameters(self) -> int:
        """The number of trained weights; a tied weight counts once."""
        return sum(weight.numel() for weight in self.weights.values())

    @property
    def reading_line(self) -> str:
        """The number of sequences and how often each is read, for the headline."""
        count = len(self.corpus.training)
        epochs = self.steps * self.options.batch_size / max(1, count)
        times = f"{epochs:.0f}" if epochs >= 10 else f"{epochs:.2g}"
        return f"{count} sequences, each {times} times in {self.steps} steps"

    @cached_property
    def accelerator(self) -> Any:
        """The `Accelerator` of all processes, with bfloat16 where that is fast."""
        halves = has_fast_halves(this_process().device)
        return Accelerator(mixed_precision="bf16" if halves else "no")

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)

    @property
    def processes(self) -> int:
        return int(self.accelerator.num_processes)

    @cached_property
    def teacher(self) -> Any:
        """The target's model, moved to the device of this process."""
        return self.target.model.to(self.device)

    def sum_over_processes(self, numbers: Tensor) -> Tensor:
        """Add a tensor up over all processes, each of which must call this."""
        total: Tensor = self.accelerator.reduce(numbers, "sum")
        return total

    @property
    def seed_of_step(self) -> int:
        """A seed of this step, the same in all processes."""
        return 1_000_003 * self.options.seed + self.step

    def sequence_numbers(self, count: int) -> list[int]:
        """Return the numbers of this process's `count` sequences in the training."""
        first, stride = self.accelerator.process_index, self.processes
        start = self.step * self.options.batch_size + first
        return [start + row * stride for row in range(count)]

    def sequence_generators(self, count: int) -> list[torch.Generator]:
        """Make a generator for each sequence of this step, seeded by its number."""
        seed, numbers = 1_000_003 * self.options.seed, self.sequence_numbers(count)
        return [torch.Generator().manual_seed(seed + n) for n in numbers]

    def held_out_batches(self) -> Iterator[Batch]:
        """Yield the batches of validation texts, on the device of this process."""
        texts, size = self.corpus.validation, self.options.batch_size
        for start in range(0, len(texts), size):
            yield collate(texts[start : start + size]).to(self.device)

    def frequent_tokens(self, count: int) -> Tensor | None:
        """The `count` most frequent learned ids, int64, ascending; None if all."""
        rows = self.target.vocab_size
        if count >= rows:
            return None
        learned = [t for x in self.corpus.training for t in compress(x.ids, x.learned)]
        counts = torch.bincount(torch.tensor(learned), minlength=rows)
        return counts.argsort(descending=True, stable=True)[:count].sort().values

    def check_finite(self, losses: Tensor) -> None:
        """Raise `TrainingError` if a number in `losses` is infinite or NaN."""
        if torch.isfinite(losses).all():
            return
        outcome = "nothing had been learned yet"
        if self.folder.has_weights:
            outcome = f"the last good checkpoint is in {self.folder.path}"
        advice = "check the target, whose own loss on this data is not a number"
        if self.step:
            advice = "train again into another folder with a lower --learning-rate"
        fact = f"the loss of step {self.step + 1} is not a number; {outcome}"
        raise TrainingError(f"{fact}; {advice}")


Tensors = dict[str, Tensor]
Contents = tuple[dict[str, Any], Tensors]  # A config and tensors for the export.
REGENERATE = "Let the target complete the texts itself, and train on what it writes."


@dataclass(frozen=True)
class DrafterSettings(Checked):
    """Settings of all drafters that are written to a folder of their own."""

    regenerate: bool = setting(False, REGENERATE)
    half: bool = setting(False, "Write the drafter in float16.")


@dataclass(frozen=True)
class Sums:
    """Totals over a batch by the place of a token in its draft, float [places] each.

    `losses` adds up losses, `places` counts guesses, `right` the target's choices,
    `reached` guesses after right guesses only, and `accepted` the right of these.
    """

    losses: Tensor
    places: Tensor
    right: Tensor
    reached: Tensor | None = None
    accepted: Tensor | None = None

    @classmethod
    def of(cls, losses: Tensor, right: Tensor, place: Tensor, learned: Tensor) -> Self:
        """Add up the `losses` [k] and the hits `right` bool [k] of k guesses.

        Guess i counts at `place[i]`, int64 [k]; `learned` bool [..., places] has them.
        """
        # A place that is not guessed stops no draft before it.
        is_right = torch.ones_like(learned)
        is_right[learned] = right
        before = is_right.cumprod(-1).roll(1, -1)
        before[..., 0] = 1
        reached = before[learned].bool()
        counted = losses, torch.ones_like(losses), right, reached, reached & right
        empty = torch.zeros(learned.shape[-1], device=losses.device)
        return cls(*(empty.index_add(0, place, each.float()) for each in counted))


def sum_fields(parts: Sequence[Any], *names: str) -> list[Tensor]:
    """Add up each field in `names` over the `Sums` in `parts`; totals on the CPU."""
    return [torch.stack([getattr(p, n) for p in parts]).sum(0).cpu() for n in names]


def round_figures(numbers: Tensor) -> list[float]:
    """Round the numbers of a vector to four decimals, for a JSON file."""
    return [round(number, 4) for number in numbers.tolist()]


class Pupil(nn.Module):
    """A drafter and the `sums` of its task in one module, for several processes."""

    def __init__(self, drafter: Any, sums: Callable[..., Any]) -> None:
        super().__init__()
        self.drafter, self._sums = drafter, sums

    def forward(self, *lesson: Any) -> Any:
        """Return the task's sums for a lesson, of which the first part has `ids`."""
        with precision(lesson[0].ids.device):
            return self._sums(self.drafter, *lesson, self.training)


class Task(ABC):
    """How one kind of drafter is trained for a target.

    A training calls `check` before the target writes texts, and then `new_drafter`. In
    each step `lesson` asks the target about a batch, `sums` compares the drafter with
    it, and `total` makes the loss. A validation makes `figures` of all its sums.

    `help` says what the command does with TARGET, `product` what is trained, with its
    article, and `kind` the same in the plural. `has_muon` moves the matrices of layers
    by Muon. The target completes prompts alone if `completes_prompts`.
    """

    Settings: type[Any] = DrafterSettings
    options = TrainingOptions()
    help, product, kind = "", "", "heads"
    folder_holds, figures_file = "head", "training.json"
    has_muon, betas, largest_norm = True, (0.9, 0.95), 0.5
    completes_prompts = True

    def __init__(self, settings: Any = None) -> None:
        self.settings = self.Settings() if settings is None else settings

    @abstractmethod
    def shortest_sequence(self) -> tuple[int, str]:
        """Return the least sequence length, and what needs it, for a message."""

    @property
    def least_tokens(self) -> int:
        """The fewest tokens of a learned text; by default as in `shortest_sequence`."""
        return self.shortest_sequence()[0]

    def folder(self, output: Path) -> RunFolder:
        """Return the output folder, not yet made; raises `OutputError`."""
        check_cache_folder(getattr(self.settings, "cache", None))
        return RunFolder(output, "model.safetensors", "config.json", self.folder_holds)

    def load(self, source: str) -> tuple[Checkpoint, str]:
        """Load the target in float32, with a text as `load_target` returns it."""
        return load_target(source, self.kind)

    def check_target(self, target: Checkpoint) -> None:
        """Raise `CheckpointError` for a wrong target; here an encoder-decoder."""
        if target.reads_source:
            raise UnsupportedModelError(
                f"{target.source} is an encoder-decoder, for which only jetdraft train "
                "block trains; give a decoder alone"
            )

    def max_positions(self, model: Any) -> int | None:
        """Return the most tokens that the target can read; None for no limit."""
        most: int = model.config.get_text_config(decoder=True).max_position_embeddings
        return most

    def check(self, run: Run) -> None:
        """Prepare for the target, by default nothing; raises `OptionError`."""

    def writer(self, target: Checkpoint) -> Any:
        """Return the function that completes prompts, by default `continuations`."""
        return continuations

    def check_texts(self, run: Run) -> None:
        """Raise `DataError` for an unfit corpus; the default accepts every corpus."""

    @abstractmethod
    def new_drafter(self, run: Run) -> nn.Module:
        """Make the untrained drafter."""

    def pupil(self, drafter: Any) -> nn.Module:
        """Make the module that is trained: a drafter, and its loss as `forward`."""
        return Pupil(drafter, self.sums)

    def weights(self, run: Run) -> dict[str, Tensor]:
        """Return the weights to train by name: the drafter's, but not the target's."""
        of_target = {id(weight) for weight in run.target.model.parameters()}
        named = run.module.drafter.named_parameters()
        return {name: weight for name, weight in named if id(weight) not in of_target}

    def advised_steps(self, run: Run) -> int:
        """Return the number of steps if the option `steps` is None."""
        return 200

    def tables(self, run: Run) -> set[str]:
        """Return the names of the matrices that Muon leaves to AdamW."""
        return {n for n in run.weights if n.startswith(("embed_tokens", "lm_head"))}

    def optimizers(self, run: Run) -> list[torch.optim.Optimizer]:
        """Make Muon for the matrices of layers, and AdamW for all other weights."""
        tables = self.tables(run) if self.has_muon else run.weights
        matrices = {name: w for name, w in run.weights.items() if w.ndim == 2}
        inner = {name: w for name, w in matrices.items() if name not in tables}
        others = [weight for name, weight in run.weights.items() if name not in inner]
        optimizers: list[torch.optim.Optimizer] = []
        if self.has_muon:
            optimizers.append(Muon(inner.values(), lr=0.0))
        if others:
            optimizers.append(torch.optim.AdamW(others, lr=0.0, betas=self.betas))
        return optimizers

    def batch(self, run: Run, batch: Batch) -> Batch:
        """Return the batch to train on in this step, by default `batch` as it is."""
        return batch

    def lesson(self, run: Run, batch: Batch, learns: bool) -> tuple[Any, ...]:
        """Return the arguments of `sums` for a batch, without drafter and `learns`."""
        raise NotImplementedError

    def sums(self, drafter: Any, *lesson: Any) -> Any:
        """Compare the drafter with a lesson and `learns`; most tasks give `Sums`."""
        raise NotImplementedError

    def total(self, sums: Any, places: Tensor) -> Tensor:
        """Return the scalar loss, here the mean; `places` are of all processes."""
        loss: Tensor = sums.losses.sum() / places.sum().clamp(min=1)
        return loss

    def loss(self, run: Run, module: Any, batch: Batch) -> Tensor:
        """Return the scalar loss of this process's part of a batch."""
        sums = module(*self.lesson(run, batch, True))
        return self.total(sums, run.sum_over_processes(sums.places)) * run.processes

    def validate(self, run: Run, module: Any) -> dict[str, Any]:
        """Compute the figures of the validation texts; raises `TrainingError`."""
        parts = [module(*self.lesson(run, b, False)) for b in run.held_out_batches()]
        return self.figures(run, parts)

    def figures(self, run: Run, parts: Sequence[Any]) -> dict[str, Any]:
        """Return losses and acceptance rates, of reached places if known."""
        has_reached = parts[0].reached is not None
        counts = ("reached", "accepted") if has_reached else ("places", "right")
        losses, places, tried, hits = sum_fields(parts, "losses", "places", *counts)
        run.check_finite(losses)
        rates = hits / tried.clamp(min=1)
        means = {"losses": losses / places.clamp(min=1), "acceptance": rates}
        figures: dict[str, Any] = {n: round_figures(x) for n, x in means.items()}
        if has_reached:
            figures["tokens_per_pass"] = round(1 + rates.cumprod(0).sum().item(), 3)
        return figures

    def description(self, run: Run) -> str:
        """Return what is trained, for the headline; by default `product`."""
        return self.product

    def headline(self, run: Run) -> str:
        """Return the line that is printed before a training: what learns from what."""
        what = self.description(run)
        return f"training {run.parameters} weights of {what} on {run.reading_line}"

    def summary_line(self, figures: Mapping[str, Any]) -> str:
        """Format the figures of a validation as a line for the terminal."""
        rates = " ".join(f"{rate:.2f}" for rate in figures["acceptance"])
        line = f"validation loss {figures['losses'][0]:.2f}"
        if "tokens_per_pass" not in figures:
            return f"{line}, right by place {rates}"
        tokens = figures["tokens_per_pass"]
        return f"{line}, accepted by place {rates}, so {tokens:.2f} tokens a pass"

    def settings_of_run(self, run: Run) -> dict[str, Any]:
        """Return the settings that a resumed run must repeat, besides its options."""
        return asdict(self.settings) | {"target": run.base}

    def begin(self, run: Run) -> None:
        """Create the output folder, unless it exists."""
        run.folder.create()

    @abstractmethod
    def contents(self, run: Run, weights: Tensors, figures: Any) -> Contents:
        """Return the config's fields and the tensors that the export will read."""

    def save(self, run: Run, weights: Tensors, state: Any, figures: Any) -> None:
        """Write config, tensors, state, and `figures`, which may be None."""
        config, tensors = self.contents(run, weights, figures)
        if self.figures_file:
            record = {**self.settings_of_run(run), "step": run.step}
            record["validation"] = figures
            run.folder.write(self.figures_file, json.dumps(record, indent=2) + "\n")
        run.folder.save(tensors, config, state, run.is_finished)


class ProbeTask(Task):
    """Adds probes to a target; the checkpoint has the target's files too."""

    figures_file, largest_norm = "", 1.0
    has_muon, betas = False, (0.9, 0.999)

    def folder(self, output: Path) -> RunFolder:
        return RunFolder(output, learned=self.product)

    def check_target(self, target: Checkpoint) -> None:
        """Refuse, as the parent does, and refuse a target with probes."""
        super().check_target(target)
        if target.streams is not None:
            fact = f"{target.source} already has streams or prompt tokens"
            raise CheckpointError(f"{fact}; give a checkpoint without")

    def begin(self, run: Run) -> None:
        run.folder.add_target(run.source, run.base)
