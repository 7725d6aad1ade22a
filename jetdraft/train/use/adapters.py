"""LoRA in a drafter that learns from use (2106.09685)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from jetdraft.errors import UnsupportedModelError

ADAPTER = "use"


def add_lora(model: Any, layers: Iterable[nn.Module], rank: int) -> list[Tensor]:
    """Add untrained LoRA to the linear parts of some layers; gives its weights.

    Embedding and LM head stay as they are, so that frequent tokens cannot push rare
    tokens out. Raises `UnsupportedModelError` for layers without linear parts.
    """
    inner = {
        id(module)
        for layer in layers
        for module in layer.modules()
        if isinstance(module, nn.Linear)
    }
    names = [name for name, module in model.named_modules() if id(module) in inner]
    if not names:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear layers that LoRA could go into; it "
            "cannot learn from use"
        )
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=names)
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    lora = [w for n, w in model.named_parameters() if f".{ADAPTER}." in n]
    for weight in lora:
        weight.requires_grad_(True)
    return lora


def merge_lora(model: Any) -> dict[str, Tensor]:
    """Add the LoRA to the weights, in place; gives the changed weights by name."""
    changed = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            layer = module.get_base_layer()
            model.set_submodule(name, layer)
            changed[f"{name}.weight"] = layer.weight.detach().contiguous()
    return changed
