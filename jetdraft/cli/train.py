"""jetdraft train: the commands of the modules in jetdraft/train."""

from __future__ import annotations

from typing import Any

import click

from jetdraft.terminal.command import LazyGroup, extra_module
from jetdraft.train import TRAINERS


class Trainers(LazyGroup):
    """The trainers; only the one in use is imported, and torch with it."""

    package = "jetdraft.train"
    summaries = TRAINERS

    def load(self, name: str) -> Any:
        """Import the module, or name the extra that is missing."""
        return extra_module(f"{self.package}.{name}", "training", "train")


@click.group("train", cls=Trainers)
def command() -> None:
    """Train a model to draft."""
