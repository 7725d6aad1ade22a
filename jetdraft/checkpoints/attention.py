"""Lets any transformers decoder attend over jetdraft's fixed KV buffers.

The seams are a function of `AttentionInterface` and a `Cache` that keeps nothing. An
export gives one `com.microsoft.GroupQueryAttention` node; else PyTorch computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from jetdraft.errors import UnsupportedModelError

IMPLEMENTATION = "jetdraft"
"""The name under which the attention is registered with transformers."""

_ARGUMENT_WORDS = {"s_aux": "attention sinks (s_aux)"}
"""Plain words for the names of arguments, in error messages."""

_IGNORED = {"dropout", "position_ids", "is_causal", "use_cache", "cache_position"}
"""Arguments that do not change what attention computes here."""


@dataclass
class StepState:
    """The inputs and outputs that the attention layers share in one pass.

    `past` and `present` hold (key, value) buffers [1, kv_heads, capacity, head_dim] per
    layer. `last_row` is int32 [1], the index of the pass's last row in them. `windows`
    has the sliding windows of the layers, 0 for none; a `bias` [1, 1, n, capacity] is
    added to the scores. Rows after the first `rows` see each layer's `prefix` too.
    """

    cursor: Tensor
    last_row: Tensor
    total_length: Tensor
    past: list[tuple[Tensor, Tensor]]
    present: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    windows: set[int] = field(default_factory=set)
    bias: Tensor | None = None
    prefix: list[tuple[Tensor, Tensor]] | None = None
    rows: int = 0


_active_states: list[StepState] = []


@contextmanager
def attending(state: StepState) -> Iterator[StepState]:
    """Let the attention layers read and write `state` inside the block."""
    _active_states.append(state)
    try:
        yield state
    finally:
        _active_states.pop()


def active_state() -> StepState:
    """The state of the pass that runs now."""
    return _active_states[-1]


class PassThroughCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """A cache that stores nothing: attention itself writes the fixed buffers."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions are given explicitly, so no length is needed."""
        return 0


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attention over the active `StepState`: [1, heads, n, d] to [1, n, heads, d]."""
    unknown = unknown_arguments(extra)
    if attention_mask is not None or unknown or key.shape[-1] != value.shape[-1]:
        raise UnsupportedModelError(
            f"{type(module).__name__} needs more than GroupQueryAttention computes "
            f"({', '.join(unknown) or 'its own mask or head size'}); "
            "see docs/models.md"
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(module).__name__} attends in both directions; only causal decoders "
            "can be exported"
        )
    state, layer = active_state(), int(module.layer_idx)  # type: ignore[arg-type]
    if layer in state.present:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends twice in one layer; see docs/models.md"
        )
    state.windows.add(sliding_window or 0)
    prefix = None if state.prefix is None else state.prefix[layer]
    if prefix is not None:
        query, key, value = _insert_prefix((query, key, value), prefix, state.rows)
    call = _AttentionInputs(
        query,
        key,
        value,
        *state.past[layer],
        scale=float(scaling if scaling is not None else query.shape[-1] ** -0.5),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    compute = _make_node if torch.compiler.is_exporting() else _run_eagerly
    output, *present = compute(call, state)
    state.present[layer] = (present[0], present[1])
    if prefix is not None:
        behind = state.rows + prefix[0].shape[2]
        output = torch.cat([output[:, : state.rows], output[:, behind:]], 1)
    return output, None


def attend_over_buffers(
    module: Any, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attend to the pass's buffers with rotated query and key: [b, n, heads, d]."""
    return attend(module, query, key, value, None, module.scaling)[0]


def _insert_prefix(
    rows: tuple[Tensor, ...], prefix: tuple[Tensor, Tensor], count: int
) -> list[Tensor]:
    """Insert a layer's prefix into query, key and value, after `count` rows."""
    keys, values = (part.to(rows[0].dtype) for part in prefix)
    groups = rows[0].shape[1] // keys.shape[1]
    # The operator needs a query for each key.
    queries = torch.zeros_like(keys).repeat_interleave(groups, 1)
    return [
        torch.cat([part[:, :, :count], joined, part[:, :, count:]], 2)
        for part, joined in zip(rows, (queries, keys, values), strict=True)
    ]


def unknown_arguments(extra: dict[str, Any]) -> list[str]:
    """Return the names of arguments that change attention in an unsupported way."""
    return [
        _ARGUMENT_WORDS.get(name, name)
        for name, value in extra.items()
        if name not in _IGNORED and value is not None and value is not False
    ]


@dataclass(frozen=True)
class _AttentionInputs:
    """The inputs of attention in one layer; a `window` or `softcap` of 0 is off."""

    query: Tensor
    key: Tensor
    value: Tensor
    past_key: Tensor
    past_value: Tensor
    scale: float
    window: int
    softcap: float


def _make_node(call: _AttentionInputs, state: StepState) -> tuple[Tensor, ...]:
    """Make one GroupQueryAttention node; return its output and both new buffers."""
    _, heads, rows, head_dim = call.query.shape
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": call.key.shape[1],
        "scale": call.scale,
    }
    if call.window:
        attributes["local_window_size"] = call.window
    if call.softcap:
        attributes["softcap"] = call.softcap
    rows_first = (
        tensor.transpose(1, 2).reshape(1, rows, -1)
        for tensor in (call.query, call.key, call.value)
    )
    buffers = [call.past_key, call.past_value]
    inputs: list[Tensor | None] = [*rows_first, *buffers]
    inputs += [state.last_row, state.total_length]
    if state.bias is not None:
        # The inputs left out are cosines, sines and positions, which fusion may add.
        inputs += [None, None, None, state.bias]
    output, *present = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        attrs=attributes,
        dtypes=[call.query.dtype] * 3,
        shapes=[(1, rows, heads * head_dim), *(buffer.shape for buffer in buffers)],
        version=1,
    )
    return output.reshape(1, rows, heads, head_dim), *present


def _run_eagerly(call: _AttentionInputs, state: StepState) -> tuple[Tensor, ...]:
    """Compute what `_make_node`'s node does, in PyTorch, on copies of the buffers."""
    start, rows = int(state.cursor), call.query.shape[2]
    keys, values = call.past_key.clone(), call.past_value.clone()
    keys[:, :, start : start + rows] = call.key
    values[:, :, start : start + rows] = call.value
    groups = call.query.shape[1] // call.key.shape[1]
    all_keys, all_values = (
        buffer[:, :, : start + rows].repeat_interleave(groups, dim=1)
        for buffer in (keys, values)
    )
    scores = (call.query @ all_keys.transpose(2, 3)).float() * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    slot = torch.arange(start, start + rows)[:, None]
    other = torch.arange(start + rows)[None, :]
    visible = (other <= slot) & ((other > slot - call.window) if call.window else True)
    if state.bias is not None:
        scores = scores + state.bias[..., : start + rows].float()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).to(call.query.dtype)
    return (weights @ all_values).transpose(1, 2), keys, values


AttentionInterface.register(IMPLEMENTATION, attend)
