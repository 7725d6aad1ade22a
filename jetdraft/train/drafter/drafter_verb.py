"""jetdraft train drafter: a small model that drafts for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jetdraft.cli.command import Command, option, together
from jetdraft.cli.flags import PATH, integers
from jetdraft.train.block.block_settings import BlockSettings, SourceBlockSettings
from jetdraft.train.drafter.divergences import BETA, FORWARD_KL
from jetdraft.train.drafter.kinds import DEFAULT, KINDS, settings_of
from jetdraft.train.drafter.model_settings import LOSSES, ModelSettings
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import run_training, training_options

FROM_USE = "--from-use"


class DrafterCommand(Command):
    """Trains from texts, or with --from-use from a model's use, by other options."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse the arguments by the options of the training that they ask for."""
        if any(arg.split("=")[0] == FROM_USE for arg in args):
            from jetdraft.train.use.use_verb import command as use_command

            return use_command.make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def _layers(context: Any, param: Any, value: str | None) -> tuple[int, ...] | None:
    return tuple(integers(value, param.opts[0])) if value else None


# Without defaults: an option that was given must be one of the kind's.
_model_options = together(
    option(
        "training",
        "--layers",
        type=int,
        help="Layers of a new drafter; default: as many as cost 5 % of a pass.",
    ),
    option(
        "training",
        "--hidden-size",
        type=int,
        help="Width of a new drafter; default: what costs 5 % of a pass.",
    ),
    option(
        "training",
        "--from",
        "start",
        metavar="CHECKPOINT",
        help="Start from this checkpoint, which has the target's tokenizer.",
    ),
    option(
        "training",
        "--from-layers",
        metavar="LAYERS",
        callback=_layers,
        help="Start from these layers of the target in this order, for example 0,5,11, "
        "with its embedding, final norm and LM head.",
    ),
    option(
        "training",
        "--loss",
        help=f"How the drafter is compared with the target: {', '.join(LOSSES)}; text "
        f"is the cross entropy without a target. Default: {FORWARD_KL}.",
    ),
    option(
        "training",
        "--beta",
        type=float,
        help=f"Weight of the target in the loss js; default: {BETA}.",
    ),
    option(
        "training",
        "--regenerate",
        is_flag=True,
        default=None,
        help="Let the target complete the texts itself, and train on what it writes.",
    ),
    option(
        "training",
        "--on-policy-share",
        type=float,
        help="Share of each batch that the drafter completes itself; default: 0.",
    ),
    option(
        "drafting",
        "--draft-vocab",
        type=int,
        help="Tokens that the drafter can draft, the most frequent in the data; "
        "default: all.",
    ),
    option(
        "training",
        "--cache",
        type=PATH,
        help="Keep what the target says of each text in this folder; default: compute "
        "it in each step.",
    ),
    option(
        "training",
        "--cache-tokens",
        type=int,
        help="Most likely tokens that the cache keeps of each place; default: "
        f"{ModelSettings.cache_tokens}.",
    ),
    option(
        "training",
        "--taps",
        metavar="LAYERS",
        callback=_layers,
        help="Layers whose outputs a DFlash head reads, for example 1,9,17; default: "
        "spread evenly.",
    ),
    option(
        "training",
        "--block-rows",
        type=int,
        help="Rows of a block that is filled in one pass; default: "
        f"{BlockSettings.block_rows}.",
    ),
    option(
        "training",
        "--anchors",
        type=int,
        help="Blocks that are learned in each sequence; default: "
        f"{BlockSettings.anchors}.",
    ),
    option(
        "training",
        "--known-share",
        type=float,
        help="Share of the blocks whose first tokens are known, as in the second step "
        f"of a draft; default: {BlockSettings.known_share}.",
    ),
    option(
        "training",
        "--glancing",
        type=float,
        help="Share of its wrong guesses that a block drafter is told at first; "
        f"it falls to 0; default: {SourceBlockSettings.glancing}.",
    ),
    option(
        "training",
        "--half",
        is_flag=True,
        default=None,
        help="Write the drafter in float16.",
    ),
)


@click.command("drafter", cls=DrafterCommand)
@click.argument("target")
@training_options("drafter", steps=None, prompts_alone=True)
@option(
    "training",
    "--kind",
    default=DEFAULT,
    show_default=True,
    help=f"The kind of drafter: {', '.join(KINDS)}.",
)
@_model_options
@option(
    "training",
    FROM_USE,
    metavar="DIR",
    type=PATH,
    expose_value=False,
    help="Train a bundle's drafter on the wrong drafts that serve --learn kept, with "
    "other options; see train drafter --from-use DIR --help.",
)
def command(
    target: str,
    data: list[Path],
    output: Path,
    training: TrainingOptions,
    kind: str,
    **options: Any,
) -> int:
    """Train a drafter for TARGET, a checkpoint folder or hub id."""
    given = {name: value for name, value in options.items() if value is not None}
    flags = {param.name or "": param.opts[0] for param in command.params}
    settings = settings_of(kind, given, flags)
    make: Any = KINDS[kind].training
    return run_training(
        lambda bars: make(target, output, data, settings, training, bars)
    )
