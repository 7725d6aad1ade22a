"""Teaching a decoder to draft: streams, LoRA and the pruning adapter."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import click
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save as serialized
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from jetdraft.checkpoints.checkpoint import (
    Checkpoint,
    checkpoint_folder,
    weights_sha256,
)
from jetdraft.checkpoints.parameters import convert
from jetdraft.checkpoints.streamed import (
    SETTINGS,
    SHARED,
    UNFINISHED,
    WEIGHTS,
    Streamed,
    Streams,
    StreamSettings,
    add_adapters,
    decoder_layers,
    stream_weights,
)
from jetdraft.errors import (
    CheckpointError,
    DataError,
    OptionError,
    OutputError,
    TrainingError,
)
from jetdraft.files import replacing
from jetdraft.terminal.command import Command, option
from jetdraft.terminal.flags import PATH, output_option, training_seed_option
from jetdraft.terminal.progress import ProgressBars
from jetdraft.train.data import Corpus
from jetdraft.train.losses import Losses, losses
from jetdraft.train.stream_attention import IMPLEMENTATION

STATE = "training.pt"
WARM_UP = 0.03
Report = Callable[["Progress"], None]


@dataclass(frozen=True)
class TrainingOptions:
    """How long and how fast; lengths in tokens, the rate falls linearly to zero.

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
    """Where the training stands; figures of the validation sequences if there are."""

    step: int
    steps: int
    loss: float
    validation: dict[str, Any] | None = None


