"""LoRA (2106.09685) in a model of transformers: put in, and merged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from jetdraft.errors import JetdraftError, UnsupportedModelError


def add_lora(
    model: Any, layers: Iterable[nn.Module], rank: int, name: str
) -> list[Tensor]:
    """Add untrained LoRA to the linear parts of some layers; gives its weights.

    Embedding and LM head stay as they are. Raises `UnsupportedModelError` for layers
    without linear parts.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise JetdraftError(
            f"LoRA needs {error.name}; pip install 'jetdraft[cpu,train]'"
        ) from error
    inner = {
        id(module)
        for layer in layers
        for module in layer.modules()
        if isinstance(module, nn.Linear)
    }
    names = [name for name, module in model.named_modules() if id(module) in inner]
    if not names:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear layers that LoRA could go into; "
            "choose another model"
        )
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=names)
    inject_adapter_in_model(config, model, adapter_name=name)
    return [w for n, w in model.named_parameters() if f".{name}." in n]


def merge_lora(model: Any, name: str, scale: float = 1.0) -> dict[str, Tensor]:
    """Add `scale` times the LoRA to the weights, in place; gives the changed weights.

    A scale other than 1 is R-Adapter's (2408.05749).
    """
    from peft.tuners.lora import LoraLayer

    changed = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.set_scale(name, scale)
            module.merge()
            layer = module.get_base_layer()
            model.set_submodule(path, layer)
            changed[f"{path}.weight"] = layer.weight.detach().contiguous()
    return changed
