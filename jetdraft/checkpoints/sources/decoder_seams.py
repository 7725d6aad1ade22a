"""The seams of decoders that read a source: positions, distances, answered rows.

A decoder of transformers looks positions up in a module `embed_positions`, or has T5's
bias by the distance of rows. Both count the rows of a pass as the whole text, which
they are not here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from jetdraft.errors import UnsupportedModelError


def relative_table(model: Any) -> Any:
    """The decoder's attention with a table of biases by distance; None without it."""
    modules = model.get_decoder().modules()
    named = "has_relative_attention_bias"
    return next((m for m in modules if getattr(m, named, False)), None)


def distance_bias(
    model: Any, rows: Tensor, slots: Tensor, both_ways: bool = False
) -> Tensor:
    """The bias [b, heads, n, k] of slots at positions int64 [b, k] for rows [b, n].

    The model has a `relative_table`. With `both_ways` a slot behind a row counts as one
    that is as far before it; otherwise no row sees a slot behind it.
    """
    module = relative_table(model)
    distance = slots[:, None, :] - rows[:, :, None]
    buckets = module._relative_position_bucket(
        -distance.abs() if both_ways else distance,
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    bias: Tensor = module.relative_attention_bias(buckets)
    return bias.permute(0, 3, 1, 2)


@contextlib.contextmanager
def placed(model: Any, positions: Tensor) -> Iterator[None]:
    """Let the decoder look up the positions int64 [b, n] of the rows of a pass."""
    table = getattr(model.get_decoder(), "embed_positions", None)
    if table is None:
        if relative_table(model) is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has positions of its own kind; export another "
                "architecture"
            )
        yield
        return
    places = positions + getattr(table, "offset", 0)
    table.forward = lambda *_, **__: torch.nn.functional.embedding(places, table.weight)
    try:
        yield
    finally:
        del table.forward


@contextlib.contextmanager
def answering(model: Any, rows: Any) -> Iterator[None]:
    """Let the LM head see some rows only; `rows` is an index of states [b, n, h]."""

    def keep(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[rows]
        return output

    handle = model.get_decoder().register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
