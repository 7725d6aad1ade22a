"""Write the tuned target of shared streams as a checkpoint of its own.

    python examples/tasks/merge.py runs/sql/streams -o runs/sql/tuned

Heads and drafters can be trained for it, and compared with the streams at equal text.
"""

import shutil
from pathlib import Path

import click
import torch

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streams import SHARED
from jetdraft.manifest import writing


@click.command()
@click.argument("streams", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(streams: Path, output: Path) -> None:
    """Write the weights to which STREAMS, of mode shared, tune their base."""
    if output.exists():
        raise click.UsageError(f"{output} exists; choose another folder")
    checkpoint = Checkpoint.load(str(streams), torch.float32)
    if checkpoint.streams is None or checkpoint.streams.mode != SHARED:
        raise click.UsageError(f"{streams} has no streams of mode shared")
    tuned = checkpoint.add_probes(1.0).model.state_dict()
    plain = Checkpoint.load(str(streams), torch.float32).model
    plain.load_state_dict(tuned)
    with writing(output) as folder:
        plain.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (streams / name).is_file():
                shutil.copy(streams / name, folder / name)


if __name__ == "__main__":
    main()
