"""A bundle of a target that drafts by itself, which the toy bundle cannot do."""

from __future__ import annotations

from pathlib import Path

CAPACITY, WIDTH = 160, 16


def streamed_bundle(folder: Path) -> Path:
    """Export a tiny checkpoint with random streams to `folder`, in a few seconds.

    It needs torch, which is imported here, so that other subjects do not wait for it.

        jetdraft.load(streamed_bundle(Path("streamed"))).methods
    """
    from jetdraft.checkpoints.streamed import StreamSettings
    from jetdraft.export.exporter import ExportOptions, export
    from jetdraft.recipe import Recipe
    from tests.tiny import llama_config, save_checkpoint, save_streams

    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    save_checkpoint(checkpoint, llama_config(num_hidden_layers=2))
    settings = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
    save_streams(checkpoint, settings, seed=0)
    options = ExportOptions(Recipe("none"), capacity=CAPACITY, max_width=WIDTH)
    export(str(checkpoint), folder, options=options)
    return folder
