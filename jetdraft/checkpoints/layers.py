"""The layers of a decoder, LoRA in them, and the tokens of a drafter's matrices."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from jetdraft.errors import CheckpointError, PairError, UnsupportedModelError, importing


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's layers, bottom first."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError.of(model, f"has no list of {count} layers")


def head_size(config: Any) -> int:
    """The numbers of a head's query, by the config of a decoder."""
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def final_norm(model: Any) -> nn.Module:
    """The norm between the last layer and the LM head."""
    decoder = model.get_decoder()
    norms = [m for m in decoder.children() if "norm" in type(m).__name__.lower()]
    if not norms:
        raise UnsupportedModelError.of(model, "has no norm before its head")
    norm: nn.Module = norms[-1]
    return norm


# Makes the features [1, n, size] of the tapped states, a list of [1, n, h].
Fuse = Callable[[list[Tensor]], Tensor]


class Taps(nn.Module):
    """Reads states of a target and fuses them to `size` features for each row.

    Tap j enters layer j, or, in a model of j layers, the final norm; without taps it is
    the state after that norm. `fuse` maps states [1, n, h] to features [1, n, size].

        with Taps((2, 14), 1024, head.fuse, {"fc": head.fc}).watching(model) as rows:
            model(input_ids=ids)    # rows[0] is [1, n, 1024]
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        size: int,
        fuse: Fuse = lambda states: torch.cat(states, -1),
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
        """Yield a list to which each pass in the block appends its float32 features."""
        states: dict[int, Tensor] = {}
        features: list[Tensor] = []

        def end(_: nn.Module, args: Any, output: Any) -> None:
            tapped = [states[layer] for layer in self.layers] or [output[0]]
            features.append(self.fuse(tapped).float())

        with contextlib.ExitStack() as hooks:
            modules = list(decoder_layers(model))
            if len(modules) in self.layers:
                modules.append(final_norm(model))
            for layer in self.layers:
                keep = partial(states.__setitem__, layer)
                hooks.enter_context(watch_input(modules[layer], keep))
            hooks.enter_context(model.get_decoder().register_forward_hook(end))
            yield features


def watch_input(module: nn.Module, keep: Callable[[Tensor], object]) -> Any:
    """Register a hook that calls `keep` with a module's input; return its handle."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(args[0] if args else kwargs["hidden_states"])

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def add_lora(model: Any, layers: Iterable[Any], rank: int, name: str) -> list[Tensor]:
    """Add LoRA to linear parts and return its weights; `UnsupportedModelError`."""
    with importing("LoRA", "train"):
        from peft import LoraConfig, inject_adapter_in_model
    parts = [part for layer in layers for part in layer.modules()]
    inner = {id(part) for part in parts if isinstance(part, nn.Linear)}
    names = [name for name, module in model.named_modules() if id(module) in inner]
    if not names:
        fact = "has no linear layers that LoRA could go into"
        raise UnsupportedModelError.of(model, fact, "choose another model")
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=names)
    inject_adapter_in_model(config, model, adapter_name=name)
    return [w for n, w in model.named_parameters() if f".{name}." in n]


def merge_lora(model: Any, name: str, scale: float = 1.0) -> dict[str, Tensor]:
    """Merge LoRA into weights, `scale` times (2408.05749); return them by name."""
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


# The draft vocabulary of EAGLE-3: int64 [n], each id less its row; bool marks of ids.
D2T, T2D = "d2t", "t2d"
# The most rows by which paddings of a vocabulary differ; DeepSeek has 2,385 of them.
MAX_PADDING = 4096


def limit_vocab(model: Any, tokens: int, target_tokens: int) -> None:
    """Fit a drafter to its target's tokens by hooks, which clamp ids and cut logits."""

    def clamp_ids(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].clamp(max=tokens - 1), *inputs[1:])

    def cut_logits(_: Any, inputs: Any, output: Any) -> None:
        output.logits = output.logits[..., :target_tokens]

    for module in model.modules() if tokens < target_tokens else ():
        if isinstance(module, nn.Embedding) and module.num_embeddings == tokens:
            module.register_forward_pre_hook(clamp_ids)
    if tokens > target_tokens:
        model.register_forward_hook(cut_logits)


def vocabulary_tensors(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return d2t and t2d, by name, of a draft vocabulary of `ids` int64 [n]."""
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[ids] = True
    return {D2T: ids - torch.arange(len(ids)), T2D: marked}


def ids_from_d2t(
    source: str, tensors: Mapping[str, Tensor], rows: int, vocab_size: int
) -> Tensor:
    """Return the target's id of each row, int64 [rows]; raises `CheckpointError`."""
    offsets, marked = tensors[D2T].long(), tensors.get(T2D)
    ids = torch.arange(len(offsets)) + offsets
    in_range = bool(((ids >= 0) & (ids < vocab_size)).all())
    if len(ids) != rows or not in_range or len(set(ids.tolist())) != len(ids):
        fact = f"the d2t of {source} does not map {rows} rows to different ids"
        raise CheckpointError(f"{fact} below {vocab_size}; fetch it again")
    named = ids.sort().values
    if marked is not None and not torch.equal(marked.nonzero().flatten(), named):
        fact = f"d2t and t2d of {source} name different tokens"
        raise CheckpointError(f"{fact}, as if the map was never set; fetch it again")
    return ids


def read_draft_vocabulary(folder: Path, vocab_size: int) -> Tensor | None:
    """Read a drafter's draft vocabulary, ascending; None for all ids."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = {D2T, T2D}.intersection(opened.keys())
            tensors |= {name: opened.get_tensor(name) for name in names}
    if D2T not in tensors:
        return None
    if tensors[D2T].ndim != 1 or not len(tensors[D2T]):
        raise CheckpointError(f"the d2t of {folder} is no list; fetch it again")
    ids = ids_from_d2t(str(folder), tensors, len(tensors[D2T]), vocab_size)
    return ids.sort().values
