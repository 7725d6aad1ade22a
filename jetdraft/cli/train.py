"""jetdraft train: one command for each method that learns, and two beside them."""

import click

from jetdraft.cli.command import LazyGroup
from jetdraft.errors import importing
from jetdraft.runtime.planning.registry import load_object, methods

TRAININGS = {
    "acceptance": "when the drafter should stop, for stopping=learned",
    "use": "the wrong drafts that serve --learn has kept",
}


class Trainers(LazyGroup):
    """The group of training commands; imports torch only when a command is used."""

    @property
    def summaries(self) -> dict[str, str]:  # type: ignore[override]
        """A line of help for each method with a task, and for `TRAININGS`."""
        return {name: m.summary for name, m in methods().items() if m.task} | TRAININGS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.summaries:
            return None
        is_own = cmd_name in TRAININGS
        place = f"jetdraft.cli.trainings:{cmd_name}"
        with importing("training", "train"):
            loaded = load_object(place if is_own else methods()[cmd_name].task)
            if isinstance(loaded, click.Command):
                return loaded
            from jetdraft.cli.trainings import make_command
        return make_command(cmd_name, loaded)


@click.group("train", cls=Trainers)
def command() -> None:
    """Train a model to draft."""
