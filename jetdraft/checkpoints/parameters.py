"""Weights that stay as they are stored: converted when they run, or when written.

A checkpoint's file is mapped into memory, so the system can drop its pages. Only one
matrix at a time exists in the type of the computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from jetdraft.edits import PARAMETER, derived

_SMALL = 1 << 16
"""Bytes of the largest constant that is folded, for example a norm's weights."""


def compute_in(model: Any, dtype: torch.dtype) -> None:
    """Let `model` run in `dtype`, in place; its weights keep the type they have.

    Each module's own weights are converted while it runs.
    """
    _restore_buffers(model, dtype)
    for module in model.modules():
        if any(p.dtype != dtype for p in module.parameters(recurse=False)):
            conversion = _Conversion(dtype)
            module.register_forward_pre_hook(conversion.before)
            module.register_forward_hook(conversion.after, always_call=True)


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Store all weights in `dtype`, in place; buffers keep the type they need."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _restore_buffers(model: Any, dtype: torch.dtype) -> None:
    """Recompute in `dtype` the buffers that a model computes for itself."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights():
            other = type(model)(model.config)
    finally:
        torch.set_default_dtype(default)
    for ours, fresh in zip(model.modules(), other.modules(), strict=True):
        for name in ours._non_persistent_buffers_set:
            setattr(ours, name, getattr(fresh, name))


class _Conversion:
    """Hooks of a module with weights of another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.stored: dict[str, Tensor] = {}

    def before(self, module: nn.Module, args: Any) -> None:
        """Convert the module's own weights."""
        for name, parameter in module.named_parameters(recurse=False):
            # A trace puts weights of the right type in their places.
            if parameter.dtype != self.dtype:
                self.stored[name] = parameter.data
                parameter.data = parameter.data.to(self.dtype)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Put the stored weights back."""
        for name, stored in self.stored.items():
            getattr(module, name).data = stored
        self.stored.clear()


def keep_weights(
    model: ir.Model, weights: Mapping[str, Tensor], names: Mapping[int, str]
) -> None:
    """Make these inputs of a traced graph constants, in place.

    The weights are read when they are needed. Each constant is marked with the
    checkpoint's name of its weight, which `names` has by the weight's id.
    """
    graph = model.graph
    for value in list(graph.inputs):
        weight = weights.get(value.name or "")
        if weight is None:
            continue
        graph.inputs.remove(value)
        value.const_value = _lazy(value, weight)
        graph.register_initializer(value)
        if id(weight) in names:
            value.metadata_props[PARAMETER] = names[id(weight)]


def simplify(model: ir.Model) -> None:
    """Fold the nodes of a graph that read only constants, in place."""
    _turn(model.graph)
    fold_constants(
        model,
        input_size_limit=_SMALL,
        output_size_limit=_SMALL,
        # A head that is turned here would no longer be the embedding too.
        should_fold=lambda node: False if node.op_type == "Transpose" else None,
    )


def _lazy(value: ir.Value, weight: Tensor) -> ir.LazyTensor:
    assert value.dtype is not None
    assert value.shape is not None
    dtype = getattr(torch, value.dtype.numpy().name)

    def read() -> ir.TensorProtocol:
        return ir.tensor(weight.detach().to(dtype).numpy())

    return ir.LazyTensor(read, value.dtype, value.shape, name=value.name)


def _turn(graph: ir.Graph) -> None:
    """Store a matrix transposed if its only reader transposes it."""
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Transpose" else None
        constant = source.const_value if source is not None else None
        if source is None or constant is None or len(constant.shape) != 2:
            continue
        if len(source.consumers()) == 1:
            shape = constant.shape.numpy()[::-1]
            turned = derived(
                graph, f"{source.name}.turned", [source], np.transpose, shape
            )
            ir.convenience.replace_all_uses_with(node.outputs[0], turned)
            graph.remove(node, safe=True)
            graph.initializers.pop(source.name or "")
