"""jetdraft train: recipes that make drafters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from jetdraft.bundle import Bundle
from jetdraft.cli.bench import read_prompts
from jetdraft.cli.options import optional
from jetdraft.runtime.model import load


@click.group("train")
def command() -> None:
    """Teach a model to draft."""


@command.command("streams")
@click.argument("target")
@click.option(
    "--data",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="A text file, or .jsonl with prompt and completion; may be given again.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The checkpoint folder to write, or to take up again.",
)
@click.option(
    "--mode",
    default="lossless",
    show_default=True,
    help="lossless: the target stays as it is; shared: it is tuned too.",
)
@click.option("--gamma", default=4, show_default=True, help="Streams per row.")
@click.option(
    "--layers", default=2, show_default=True, help="Top layers that have streams."
)
@click.option("--lora-rank", default=32, show_default=True)
@click.option("--prune-rank", default=8, show_default=True)
@click.option("--steps", default=200, show_default=True)
@click.option("--batch-size", default=8, show_default=True, help="Sequences per step.")
@click.option(
    "--sequence-length", default=256, show_default=True, help="Tokens per sequence."
)
@click.option("--learning-rate", default=5e-4, show_default=True)
@click.option(
    "--validation-share",
    default=0.05,
    show_default=True,
    help="Of the sequences, held out to measure with.",
)
@click.option(
    "--validate-every",
    default=50,
    show_default=True,
    help="Steps between validations; each saves the checkpoint.",
)
@click.option("--seed", default=0, show_default=True)
def streams(
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
    training = optional("train.stream_training", "training", "train")
    from jetdraft.checkpoints.streamed import StreamSettings

    run = training.StreamTraining(
        target,
        output,
        list(data),
        StreamSettings(gamma, layers, mode, lora_rank, prune_rank),
        training.TrainingOptions(**options),
    )
    counts = run.parameters
    click.echo(
        f"training {counts['streams']} weights of the streams and {counts['lora']} of "
        f"LoRA on {len(run.corpus.training)} sequences",
        err=True,
    )
    shown = Shown()
    try:
        run.run(shown)
    except KeyboardInterrupt:
        shown.close()
        click.echo(
            f"stopped after step {run.step}; run the same command again to go on",
            err=True,
        )
        return 130
    shown.close()
    click.echo(f"{output}: streams of {run.step} steps", err=True)
    return 0


@command.command("acceptance")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="JSON lines with prompt or token_ids; default: a few of our own.",
)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--threads", type=int, help="Of the target; default: all cores.")
@click.option("--seed", default=0, show_default=True)
def acceptance(
    bundle: Path,
    prompts: Path | None,
    max_new_tokens: int,
    temperature: float,
    threads: int | None,
    seed: int,
) -> None:
    """Watch BUNDLE's drafter and learn when it should stop (--stopping learned)."""
    recipe = optional("train.acceptance", "training", "train")
    model = load(bundle, threads=threads)
    chosen = read_prompts(prompts, model)
    with click.progressbar(
        length=len(chosen),
        label="watch",
        file=sys.stderr,
        hidden=not sys.stderr.isatty(),
    ) as bar:
        hidden, accepted = recipe.watch(
            model, chosen, max_new_tokens, temperature, lambda: bar.update(1)
        )
    head, loss = recipe.fit(hidden, accepted, seed=seed)
    file = model.profiles.acceptance_file
    recipe.write(head, file, model.bundle.sha256)
    click.echo(
        f"{file}: {len(accepted)} drafted tokens, {accepted.mean():.2f} of them "
        f"accepted, held-out loss {loss:.2f}",
        err=True,
    )


@command.command("trigram")
@click.argument("corpus", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--bundle",
    required=True,
    type=click.Path(path_type=Path),
    help="Whose tokenizer to read with.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The table to write.",
)
def trigram(corpus: tuple[Path, ...], bundle: Path, output: Path) -> None:
    """Count which tokens follow which two in CORPUS, text files."""
    table = optional("train.table", "training", "train").count(
        corpus, Bundle.open(bundle), output
    )
    click.echo(
        f"{output}: {len(table.pairs)} pairs, {len(table.tokens)} successors", err=True
    )


class Shown:
    """A progress bar on a terminal, and a line for every validation."""

    def __init__(self) -> None:
        self.bar: Any = None

    def __call__(self, progress: Any) -> None:
        if progress.validation is not None:
            self.close()
            click.echo(_line(progress), err=True)
        if not sys.stderr.isatty():
            return
        if self.bar is None:
            self.bar = click.progressbar(
                length=progress.steps, label="train", file=sys.stderr
            )
            self.bar.update(progress.step)
        else:
            self.bar.update(1)

    def close(self) -> None:
        """End the bar's line."""
        if self.bar is not None:
            self.bar.render_finish()
            self.bar = None


def _line(progress: Any) -> str:
    found = progress.validation
    right = " ".join(f"{share:.2f}" for share in found["acceptance"])
    losses = " ".join(f"{loss:.2f}" for loss in found["stream_losses"])
    return (
        f"step {progress.step}: validation loss {found['main_loss']:.2f}, streams "
        f"{losses}, predicted acceptance {right}"
    )
