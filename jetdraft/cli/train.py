"""jetdraft train: the group of commands in the modules of jetdraft/train."""

from __future__ import annotations

from typing import Any

import click

from jetdraft.cli.command import LazyGroup, extra_module
from jetdraft.train import TRAINERS


class Trainers(LazyGroup):
    """The trainers; only a trainer in use is imported, and torch with it."""

    package = "jetdraft.train"
    summaries = TRAINERS

    def load(self, name: str) -> Any:
        """Import the module, or name the extra that is missing."""
        return extra_module(f"{self.package}.{name}", "training", "train")


@click.group("train", cls=Trainers)
def command() -> None:
    """Train a model to draft."""