class StreamTraining:
    """A run that can be stopped and taken up again.

    The output is a checkpoint folder: the target's own files, untouched, and beside
    them the streams. A second run with the same settings goes on where it stopped.

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
        self.output = output
        settings = settings or StreamSettings()
        settings.check(1 << 20)
        self._check_output()
        if self.options.sequence_length < settings.gamma + 2:
            raise OptionError(
                f"sequences of {self.options.sequence_length} tokens are too short for "
                f"{settings.gamma} streams; give {settings.gamma + 2} or more"
            )
        checkpoint = Checkpoint.load(target, torch.float32)
        convert(checkpoint.model, torch.float32)
        if checkpoint.packed is not None and settings.mode == SHARED:
            raise CheckpointError(
                f"{target} is quantized already, so its weights cannot be tuned; give "
                "mode lossless, or the checkpoint that it was made of"
            )
        if checkpoint.streams is not None:
            raise CheckpointError(f"{target} already has streams; give its base")
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
        """How many weights are trained: of the streams themselves, and of LoRA."""
        own = sum(p.numel() for p in self.streamed.streams.parameters())
        every = sum(weight.numel() for weight in self.weights.values())
        return {"streams": own, "lora": every - own}

    def _read(self, checkpoint: Checkpoint, data: Sequence[Path]) -> Corpus:
        if checkpoint.tokenizer is None:
            raise DataError(
                f"{checkpoint.source} has no tokenizer to read the data with; add one"
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
        """Sequences must lie within the positions that the target was made for."""
        length = self.options.sequence_length
        config = model.config.get_text_config(decoder=True)
        most: int = config.max_position_embeddings
        if length > most:
            raise OptionError(
                f"sequence length {length} is more than the target's {most} positions; "
                f"give at most {most}"
            )

    def _check_output(self) -> None:
        if not self.output.exists() or (self.output / UNFINISHED).is_file():
            return
        finished = (self.output / SETTINGS).is_file()
        what = "holds a finished training" if finished else "exists and has no streams"
        raise OutputError(f"{self.output} {what}; choose another folder")

    def run(self, report: Report) -> dict[str, Any]:
        """Train to the end; the figures of the last validation come back.

        Raises `TrainingError` if the loss is no longer a number, and saves what there
        is before it passes a `KeyboardInterrupt` on.
        """
        accelerator = Accelerator(mixed_precision="bf16")
        optimizer = torch.optim.AdamW(self.weights.values(), lr=0.0)
        if accelerator.is_main_process:
            self._copy_base()
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
                due = last or self.step % self.options.validate_every == 0
                if due:
                    figures = self._validate(accelerator, streamed)
                    self._save(accelerator, optimizer, figures)
                self._report(accelerator, report, loss, figures if due else None)
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
        """One step; its loss."""
        batch = self.corpus.batch(
            self.step,
            self.options.batch_size,
            accelerator.process_index,
            accelerator.num_processes,
        ).to(accelerator.device)
        with accelerator.autocast():
            found = losses(streamed, batch, self.settings.gamma)
            loss = found.total(self.settings.mode)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(self.weights.values(), 1.0)
        # An infinite gradient would make the weights no numbers without warning.
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            raise TrainingError(self._what_is_kept())
        for group in optimizer.param_groups:
            group["lr"] = self._rate()
        optimizer.step()
        optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def _rate(self) -> float:
        """Warm-up, then linear decay."""
        done = self.step / self.options.steps
        return self.options.learning_rate * min(
            1.0, (self.step + 1) / max(1.0, WARM_UP * self.options.steps), 1.0 - done
        )

    def _what_is_kept(self) -> str:
        kept = (
            f"the last good checkpoint is in {self.output}"
            if (self.output / SETTINGS).is_file()
            else "nothing had been learned yet"
        )
        what_to_do = (
            "train again into another folder with a lower --learning-rate"
            if self.step
            else "the target itself gives no numbers for this data"
        )
        return f"the loss of step {self.step + 1} is not a number; {kept}; {what_to_do}"

    def _validate(self, accelerator: Any, streamed: Any) -> dict[str, Any]:
        """Means over the validation sequences."""
        streamed.eval()
        found: list[Losses] = []
        with torch.no_grad(), accelerator.autocast():
            for batch in self.corpus.validation_batches(self.options.batch_size):
                here = batch.to(accelerator.device)
                found.append(losses(streamed, here, self.settings.gamma))
        streamed.train()

        if not all(torch.isfinite(each.main) for each in found):
            raise TrainingError(self._what_is_kept())

        def mean(name: str) -> Any:
            values = torch.stack([getattr(each, name) for each in found]).float()
            return [round(x, 4) for x in values.mean(0).reshape(-1).tolist()]

        return {
            "main_loss": mean("main")[0],
            "stream_losses": mean("streams"),
            "early_loss": mean("early")[0],
            "acceptance": mean("acceptance"),
        }

    # --- saving -----------------------------------------------------------------------

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        """Take up what an earlier run left in the output folder."""
        file = self.output / STATE
        if not file.is_file():
            if (self.output / SETTINGS).is_file():
                raise OutputError(
                    f"{self.output} has streams but not what it takes to go on; choose "
                    "another folder"
                )
            return
        try:
            state = torch.load(file, weights_only=True, map_location="cpu")
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            raise OutputError(
                f"{file} is damaged; train again into another folder"
            ) from error
        if changed := _differences(state["run"], self._identity()):
            raise OutputError(
                f"{self.output} holds a training with other settings "
                f"({', '.join(changed)}); choose another folder, or give the same"
            )
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
        """Write the checkpoint, each file whole or not at all.

        `figures` are those of this step's validation, if there was one.
        """
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            return
        weights = {name: w.detach().cpu() for name, w in self.weights.items()}
        described = {
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
        text = json.dumps(described, indent=2) + "\n"
        self._replace(STATE, lambda file: torch.save(state, file))
        self._replace(WEIGHTS, lambda file: file.write_bytes(serialized(weights)))
        self._replace(SETTINGS, lambda file: file.write_text(text, encoding="utf-8"))
        if self.step == self.options.steps:
            (self.output / STATE).unlink()
            (self.output / UNFINISHED).unlink(missing_ok=True)

    def _copy_base(self) -> None:
        """Put the target's own files into the output, which appears whole."""
        if self.output.exists():
            if weights_sha256(self.output) != self.settings.base:
                raise OutputError(
                    f"{self.output} holds another target, or a damaged copy of this "
                    "one; choose another folder"
                )
            return
        with self._writing():
            partial = self.output.with_name(f".{self.output.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self.source, partial)
            (partial / UNFINISHED).touch()
            partial.rename(self.output)

    def _replace(self, name: str, write: Callable[[Path], Any]) -> None:
        with self._writing(), replacing(self.output / name) as partial:
            write(partial)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            raise OutputError(
                f"cannot write {self.output} ({error}); free some space or choose "
                "another folder"
            ) from error


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what two runs were given differently."""
    found = [] if one["data"] == other["data"] else ["data"]
    for part in ("settings", "options"):
        names = one[part].keys() | other[part].keys()
        found += sorted(n for n in names if one[part].get(n) != other[part].get(n))
    return [name.replace("_", " ") for name in found]


@click.command("streams", cls=Command)
@click.argument("target")
@option(
    "training",
    "--data",
    multiple=True,
    required=True,
    type=PATH,
    help="A text file, or .jsonl with prompt and completion; may be given several "
    "times.",
)
@option(
    "training",
    "--mode",
    default="lossless",
    show_default=True,
    help="lossless keeps the target as it is; shared trains it too.",
)
@option(
    "training",
    "--gamma",
    default=4,
    show_default=True,
    help="Streams per row.",
)
@option(
    "training",
    "--layers",
    default=2,
    show_default=True,
    help="Top layers that have streams.",
)
@option(
    "training",
    "--lora-rank",
    default=32,
    show_default=True,
    help="Rank of the LoRA adapters.",
)
@option(
    "training",
    "--prune-rank",
    default=8,
    show_default=True,
    help="Rank of the early exit that prunes drafts.",
)
@option(
    "training",
    "--steps",
    default=200,
    show_default=True,
    help="Steps of training.",
)
@option(
    "training",
    "--batch-size",
    default=8,
    show_default=True,
    help="Sequences per step.",
)
@option(
    "training",
    "--sequence-length",
    default=256,
    show_default=True,
    help="Tokens per sequence.",
)
@option(
    "training",
    "--learning-rate",
    default=5e-4,
    show_default=True,
    help="Learning rate of the first step; it falls to zero.",
)
@option(
    "training",
    "--validation-share",
    default=0.05,
    show_default=True,
    help="Share of the sequences held out for validation.",
)
@option(
    "training",
    "--validate-every",
    default=50,
    show_default=True,
    help="Steps between validations; each saves the checkpoint.",
)
@training_seed_option
@output_option("Write the checkpoint to this folder, or resume the run in it.")
def command(
    target: str,
    data: tuple[Path, ...],
    output: Path,
    mode: str,
    gamma: int,
    layers: int,
    lora_rank: int,
    prune_rank: int,
    **options: Any,
) -> int:
    """Add speculative streams to TARGET, a checkpoint folder or hub id."""
    settings = StreamSettings(gamma, layers, mode, lora_rank, prune_rank)
    run = StreamTraining(
        target, output, list(data), settings, TrainingOptions(**options)
    )
    counts = run.parameters
    click.echo(
        f"training {counts['streams']} weights of the streams and {counts['lora']} of "
        f"LoRA on {len(run.corpus.training)} sequences",
        err=True,
    )
    with ProgressBars() as bars:
        try:
            run.run(lambda progress: _show(bars, progress))
        except KeyboardInterrupt:
            bars.close()
            click.echo(
                f"stopped after step {run.step}; run the same command again to resume",
                err=True,
            )
            return 130
    click.echo(f"{output}: streams of {run.step} steps", err=True)
    return 0


def _show(bars: ProgressBars, progress: Progress) -> None:
    """Move the bar, and print a line after a validation."""
    figures = progress.validation
    if figures is not None:
        bars.close()
        rates = " ".join(f"{share:.2f}" for share in figures["acceptance"])
        stream_losses = " ".join(f"{loss:.2f}" for loss in figures["stream_losses"])
        click.echo(
            f"step {progress.step}: validation loss {figures['main_loss']:.2f}, "
            f"streams {stream_losses}, predicted acceptance {rates}",
            err=True,
        )
    bars("train", progress.step, progress.steps)
