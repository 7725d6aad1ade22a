"""What a variant of a step graph gives the exporter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.job import Job


def _check_nothing(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    """Accept every checkpoint."""


def _add_nothing(checkpoint: Checkpoint, contract: StepContract) -> StepContract:
    """Leave the contract as it is."""
    return contract


@dataclass(frozen=True)
class Variant:
    """One kind of graph that the exporter writes.

    `write` writes its graphs and adds them to the job's entry; it may also change the
    job for later variants. `check` raises a `JetdraftError` if the checkpoint of that
    name in the bundle cannot have the variant. `declare` adds the sizes that the
    variant needs to the contract of a checkpoint.

        VARIANT = Variant(write)
    """

    write: Callable[[Job], None]
    check: Callable[[str, Checkpoint, ExportOptions], None] = _check_nothing
    declare: Callable[[Checkpoint, StepContract], StepContract] = _add_nothing
