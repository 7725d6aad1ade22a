"""Lets a target give the features that a head reads, one for each row of a pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.taps import Taps
from jetdraft.contracts.step_contract import StepContract
from jetdraft.devices.providers import HALVES, cpu_only
from jetdraft.errors import OptionError, PairError
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.job import Job
from jetdraft.export.step import Step
from jetdraft.export.variants.variant import Variant

_PREFIX = "features"
"""The names of the fusion's weights in the graph begin with it."""


class FeatureStep(Step):
    """One pass of a model that gives features too; see `Step` and `Taps`."""

    def __init__(self, model: Any, contract: StepContract, taps: Taps) -> None:
        above = len(contract.kv_shapes) - taps.cut if taps.cut else 0
        super().__init__(model, contract, cut=above)
        self.taps = torch.nn.ModuleDict({_PREFIX: taps})

    def dtype_of(self, weight: str) -> torch.dtype:
        """The fusion stays in single precision, as its states overflow float16."""
        if weight.startswith(f"{_PREFIX}."):
            return torch.float32
        return super().dtype_of(weight)

    @contextlib.contextmanager
    def features(self) -> Iterator[list[torch.Tensor]]:
        """The features of the rows, filled by the forward pass."""
        taps = cast(Taps, self.taps[_PREFIX])
        with taps.watching(self.model) as features:
            yield features


def check(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    """Refuse a head of another target, a head beside streams, and a useless cut."""
    if checkpoint.taps is None:
        return
    if checkpoint.streams is not None:
        raise PairError(
            f"{checkpoint.source} has streams, so it drafts without a head; leave one "
            "of them out"
        )
    fix = "export for --provider cpu, or with another head"
    refusal = cpu_only(HALVES, options.provider_of(name).name, fix)
    if checkpoint.taps.cut and refusal:
        raise OptionError(refusal)
    checkpoint.taps.check(checkpoint.model)


def declare(checkpoint: Checkpoint, contract: StepContract) -> StepContract:
    """Add the width of the features."""
    size = checkpoint.taps.size if checkpoint.taps else 0
    return replace(contract, feature_size=size)


def write(job: Job) -> None:
    """Let the chain graph be traced with the features.

    The fusion's weights stay floats: its input has the largest numbers of the model.
    """
    taps = job.checkpoint.taps
    if taps is None:
        return
    job.step = FeatureStep(job.checkpoint.model, job.contract, taps)
    job.task = {f"{_PREFIX}.{name}": p.data for name, p in taps.named_parameters()}


VARIANT = Variant(write, check, declare)
