"""Lets any transformers model, encoder-decoders too, attend over fixed KV buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.integrations import moe

from jetdraft.checkpoints.recurrence import States
from jetdraft.errors import UnsupportedModelError

IMPLEMENTATION = "jetdraft"
_IGNORED = {"dropout", "position_ids", "is_causal", "use_cache", "cache_position"}


@dataclass
class StepState:
    """The inputs and outputs that the attention layers share in one pass.

    `past` and `present` hold (key, value) buffers [1, kv_heads, capacity, head_dim] of
    each layer that has `made` keys and values; the others read the buffers of such a
    layer. A pass without `past` makes it of its own rows. `last_row` is int32 [1], the
    index of the last row in them. `windows` has a sliding window per layer, 0 for none;
    `bias` [1, 1, n, capacity] is added to the scores. Rows after the first `rows` see
    each layer's `prefix` too. `experts` has each layer's choices int64 [n, k], as
    numbers that no two layers share; layers so far have `expert_count` experts. Rows
    `picture`, all or none, see each other.
    """

    cursor: Tensor
    last_row: Tensor
    total_length: Tensor
    past: list[tuple[Tensor, Tensor]]
    present: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    bias: Tensor | None = None
    prefix: list[tuple[Tensor, Tensor]] | None = None
    rows: int = 0
    states: States = field(default_factory=States)
    experts: list[Tensor] = field(default_factory=list)
    expert_count: int = 0
    picture: Tensor | None = None

    def lender_of(self, layer: int, key: Tensor, value: Tensor) -> int:
        """Return the layer whose buffers hold these new rows: mostly `layer` itself."""
        pairs = self.made.items()
        lender = next((n for n, (k, v) in pairs if k is key and v is value), layer)
        self.made[lender] = key, value
        return lender


BOTH_WAYS = "use_bidirectional_attention"  # By "vision" in windows of an image only.


def attends_both_ways(config: Any) -> bool:
    """Whether a text's rows see the rows after them."""
    return (getattr(config, BOTH_WAYS, "") or "vision") != "vision"


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
    return _active_states[-1]


def active_states() -> States | None:
    """The recurrent states of the pass that runs now; None outside of a pass."""
    return _active_states[-1].states if _active_states else None


class PassThroughCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """A cache that stores nothing: the layers themselves write the fixed buffers."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """None: a convolution then reads all of its rows, see `recurrence`."""

    get_recurrent_state = get_conv_state

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    update_recurrent_state = get_conv_state

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
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attend over the active `StepState`: [1, heads, n, d] to [1, n, heads, d].

    Sinks `s_aux` [heads] are scores of a key without value.
    """
    unknown = unknown_arguments(extra)
    if attention_mask is not None:
        unknown.append("a mask of its own")
    state, layer = active_state(), int(module.layer_idx)  # type: ignore[arg-type]
    _check_call(module, unknown, layer in state.windows)
    state.windows[layer] = sliding_window or 0
    lender = state.lender_of(layer, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    size = value.shape[-1]
    if attends_both_ways(getattr(module, "config", None)):
        return _attend_both_ways(query, key, value, scale, sliding_window), None
    query, key, value = _as_wide(query, key, value)
    place = len(state.present)
    if lender == layer and place == len(state.past):  # a pass that shows sizes
        state.past.append((torch.zeros_like(key), torch.zeros_like(value)))
    prefix = None if state.prefix is None else state.prefix[place]
    if prefix is not None:
        query, key, value = _insert_prefix((query, key, value), prefix, state.rows)
    call = _AttentionInputs(
        query,
        key,
        value,
        *(state.past[place] if lender == layer else state.present[lender]),
        shared=lender != layer,
        scale=float(scale),
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    compute = _make_node if torch.compiler.is_exporting() else _run_eagerly
    output, *present = compute(call, state)
    if lender == layer:
        state.present[layer] = (present[0], present[1])
    in_windows = getattr(getattr(module, "config", None), BOTH_WAYS, None) == "vision"
    if state.picture is not None and (sliding_window or not in_windows):
        seen = _see_picture(call, *state.present[lender], state.picture, state)
        output = output.index_copy(1, state.picture, seen)
    if prefix is not None:
        behind = state.rows + prefix[0].shape[2]
        output = torch.cat([output[:, : state.rows], output[:, behind:]], 1)
    return output if size == output.shape[-1] else output[..., :size], None


def _check_call(module: Any, unknown: list[str], attends_twice: bool) -> None:
    names = ", ".join(unknown)
    sees_all = attends_both_ways(getattr(module, "config", None))
    one_way = getattr(module, "is_causal", True) or sees_all
    for problem, has_it in (
        (f"needs more than GroupQueryAttention computes ({names})", bool(unknown)),
        ("attends in both directions", not one_way),
        ("attends twice in one layer", attends_twice),
    ):
        if has_it:
            raise UnsupportedModelError.of(module, problem)


def _attend_both_ways(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attend to the rows of the pass alone, before and after: [1, n, heads, d]."""
    groups, row = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
    keys, values = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = (query @ keys.transpose(2, 3)).float() * scale
    if window:
        far = (row[:, None] - row[None, :]).abs() >= window
        scores = scores.masked_fill(far, -torch.inf)
    return (scores.softmax(-1).to(query.dtype) @ values).transpose(1, 2).contiguous()


def _as_wide(*parts: Tensor) -> list[Tensor]:
    """Widen the heads [1, heads, n, d] to the widest, with zeros: MLA's values."""
    width = max(part.shape[-1] for part in parts)
    return [
        part if part.shape[-1] == width else pad(part, (0, width - part.shape[-1]))
        for part in parts
    ]


def attend_to_buffers(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
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
    pairs = zip(rows, (queries, keys, values), strict=True)
    return [torch.cat([x[:, :, :count], own, x[:, :, count:]], 2) for x, own in pairs]


def unknown_arguments(extra: dict[str, Any]) -> list[str]:
    """Return the names of arguments that change attention in an unsupported way."""
    return [
        name
        for name, value in extra.items()
        if name not in _IGNORED and value is not None and value is not False
    ]


@dataclass(frozen=True)
class _AttentionInputs:
    """A layer's inputs; a window or softcap of 0 is off, `shared` writes no rows."""

    query: Tensor
    key: Tensor
    value: Tensor
    past_key: Tensor
    past_value: Tensor
    shared: bool
    scale: float
    window: int
    softcap: float
    sinks: Tensor | None = None


def _make_node(call: _AttentionInputs, state: StepState) -> tuple[Tensor, ...]:
    """Make one GroupQueryAttention node; return its output and both new buffers."""
    _, heads, rows, head_dim = call.query.shape
    kv_heads, buffers = call.key.shape[1], [call.past_key, call.past_value]
    sizes: Any = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": call.scale}
    optional = {"local_window_size": call.window, "softcap": call.softcap}
    attributes = sizes | {name: value for name, value in optional.items() if value}
    own = call.query, call.key, call.value
    inputs: list[Tensor | None] = [x.transpose(1, 2).reshape(1, rows, -1) for x in own]
    if call.shared:  # no rows are written
        inputs[1:] = [call.key.new_zeros(1, 0, kv_heads * head_dim)] * 2
    inputs += [*buffers, state.last_row, state.total_length]
    if state.bias is not None or call.sinks is not None:
        # The inputs left out are cosines, sines and positions, which fusion may add.
        inputs += [None, None, None, state.bias, call.sinks]
    written = [] if call.shared else buffers
    output, *present = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        attrs=attributes,
        dtypes=[call.query.dtype] * (1 + len(written)),
        shapes=[(1, rows, heads * head_dim), *(buffer.shape for buffer in written)],
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
    scores = scores.masked_fill(~visible, -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.float()[None, :, None, None].expand(1, -1, rows, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : start + rows].to(call.query.dtype)
    # Some families view the result as rows.
    return (weights @ all_values).transpose(1, 2).contiguous(), keys, values


def _see_picture(
    call: _AttentionInputs, keys: Tensor, values: Tensor, rows: Tensor, state: StepState
) -> Tensor:
    """Attend of a picture's rows to all rows so far: [1, n, heads, d]."""
    (_, kv_heads, _, size), count = keys.shape, rows.shape[0]
    groups = call.query.shape[1] // kv_heads
    query = call.query[:, :, rows].reshape(1, kv_heads, groups * count, size)
    # Only what is small is transposed: without a picture this takes no time.
    scores = (keys @ query.transpose(2, 3)).transpose(2, 3).float() * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    slots = torch.arange(keys.shape[2])
    hidden = (slots > state.last_row)[None]
    if call.window:
        hidden = hidden | (slots <= (state.cursor + rows)[:, None] - call.window)
    scores = scores.view(1, kv_heads, groups, count, len(slots))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(values.dtype)
    seen = weights.flatten(2, 3) @ values
    return seen.view(1, kv_heads * groups, count, size).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, attend)


def compute_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return weighted sums [n, h] of each row's experts, by their indices [n, k]."""
    if _active_states:
        state = active_state()
        state.experts.append(top_k_index + state.expert_count)
        state.expert_count += module.num_experts
    if not torch.compiler.is_exporting():
        own = type(module).forward.__wrapped__
        return own(module, hidden_states, top_k_index, top_k_weights)  # type: ignore
    count = top_k_index.shape[1]
    rows = hidden_states.repeat_interleave(count, 0)
    each = (chosen.reshape(-1, 1) for chosen in (top_k_index, top_k_weights))
    parts = moe.batched_mm_experts_forward(module, rows, *each)
    # A ReduceSum over more than two experts adds a single row's in another order.
    return sum(parts.view(-1, count, parts.shape[1]).unbind(1))  # type: ignore


moe.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_experts)

SOURCE_ATTENTION = "jetdraft-source"
# Of module, query [b, heads, q, d], key and value [b, kv_heads, k, d]: [b, q, heads, d]
Attention = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
KeysAndValues = list[tuple[Tensor, Tensor]]


@dataclass
class SourceState(StepState):
    """A pass with a source; `own` replaces the decoder's attention to its text."""

    source_bias: Tensor = field(default_factory=lambda: torch.zeros(1))
    own: Attention | None = None


class CrossCache(EncoderDecoderCache):  # type: ignore[misc]  # transformers is untyped
    """A cache that stores no new rows, and returns keys and values of the source."""

    def __init__(self, cross: KeysAndValues) -> None:
        super().__init__(PassThroughCache(), _WrittenCache(cross))
        self.is_updated = dict.fromkeys(range(len(cross)), True)


class _WrittenCache(Cache):  # type: ignore[misc]
    """Keys and values that the encoder's graph wrote."""

    def __init__(self, pairs: KeysAndValues) -> None:
        super().__init__(layers=[])
        self.layers = [SimpleNamespace(keys=key, values=value) for key, value in pairs]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of slots; for 0 transformers would compute keys again."""
        return int(self.layers[layer_idx].keys.shape[2])


def attend_to_source(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attend in the encoder, to the source, or to the text; return [1, n, heads, d].

    T5's `position_bias` [1, heads, n, n] counts in the encoder only.
    """
    if getattr(module, "is_causal", False):
        own = getattr(active_state(), "own", None)
        if own is not None:
            return own(module, query, key, value), None
        return attend(module, query, key, value, attention_mask, scaling, **extra)
    unknown = unknown_arguments(extra)
    if attention_mask is not None or unknown:
        what = ", ".join(unknown) or "a mask of its own"
        raise UnsupportedModelError.of(module, f"attends to a source with {what}")
    bias = position_bias
    if getattr(module, "is_decoder", False):
        state = active_state()
        assert isinstance(state, SourceState)
        bias = state.source_bias
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)) * scale
    if bias is not None:
        scores = scores + bias
    weights = scores.float().softmax(-1).to(query.dtype)
    return (weights @ value).transpose(1, 2), None


def set_attention(model: Any, name: str) -> None:
    """Let all parts of a model attend as `name` says; T5's halves have own configs."""
    model.set_attn_implementation(name)
    set_attention_of_parts(model, name)


def set_attention_of_parts(module: torch.nn.Module, name: str) -> None:
    """Let the parts of a module attend as `name` says."""
    for part in module.modules():
        if (config := getattr(part, "config", None)) is not None:
            config._attn_implementation = name


AttentionInterface.register(SOURCE_ATTENTION, attend_to_source)


def relative_bias_module(model: Any) -> Any:
    """Return the decoder's attention with a table of biases by distance, or None."""
    modules = model.get_decoder().modules()
    named = "has_relative_attention_bias"
    return next((m for m in modules if getattr(m, named, False)), None)


def distance_bias(model: Any, rows: Tensor, slots: Tensor, both_ways: bool) -> Tensor:
    """Return the bias [b, heads, n, k] of slots at [b, k] for rows at [b, n]."""
    module = relative_bias_module(model)
    distance = slots[:, None, :] - rows[:, :, None]
    buckets = module._relative_position_bucket(
        -distance.abs() if both_ways else distance,
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    bias: Tensor = module.relative_attention_bias(buckets)
    return bias.permute(0, 3, 1, 2)


@contextmanager
def at_positions(model: Any, positions: Tensor) -> Iterator[None]:
    """Let the decoder use `positions` int64 [b, n], not 0, 1, ..., inside the block."""
    table = getattr(model.get_decoder(), "embed_positions", None)
    if table is None:
        if relative_bias_module(model) is None:
            raise UnsupportedModelError.of(model, "has positions of its own kind")
        yield
        return
    places = positions + getattr(table, "offset", 0)
    table.forward = lambda *_, **__: torch.nn.functional.embedding(places, table.weight)
    try:
        yield
    finally:
        del table.forward


@contextmanager
def answering_rows(model: Any, rows: Any) -> Iterator[None]:
    """Let the LM head read states [b, n, h] at the index `rows` only, in the block."""

    def keep(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[rows]
        return output

    with model.get_decoder().register_forward_hook(keep):
        yield
