"""What a command says before the first text on a machine."""

from __future__ import annotations

import click

from jetdraft.runtime.model import Model


def announce_first_run(model: Model) -> None:
    """Print one line on standard error once a text must wait for measurements.

    announce_first_run(jetdraft.load("bundle"))
    """
    model.parts.survey.announce = _print_line


def _print_line() -> None:
    click.echo(
        "first run on this machine: a few passes are measured before the text; "
        "jetdraft tune measures all",
        err=True,
    )
