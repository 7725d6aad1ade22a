"""Keeps weights in the type they are stored in, until they are used or written."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from jetdraft.checkpoints.refusals import RECURRENT_FAMILIES
from jetdraft.quant.edits import PARAMETER, STORED, add_turned
from jetdraft.quant.stored import StoredTensor

_MAX_FOLDED_BYTES = 1 << 16  # Of a folded constant; the weights of norms are smaller.
_MAX_CONVERTED = 1 << 20  # Larger norms and convolutions are not converted.
LARGE_TABLE = 1 << 28  # Of larger embeddings only the rows of a pass are converted.
# The `model_type`s with layers that take weights of others without running them.
_CONVERTED_FAMILIES = (*RECURRENT_FAMILIES, "gemma3n_text")


def set_compute_dtype(model: Any, dtype: torch.dtype) -> None:
    """Let `model` run in `dtype`; only `_CONVERTED_FAMILIES` have weights converted."""
    with no_init_weights(), local_torch_dtype(dtype):
        other = type(model)(model.config)
    for module, computed in zip(model.modules(), other.modules(), strict=True):
        for name in module._non_persistent_buffers_set:
            setattr(module, name, getattr(computed, name))
    _replace_stored(model, lambda w: w.to(dtype) if w.dim() == 3 else w.read(None))
    if model.config.get_text_config(decoder=True).model_type in _CONVERTED_FAMILIES:
        for weight in model.parameters():
            is_small = weight.ndim != 2 and weight.numel() <= _MAX_CONVERTED
            if is_small and not isinstance(weight, StoredTensor):
                weight.data = weight.data.to(dtype)
    convert_while_running(model, dtype)


def convert_while_running(
    model: nn.Module, dtype: torch.dtype, skipped: Collection[int] = frozenset()
) -> None:
    """Let hooks convert weights to `dtype` while modules run; not `skipped` ids."""
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in skipped]
        if any(weight.dtype != dtype for weight in own):
            conversion = _WeightConversion(dtype)
            module.register_forward_pre_hook(conversion.before)
            module.register_forward_hook(conversion.after, always_call=True)


def store_weights_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Store all weights in `dtype`, in place; buffers keep the type they need."""
    _replace_stored(model, lambda weight: weight.read(None))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _replace_stored(model: nn.Module, make: Callable[[StoredTensor], Tensor]) -> None:
    """Replace the parameters of a model that are stored tensors, in place."""
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if isinstance(weight, StoredTensor):
                setattr(module, name, nn.Parameter(make(weight), requires_grad=False))


class _WeightConversion:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.stored: dict[str, Tensor] = {}

    def before(self, module: nn.Module, args: Any) -> Any:
        for name, parameter in module.named_parameters(recurse=False):
            # A trace has replaced some weights with weights of the right type.
            if parameter.dtype != self.dtype:
                self.stored[name] = parameter.data
                # An index of padding must be below the number of rows, so at most 0.
                is_table = isinstance(module, nn.Embedding) and not module.padding_idx
                if is_table and parameter.numel() > LARGE_TABLE:
                    tokens, places = args[0].unique(return_inverse=True)
                    args = (places, *args[1:])
                    parameter.data = parameter.data[tokens]
                parameter.data = parameter.data.to(self.dtype)
        return args

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        for name, stored in self.stored.items():
            getattr(module, name).data = stored
        self.stored.clear()


def make_inputs_constant(
    model: ir.Model, weights: Mapping[str, Tensor], names: Mapping[int, str]
) -> None:
    """Turn inputs in `weights` into constants in place; `names` maps ids to names."""
    graph = model.graph
    for value in list(graph.inputs):
        weight = weights.get(value.name or "")
        if weight is None:
            continue
        graph.inputs.remove(value)
        value.const_value = _lazy_tensor(value, weight)
        graph.register_initializer(value)
        if id(weight) in names:
            value.metadata_props[PARAMETER] = names[id(weight)]


def fold_graph(model: ir.Model) -> None:
    """Fold nodes that read only small constants, and stored transposes, in place."""
    _store_transposed(model.graph)
    fold_constants(
        model,
        input_size_limit=_MAX_FOLDED_BYTES,
        output_size_limit=_MAX_FOLDED_BYTES,
        # A transposed head could no longer be the embedding too.
        should_fold=lambda node: False if node.op_type == "Transpose" else None,
    )


def _lazy_tensor(value: ir.Value, weight: Tensor) -> ir.LazyTensor:
    """Return a tensor that converts the weight to the type of `value` on reading."""
    assert value.dtype is not None
    assert value.shape is not None
    dtype = getattr(torch, value.dtype.numpy().name)

    def read() -> ir.TensorProtocol:
        return ir.tensor(weight.detach().to(dtype).numpy())

    tensor = ir.LazyTensor(read, value.dtype, value.shape, name=value.name)
    tensor.meta[STORED] = weight.detach()
    return tensor


def _store_transposed(graph: ir.Graph) -> None:
    """Store a matrix transposed if its only reader is a Transpose, in place."""
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Transpose" else None
        constant = source.const_value if source is not None else None
        if source is None or constant is None or len(constant.shape) != 2:
            continue
        if len(source.consumers()) == 1:
            transposed = add_turned(graph, source)
            ir.convenience.replace_all_uses_with(node.outputs[0], transposed)
            graph.remove(node, safe=True)
            graph.initializers.pop(source.name or "")
