"""Lets layers with a recurrent state keep it in jetdraft's buffers.

All families of transformers compute with three functions of one arithmetic, whose names
`SEAMS` has: a causal convolution, the gated delta rule, and Mamba2's scan. Inside a
pass, their places are taken by a convolution over a window of earlier rows, and by
linear attention: Mamba2's recurrence is linear attention too, with a decay per head,
query C, key B and value x dt.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.activations import ACT2FN


@dataclass
class States:
    """The recurrent states before and after a pass, in the order in which layers run.

    The rows of a pass after its first `rows` are padding, int64 [1], and leave no trace
    in the states. Without `past` the states before the pass are zeros. `kept` has what
    each state needs to go over the rows again, [1, n, size].
    """

    rows: Tensor | int = 1
    past: Sequence[Tensor] = ()
    present: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def before(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the state before the pass of the layer that runs now."""
        if self.past:
            return self.past[len(self.present)]
        return torch.zeros(shape, dtype=dtype)

    def add(self, present: Tensor, kept: Tensor) -> None:
        """Add the state after the pass, and what is kept of the rows."""
        self.present.append(present)
        self.kept.append(kept)


def convolve(
    states: States,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolve rows [1, c, n] with `weight` [c, k], from the window of earlier rows.

    As sums of products: onnxruntime's operator is slower, see docs/log/recurrent.md.
    """
    rows, size = hidden_states.transpose(1, 2), weight.shape[1]
    past = states.before(1, size - 1, rows.shape[2], dtype=rows.dtype)
    whole = torch.cat([past, rows], 1)
    mixed = whole[:, : rows.shape[1]] * weight[:, 0]
    for at in range(1, size):
        mixed = mixed + whole[:, at : at + rows.shape[1]] * weight[:, at]
    if bias is not None:
        mixed = mixed + bias
    last = states.rows + torch.arange(size - 1)
    states.add(whole.index_select(1, last), rows)
    mixed = mixed if activation is None else ACT2FN[activation](mixed)
    return mixed.to(rows.dtype).transpose(1, 2)


def delta_rule(
    states: States,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """The gated delta rule over rows [1, n, heads, size]; no state is returned."""
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = (
            x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key)
        )
    query = query * query.shape[-1] ** -0.5
    output = _attend(states, query, key, value.float(), g.float(), beta.float())
    return output.to(value.dtype), None


def mamba_scan(
    states: States,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # transformers' names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Mamba2's scan over rows [1, n, heads, size], with B and C [1, n, groups, key]."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    rows = hidden_states.float()
    output = _attend(states, C.float(), B.float(), rows * dt[..., None], A.float() * dt)
    if D is not None:
        output = output + D[:, None] * rows
    return (output, None) if return_final_states else output


def _attend(
    states: States,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
) -> Tensor:
    """Linear attention over rows [1, n, heads, size], with gates [1, n, heads]."""
    _, count, heads, width = value.shape
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    # A padding row neither decays the state nor adds to it.
    is_row = (torch.arange(count) < states.rows)[None, :, None].float()
    gates = [decay * is_row]
    if beta is None:
        value = value * is_row[..., None]
    else:
        gates.append(beta * is_row)
    past = states.before(1, heads, key.shape[3], width)
    flat = [x.reshape(1, count, -1) for x in (query, key, value)]
    compute = _make_node if torch.compiler.is_exporting() else _run_eagerly
    output, present = compute(flat, past, gates)
    states.add(present, torch.cat([*flat[1:], *gates], 2))
    return output.reshape(value.shape)


def _make_node(
    rows: list[Tensor], past: Tensor, gates: list[Tensor]
) -> Sequence[Tensor]:
    """Make one LinearAttention node; return its output and the new state."""
    heads = past.shape[1]
    made: Sequence[Tensor] = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        [*rows, past, *gates],
        attrs=attention_attributes(heads, len(gates)),
        dtypes=[torch.float32] * 2,
        shapes=[rows[2].shape, past.shape],
        version=1,
    )
    return made


def attention_attributes(heads: int, gates: int) -> dict[str, Any]:
    """The attributes of a LinearAttention node with a decay, or with beta too."""
    rule = "gated" if gates == 1 else "gated_delta"
    counts = {"q_num_heads": heads, "kv_num_heads": heads}
    return {**counts, "update_rule": rule, "scale": 1.0}


def _run_eagerly(
    rows: list[Tensor], past: Tensor, gates: list[Tensor]
) -> Sequence[Tensor]:
    """Compute what `_make_node`'s node does, row by row."""
    heads = past.shape[1]
    split = [x[0].reshape(x.shape[1], heads, -1) for x in (*rows, *gates)]
    state, outputs = past[0], []
    for query, key, value, decay, *beta in zip(*split, strict=True):
        state = state * decay.exp()[..., None]
        if beta:
            known = (key[:, None] @ state)[:, 0]
            value = beta[0] * (value - known)  # noqa: PLW2901
        state = state + key[..., None] * value[:, None]
        outputs.append((query[:, None] @ state).reshape(-1))
    return torch.stack(outputs)[None], state[None]


# The functions that keep a state, by their names in transformers' modules.
SEAMS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": delta_rule,
    "mamba2_chunk_scan": mamba_scan,
}


def connect(model: Any, active: Callable[[], States | None]) -> bool:
    """Let a model's layers call `SEAMS` in a pass, where there are `active` states.

    Return whether they call any.
    """
    places = [
        (vars(sys.modules[name]), function, seam)
        for name in {type(module).__module__ for module in model.modules()}
        for function, seam in SEAMS.items()
        if hasattr(sys.modules[name], function)
    ]
    for scope, function, seam in places:
        if not hasattr(scope[function], "seam"):
            scope[function] = _with_seam(scope[function], seam, active)
    return bool(places)


def _with_seam(
    own: Callable[..., Any],
    seam: Callable[..., Any],
    active: Callable[[], States | None],
) -> Callable[..., Any]:
    """Return a function that calls `seam` in a pass, and else `own`."""

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        states = active()
        return own(*args, **kwargs) if states is None else seam(states, *args, **kwargs)

    call.seam = seam  # type: ignore[attr-defined]
    return call
