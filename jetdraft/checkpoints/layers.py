"""The layers of a decoder, and what a head reads of their states in a pass.

Hooks reach the states, so the target's code stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.errors import PairError, UnsupportedModelError


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's layers, bottom first."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {count} layers; choose another "
        "architecture"
    )


def final_norm(model: Any) -> nn.Module:
    """The norm between the last layer and the head."""
    decoder = model.get_decoder()
    norms: list[nn.Module] = [
        module
        for module in decoder.children()
        if "norm" in type(module).__name__.lower()
    ]
    if not norms:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no norm before its head; choose another "
            "architecture"
        )
    return norms[-1]


POST_NORM: tuple[int, ...] = ()
"""The layers of taps that read the state after the final norm, as the LM head does."""


Fuse = Callable[[list[Tensor]], Tensor]


def join(states: list[Tensor]) -> Tensor:
    """The states side by side."""
    return torch.cat(states, -1)


class Taps(nn.Module):
    """Reads states of a target and fuses them to `size` features for each row.

    `layers` has the numbers of layers, ascending: number j is the residual stream that
    enters layer j, and the number of all layers is the stream that enters the final
    norm. Without layers it is the state after that norm. `fuse` maps the list of these
    states, [1, n, h] each, to features [1, n, size], with the weights of the modules
    `parts`; by default they are joined. With a `cut` the target is also cut in halves
    below the layer of that number.

        taps = Taps((2, 14, 25), 1024, head.fuse, {"fc": head.fc})
        with taps.watching(model) as features:
            model(input_ids=ids)
        features[0]    # [1, n, 1024]
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        size: int,
        fuse: Fuse = join,
        parts: Mapping[str, nn.Module] = MappingProxyType({}),
        cut: int = 0,
    ) -> None:
        super().__init__()
        self.cut = cut
        self.layers, self.size, self.fuse = layers, size, fuse
        self.parts = nn.ModuleDict(parts)

    def check(self, model: Any) -> None:
        """Raise `PairError` for a layer that the model does not have."""
        count = len(decoder_layers(model))
        for layer in self.layers:
            if not 0 <= layer <= count:
                raise PairError(
                    f"the head reads the states that enter layer {layer}, and the "
                    f"target has {count} layers; give the head's own target"
                )

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[list[Tensor]]:
        """The features of the passes that run inside the block, in their order."""
        states: dict[int, Tensor] = {}
        features: list[Tensor] = []

        def end(_: nn.Module, args: Any, output: Any) -> None:
            tapped = [states[layer] for layer in self.layers] or [output[0]]
            features.append(self.fuse(tapped).float())

        with contextlib.ExitStack() as hooks:
            for layer, module in self._tapped(model).items():
                hooks.callback(_watch(module, states, layer).remove)
            hooks.callback(model.get_decoder().register_forward_hook(end).remove)
            yield features

    def _tapped(self, model: Any) -> dict[int, nn.Module]:
        """For each of the layers, the module that its state enters."""
        layers = decoder_layers(model)
        modules = [*layers, final_norm(model)] if len(layers) in self.layers else layers
        return {layer: modules[layer] for layer in self.layers}


def _watch(module: nn.Module, states: dict[int, Tensor], layer: int) -> Any:
    """Keep the hidden states that enter `module`; gives the handle of the hook."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[layer] = args[0] if args else kwargs["hidden_states"]

    return module.register_forward_pre_hook(hook, with_kwargs=True)
