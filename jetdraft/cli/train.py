"""jetdraft train: one command for each method that learns, and three beside them."""

from __future__ import annotations

import click

from jetdraft.cli.command import LazyGroup, importing
from jetdraft.runtime.planning.registry import load_object, methods

OTHERS = {
    "sec": ("a head that stops a text", "jetdraft.train.sec:SecTask"),
    "acceptance": (
        "when the drafter should stop, for stopping=learned",
        "jetdraft.cli.trainings:acceptance",
    ),
    "use": (
        "the wrong drafts that serve --learn has kept",
        "jetdraft.cli.trainings:use",
    ),
}
"""What belongs to no method of its own: a summary, and a task or a click command."""


class Trainers(LazyGroup):
    """What can be trained; only a task in use is imported, and torch with it."""

    @property
    def summaries(self) -> dict[str, str]:  # type: ignore[override]
        """A line for each method with a task, and for the others."""
        trained = {name: m.summary for name, m in methods().items() if m.task}
        return trained | {name: summary for name, (summary, _) in OTHERS.items()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a task and make its command, or None for an unknown name."""
        if cmd_name not in self.summaries:
            return None
        name = OTHERS[cmd_name][1] if cmd_name in OTHERS else methods()[cmd_name].task
        with importing("training", "train"):
            loaded = load_object(name)
            if isinstance(loaded, click.Command):
                return loaded
            from jetdraft.cli.trainings import command_of
        return command_of(cmd_name, loaded)


@click.group("train", cls=Trainers)
def command() -> None:
    """Train a model to draft."""
