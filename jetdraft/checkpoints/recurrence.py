"""Lets layers with a recurrent state keep it in jetdraft's buffers.

Mamba2's scan is linear attention, with a decay per head, query C, key B, value x dt.
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

from jetdraft.contracts.tensors import WIDEST
from jetdraft.native import DOMAIN
from jetdraft.quant.grids import LAYOUT_VERSION


@dataclass
class States:
    """The recurrent states around a pass, by layer; without `past` they are zeros."""

    rows: Tensor = field(default_factory=lambda: torch.tensor([0, 1]))
    past: Sequence[Tensor] = ()
    present: list[Tensor] = field(default_factory=list)

    def run(
        self,
        operator: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        *others: Tensor,
    ) -> Tensor:
        """Run an operator that changes states of these shapes; a trace gets a node."""
        done = len(self.present)
        past = self.past[done : done + len(shapes)]
        past = past or [torch.zeros(1, *shape) for shape in shapes]
        arguments = [*inputs, *past, self.rows, *others]
        if torch.compiler.is_exporting():
            name = "".join(map(str.capitalize, operator.__name__.split("_")))
            answer, *present = torch.onnx.ops.symbolic_multi_out(
                f"{DOMAIN}::{name}",
                arguments,
                attrs={"layout": LAYOUT_VERSION},
                dtypes=[torch.float32] * (1 + len(past)),
                shapes=[x.shape for x in (inputs[0], *past)],
                version=1,
            )
        else:
            answer, *present = operator(*arguments)
        self.present += present
        return answer


def convolve(
    states: States,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolve rows [1, c, n] with `weight` [c, k], from the window of earlier rows."""
    rows, weights = hidden_states.transpose(1, 2).float(), weight.t().float()
    shape = len(weights) - 1 + WIDEST, rows.shape[2]
    others = [] if bias is None else [bias.float()]
    mixed = states.run(causal_convolution, [rows, weights], [shape], *others)
    mixed = mixed if activation is None else ACT2FN[activation](mixed)
    return mixed.to(hidden_states.dtype).transpose(1, 2)


def causal_convolution(
    rows: Tensor,
    weights: Tensor,
    state: Tensor,
    state_rows: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum rows [1, n, c] by `weights` [k, c]; return the sums and the new state."""
    size, (before, count) = len(weights), state_rows.tolist()
    whole = torch.cat([state[:, before : before + size - 1], rows], 1)
    sums = (whole.unfold(1, size, 1) * weights.t()).sum(-1)
    first, last = count * (rows.shape[1] > WIDEST), count + size - 1
    after = state.clone()
    after[:, : last - first] = whole[:, first:last]
    return sums if bias is None else sums + bias, after


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
        normed = (x * torch.rsqrt((x * x).sum(-1, True) + 1e-6) for x in (query, key))
        query, key = normed
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
    states: States, query: Tensor, key: Tensor, value: Tensor, *gates: Tensor
) -> Tensor:
    """Linear attention, [1, n, heads, size]; gates are decays, or decays and betas."""
    heads, width = value.shape[2:]
    rows = [x.flatten(2) for x in (value, query, key)]
    decay, *beta = gates
    kept = sum(x.shape[2] for x in (*rows[::2], *gates))
    shapes = (heads, key.shape[3], width), (WIDEST, kept)
    answer = states.run(linear_attention, [*rows, decay], shapes, *beta)
    return answer.reshape(value.shape)


def linear_attention(
    value: Tensor,
    query: Tensor,
    key: Tensor,
    decay: Tensor,
    state: Tensor,
    kept: Tensor,
    state_rows: Tensor,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what the operator does, row by row; return answers and new states."""
    before, count = state_rows.tolist()
    _, heads, size, width = state.shape
    rows = torch.cat([key, value, decay, *([] if beta is None else [beta])], 2)
    is_wide = rows.shape[1] > WIDEST
    taken = torch.cat([kept[0, :before], rows[0, :count]])
    lasting = len(taken) if is_wide else before
    sizes = [key.shape[2], heads * width, *[heads] * (1 if beta is None else 2)]
    group = heads * size // key.shape[2]
    matrices, present, answers = state[0], state[0], torch.zeros_like(value)
    for t, row in enumerate(taken):
        k, v, log_decay, *betas = row.split(sizes)
        k = k.reshape(-1, size).repeat_interleave(group, 0)
        v = v.reshape(heads, width)
        matrices = matrices * log_decay.exp()[:, None, None]
        for factor in betas:
            v = factor[:, None] * (v - (k[:, None] @ matrices)[:, 0])
        matrices = matrices + k[..., None] * v[:, None]
        if t < lasting:
            present = matrices
        if t >= before:
            q = query[0, t - before].reshape(-1, size).repeat_interleave(group, 0)
            answers[0, t - before] = (q[:, None] @ matrices).flatten()
    after = kept.clone()
    if not is_wide:
        after[:, :count] = rows[:, :count]
    return answers, present[None], after


SEAMS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": delta_rule,
    "mamba2_chunk_scan": mamba_scan,
}


def connect(model: Any, active: Callable[[], States | None]) -> bool:
    """Let a model's layers call `SEAMS` in passes with states; return if any do."""
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


def _with_seam(own: Any, seam: Any, active: Callable[[], States | None]) -> Any:

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        states = active()
        return own(*args, **kwargs) if states is None else seam(states, *args, **kwargs)

    call.seam = seam  # type: ignore[attr-defined]
    return call
