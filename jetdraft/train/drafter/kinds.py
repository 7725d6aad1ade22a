"""The kinds of drafters that can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jetdraft.errors import OptionError
from jetdraft.train.block.block_settings import (
    DFlashSettings,
    DiffusionSettings,
    SourceBlockSettings,
)
from jetdraft.train.block.block_training import DFlashTraining, DiffusionTraining
from jetdraft.train.block.source_block_training import SourceBlockTraining
from jetdraft.train.drafter.model_settings import ModelSettings
from jetdraft.train.drafter.model_training import ModelTraining
from jetdraft.train.training import Training


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: a dataclass of its settings, and its training.

    The fields of the settings are the options that the kind takes. The training is made
    from target, output, data, settings, `TrainingOptions` and progress, in this order.

        Kind(ModelSettings, ModelTraining)
    """

    settings: type[Any]
    training: type[Training]

    @property
    def options(self) -> set[str]:
        """The names of its options."""
        return {field.name for field in fields(self.settings)}


KINDS = {
    "model": Kind(ModelSettings, ModelTraining),
    "dflash": Kind(DFlashSettings, DFlashTraining),
    "diffusion": Kind(DiffusionSettings, DiffusionTraining),
    "block": Kind(SourceBlockSettings, SourceBlockTraining),
}
DEFAULT = "model"


def settings_of(name: str, given: Mapping[str, Any], flags: Mapping[str, str]) -> Any:
    """The settings of a kind from the options that were given.

    `flags` maps all options to their names on the command line. Raises `OptionError`
    for an unknown kind, and for options that belong to other kinds.

        settings_of("model", {"layers": 2}, {"layers": "--layers"})
    """
    if name not in KINDS:
        raise OptionError(f"unknown kind {name!r}; choose {' or '.join(KINDS)}")
    strange = [option for option in given if option not in KINDS[name].options]
    if strange:
        takers = [n for n, kind in KINDS.items() if kind.options.issuperset(strange)]
        other = f", or give --kind {' or '.join(takers)}" if takers else ""
        raise OptionError(
            f"kind {name} does not take {', '.join(flags[o] for o in strange)}; leave "
            f"it out{other}"
        )
    return KINDS[name].settings(**given)
