"""What an export does otherwise for a decoder alone and for an encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.seams import check_seams
from jetdraft.export.source.source_seams import (
    check_source_seams,
    most_positions,
    source_shapes,
)
from jetdraft.export.step import kv_shapes
from jetdraft.quant.choice import TOP
from jetdraft.recipe import Recipe


def _open(checkpoint: Checkpoint, options: ExportOptions) -> ExportOptions:
    """Leave what is open to the measurements."""
    return options


def _settled(checkpoint: Checkpoint, options: ExportOptions) -> ExportOptions:
    """Choose the safe recipe: no text is written to measure others on.

    A model that hears gets no more rows than it has positions: the text of a window is
    never longer.
    """
    recipe, capacity = options.recipe or Recipe.parse(TOP), options.capacity
    if checkpoint.speech is not None:
        capacity = min(capacity, most_positions(checkpoint.model) or capacity)
    width = min(options.max_width, capacity)
    return replace(
        options, recipe=recipe, fast=True, capacity=capacity, max_width=width
    )


@dataclass(frozen=True)
class Family:
    """The steps of an export that depend on the kind of a model.

    `kv_shapes` gives (kv_heads, head_dim) by layer, `check_seams` raises
    `UnsupportedModelError`, and `options` settles what cannot be measured.

        Family.of(checkpoint).kv_shapes(checkpoint.model)
    """

    kv_shapes: Callable[[Any], tuple[tuple[int, int], ...]]
    check_seams: Callable[[Any, StepContract], None]
    options: Callable[[Checkpoint, ExportOptions], ExportOptions]

    @staticmethod
    def of(checkpoint: Checkpoint) -> Family:
        """The family of a checkpoint."""
        return _SOURCE if checkpoint.reads_source else _DECODER


_DECODER = Family(kv_shapes, check_seams, _open)
_SOURCE = Family(source_shapes, check_source_seams, _settled)
