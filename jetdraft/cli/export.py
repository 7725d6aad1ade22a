"""jetdraft export: makes a bundle from checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from jetdraft.cli import StandaloneCommand
from jetdraft.cli.command import Command, keyword_flags
from jetdraft.cli.console import ProgressBars
from jetdraft.cli.flags import output_option
from jetdraft.export.request import ExportRequest, export
from jetdraft.runtime.planning.registry import methods_of


@click.command("export", cls=Command)
@click.argument("target")
@keyword_flags(ExportRequest)
@output_option("Write the bundle to this folder; a bundle there is replaced.")
def command(target: str, output: Path, **options: Any) -> None:
    """Export TARGET, a checkpoint folder, GGUF file or hub id, to a bundle."""
    with ProgressBars() as bars:
        bundle = export(target, output, **options, progress=bars)
    size = sum(file["bytes"] for file in bundle.files.values())
    names = ", ".join(methods_of(bundle))
    room = f"{bundle.target.contract.capacity} tokens of context"
    click.echo(f"{output}: {size / 1e6:.1f} MB, {room}, methods {names}", err=True)
    for name, entry in bundle.graphs.items():
        kl = entry.quantization.get("kl")
        kl_text = f", KL {kl:.2g}" if kl is not None else ""
        click.echo(f"{name}: {entry.scheme}{kl_text}", err=True)


def run_for_optimum(arguments: Sequence[str]) -> None:
    """Run an export with these arguments and exit; the code is 2 after bad input."""
    output = next(param for param in command.params if param.name == "output")
    others = [param for param in command.params if param is not output]
    StandaloneCommand(
        "jetdraft",
        params=[*others, click.Argument(["output"], type=output.type)],
        callback=command.callback,
        help=f"{command.help}\n\nOUTPUT is the bundle folder to write.",
        context_settings={"help_option_names": ["-h", "--help"]},
    ).main(arguments, prog_name="optimum-cli export jetdraft")
