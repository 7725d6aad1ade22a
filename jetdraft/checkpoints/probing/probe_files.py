"""The files of a checkpoint whose rows can carry probes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jetdraft.checkpoints.probing.probed import Probed
from jetdraft.checkpoints.probing.prompted import MODES, PromptSettings, load_prompts
from jetdraft.checkpoints.streamed import (
    SETTINGS,
    UNFINISHED,
    StreamSettings,
    load_streams,
)
from jetdraft.errors import CheckpointError
from jetdraft.parsing import read_json_file, read_record

ProbeSettings = StreamSettings | PromptSettings


def read_settings(folder: Path) -> ProbeSettings | None:
    """The settings of a checkpoint's probes; None for a checkpoint without probes."""
    file, mark = folder / SETTINGS, folder / UNFINISHED
    try:
        if not file.is_file():
            added = mark.read_text(encoding="utf-8") if mark.is_file() else ""
            if added:
                raise CheckpointError(
                    f"the training in {folder} has saved no {added} yet; let it go on"
                )
            return None
        fields = read_json_file(file)
        kind = PromptSettings if fields["mode"] in MODES else StreamSettings
        settings = {name: fields[name] for name in kind.__dataclass_fields__}
        return read_record(kind, settings)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); train the streams again"
        ) from error


def load_probes(
    model: Any, settings: ProbeSettings, folder: Path, scale: float
) -> Probed:
    """Add a checkpoint's probes to its model, in place.

    In the shared mode of streams the LoRA, times `scale`, is merged into the model.
    """
    if isinstance(settings, PromptSettings):
        return load_prompts(model, settings, folder)
    return load_streams(model, settings, folder, scale)
