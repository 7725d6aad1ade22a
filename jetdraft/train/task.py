"""What a training must know of a drafter: pupil, teacher, loss, and folder.

A setting of a task is written once, as a field of its settings: the field gives the
flag of `jetdraft train`, its help and its range.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.errors import OptionError, UnsupportedModelError
from jetdraft.options import Flag, Range, between, check_ranges
from jetdraft.train.data import Batch
from jetdraft.train.machine import Muon
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.teacher import load_target
from jetdraft.train.written_texts import continuations

if TYPE_CHECKING:
    from jetdraft.train.training import Training

# --- settings -------------------------------------------------------------------------


def setting(
    default: Any,
    text: str,
    allowed: Range | None = None,
    choices: Sequence[str] = (),
    **flag: Any,
) -> Any:
    """A field of settings that is an option of the command line too.

    `allowed` or `choices` say which values are refused. `flag` may have a `name` for
    the flag, if it is not the field's, its `group`, a `metavar`, and in `unset` what it
    means to give none.
    """
    if isinstance(default, tuple):
        flag = {"metavar": "LAYERS", "commas": True, **flag}
    names = (flag.pop("name"),) if "name" in flag else ()
    settings = {"group": "training", "show_default": bool(default), **flag}
    metadata = {
        "flag": Flag(help=text, names=names, **settings),
        "allowed": allowed,
        "choices": choices,
    }
    return field(default=default, metadata=metadata)


def seed_setting() -> Any:
    """The seed of a training."""
    text = "Seed of the random numbers; the same seed gives the same training."
    return setting(0, text, group="sampling", show_default=True)


class Settings:
    """The base of dataclasses of settings: it refuses what the fields refuse."""

    def __post_init__(self) -> None:
        for spec in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            allowed = spec.metadata.get("allowed")
            if allowed is not None:
                check_ranges(self, {spec.name: allowed})
            choices, value = spec.metadata.get("choices"), getattr(self, spec.name)
            if choices and value not in choices:
                others = ", ".join(choices[:-1])
                raise OptionError(
                    f"unknown {spec.name} {value!r}; choose {others} or {choices[-1]}",
                    spec.name,
                )


@dataclass(frozen=True)
class TrainingOptions(Settings):
    """How long and how fast to train; with `steps` of None the task says how long."""

    steps: int | None = setting(
        200,
        "Steps of training.",
        between(1, 10**9, optional=True),
        unset="what the drafter's size asks for, at most 50 readings",
    )
    batch_size: int = setting(8, "Sequences per step.", between(1, 10**6))
    sequence_length: int = setting(256, "Tokens per sequence.", between(2, 10**6))
    learning_rate: float = setting(
        5e-4, "Learning rate of the first step; it falls to zero.", between(0.0, 1.0)
    )
    validation_share: float = setting(
        0.05, "Share of the sequences held out for validation.", between(0.0, 0.5)
    )
    validate_every: int = setting(
        50, "Steps between validations; each saves what was learned.", between(1, 10**9)
    )
    seed: int = seed_setting()


@dataclass(frozen=True)
class DrafterSettings(Settings):
    """What all drafters with a folder of their own can be asked for."""

    regenerate: bool = setting(
        False, "Let the target complete the texts itself, and train on what it writes."
    )
    half: bool = setting(False, "Write the drafter in float16.")


# --- sums -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """Sums by the place in a draft: [places] each.

    `right` counts the `places` where the best guess is the target's choice. `reached`
    counts places before which all guesses are right, and `accepted` those of them that
    are right too.
    """

    lost: Tensor
    places: Tensor
    right: Tensor
    reached: Tensor | None = None
    accepted: Tensor | None = None

    @classmethod
    def of(cls, lost: Tensor, right: Tensor, far: Tensor, learned: Tensor) -> Sums:
        """Sums of k learned places by their distance `far` int64 [k].

        `learned` bool [..., places] is true at k places, in the order of the others.
        """

        def by_distance(numbers: Tensor) -> Tensor:
            empty = torch.zeros(learned.shape[-1], device=numbers.device)
            return empty.index_add(0, far, numbers.float())

        # A place that is not guessed stops no draft before it.
        good = torch.ones_like(learned)
        good[learned] = right
        before = good.cumprod(-1).roll(1, -1)
        before[..., 0] = 1
        reached = before[learned].bool()
        return cls(
            by_distance(lost),
            by_distance(torch.ones_like(lost)),
            by_distance(right),
            by_distance(reached),
            by_distance(reached & right),
        )


def summed(parts: Sequence[Any], *names: str) -> list[Tensor]:
    """Some fields of sums, summed over the parts, on the CPU."""
    return [
        torch.stack([getattr(p, name) for p in parts]).sum(0).cpu() for name in names
    ]


def rounded(numbers: Tensor) -> list[float]:
    """Figures for a file."""
    return [round(number, 4) for number in numbers.tolist()]


# --- the task -------------------------------------------------------------------------


class Task(ABC):
    """How one kind of drafter is trained for a target.

    A training calls `check` before it reads texts, which may take hours, and `pupil`
    after it. In each step `lesson` gives the arguments of the pupil's module, the
    module gives sums, and `total` makes of them the loss. A validation makes `figures`
    of the sums of all its batches. `folder`, `begin` and `save` write the result.

    The methods here are those of a drafter in a folder of its own, whose pupil has an
    attribute `drafter`.
    """

    Settings: type[Any] = DrafterSettings
    options = TrainingOptions()
    """The options of a training that is given none."""

    help = ""
    """What the command does with TARGET."""

    product = ""
    """What is trained, with its article."""

    kind = "heads"
    """What is trained, in the plural, in refusals of a target."""

    folder_holds = "head"
    figures_file = "training.json"
    betas, largest_norm = (0.9, 0.95), 0.5
    completes_prompts = True
    """Whether the target completes prompts without a completion."""

    def __init__(self, settings: Any = None) -> None:
        self.settings = self.Settings() if settings is None else settings

    # --- before the texts are read ----------------------------------------------------

    @abstractmethod
    def shortest(self) -> tuple[int, str]:
        """The tokens that a sequence needs, and for what."""

    @property
    def least_tokens(self) -> int:
        """The tokens that a text needs."""
        return self.shortest()[0]

    def folder(self, output: Path) -> RunFolder:
        """The output folder; raises `OutputError` for a path that is taken."""
        return RunFolder(output, "model.safetensors", "config.json", self.folder_holds)

    def load(self, source: str) -> tuple[Checkpoint, str]:
        """The target in float32, and the hash of what tuned it, or ""."""
        return load_target(source, self.kind)

    def check_target(self, target: Checkpoint) -> None:
        """Raise an error for a target that this task is not for."""
        if target.reads_source:
            raise UnsupportedModelError(
                f"{target.source} is an encoder-decoder, for which only jetdraft train "
                "block trains; give a decoder alone"
            )

    def positions(self, model: Any) -> int | None:
        """The most tokens of a sequence that the target can read."""
        most: int = model.config.get_text_config(decoder=True).max_position_embeddings
        return most

    def check(self, run: Training) -> None:
        """Decide what depends on the target; raises `OptionError`."""

    def writer(self, target: Checkpoint) -> Any:
        """The function that writes the target's texts; see `Writing`."""
        return continuations

    def check_texts(self, run: Training) -> None:
        """Raise `DataError` for texts that cannot be learned from."""

    # --- the pupil and what it learns -------------------------------------------------

    @abstractmethod
    def pupil(self, run: Training) -> nn.Module:
        """What is trained and its loss as one module, which processes can share."""

    def weights(self, run: Training) -> dict[str, Tensor]:
        """What is trained: all weights of the drafter that are not the target's."""
        of_target = {id(weight) for weight in run.target.model.parameters()}
        named = run.module.drafter.named_parameters()
        return {name: weight for name, weight in named if id(weight) not in of_target}

    def advised_steps(self, run: Training) -> int:
        """The steps of a training without a number of them."""
        return 200

    def optimizers(self, run: Training) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the layers, AdamW for tables and vectors.

        Few steps are made, and Muon makes more of each than AdamW (docs/heads.md).
        """
        tables = {n for n in run.weights if n.startswith(("embed_tokens", "lm_head"))}
        return two_optimizers(run.weights, tables, self.betas)

    def batch(self, run: Training, batch: Batch) -> Batch:
        """The batch of a step, which a task may rewrite."""
        return batch

    def lesson(self, run: Training, batch: Batch, learns: bool) -> tuple[Any, ...]:
        """The arguments of the pupil for a batch of a step or of a validation."""
        raise NotImplementedError

    def total(self, sums: Any, places: Tensor) -> Tensor:
        """The loss to minimise; `places` are those of all processes."""
        loss: Tensor = sums.lost.sum() / places.sum().clamp(min=1)
        return loss

    def loss(self, run: Training, module: Any, batch: Batch) -> Tensor:
        """The loss of a batch, or of the part of it that this process has."""
        sums = module(*self.lesson(run, batch, True))
        places = run.reduced(sums.places)
        # Processes average their gradients, and each has a part of the sum.
        return self.total(sums, places) * run.processes

    # --- what a validation says -------------------------------------------------------

    def validate(self, run: Training, module: Any) -> dict[str, Any]:
        """The figures of the validation texts; raises `TrainingError`."""
        parts = [
            module(*self.lesson(run, batch, False)) for batch in run.held_out_batches()
        ]
        return self.figures(run, parts)

    def figures(self, run: Training, parts: Sequence[Any]) -> dict[str, Any]:
        """Losses, and how often a place is accepted if all places before it are."""
        names = ("lost", "places", "reached", "accepted")
        lost, places, reached, accepted = summed(parts, *names)
        run.check_finite(lost)
        rates = accepted / reached.clamp(min=1)
        return {
            "losses": rounded(lost / places.clamp(min=1)),
            "acceptance": rounded(rates),
            "tokens_per_pass": round(1 + rates.cumprod(0).sum().item(), 3),
        }

    def headline(self, run: Training) -> str:
        """A line that says what will be trained on what."""
        return f"training {run.parameters} weights of {self.product} on {run.reading}"

    def summary_line(self, figures: Mapping[str, Any]) -> str:
        """The figures of a validation in words."""
        rates = " ".join(f"{rate:.2f}" for rate in figures["acceptance"])
        line = f"validation loss {figures['losses'][0]:.2f}"
        if "tokens_per_pass" not in figures:
            return f"{line}, right by place {rates}"
        tokens = figures["tokens_per_pass"]
        return f"{line}, accepted by place {rates}, so {tokens:.2f} tokens a pass"

    # --- what is written --------------------------------------------------------------

    def settings_of_run(self, run: Training) -> dict[str, Any]:
        """The settings that a resumed run must repeat, beside options and data."""
        return asdict(self.settings) | {"target": run.base}

    def begin(self, run: Training) -> None:
        """Make the output folder."""
        run.folder.create()

    @abstractmethod
    def published(
        self, run: Training, weights: dict[str, Tensor], figures: Any
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The fields of the config, and the tensors, as the export reads them."""

    def save(
        self, run: Training, weights: dict[str, Tensor], state: Any, figures: Any
    ) -> None:
        """Write the weights, in the type of the training, and the state."""
        config, tensors = self.published(run, weights, figures)
        if self.figures_file:
            record = {**self.settings_of_run(run), "step": run.step}
            record["validation"] = figures
            run.folder.write(self.figures_file, json.dumps(record, indent=2) + "\n")
        run.folder.save(tensors, config, state, run.finished)


def two_optimizers(
    weights: Mapping[str, Tensor], tables: set[str], betas: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    """Muon for all matrices but the named tables, and AdamW for what is left."""
    inner = {n: w for n, w in weights.items() if w.ndim == 2 and n not in tables}
    others = [weight for name, weight in weights.items() if name not in inner]
    optimizers: list[torch.optim.Optimizer] = [Muon(inner.values(), lr=0.0)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=0.0, betas=betas))
    return optimizers


def adamw(
    run: Training, betas: tuple[float, float] = (0.9, 0.999)
) -> list[torch.optim.Optimizer]:
    """AdamW for all weights."""
    return [torch.optim.AdamW(run.weights.values(), lr=0.0, betas=betas)]
