"""MTP modules (2412.19437): layers after a target's last, which transformers drops."""

import re
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_files import FIRST_LAYER, HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.heads.head_layers import HeadLayers, make_target_layers
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import CheckpointError
from jetdraft.methods.eagle.module import Eagle, EagleConfig

_PARTS = ("fc.", "embedding_norm.", "hidden_norm.", "norm.")


def _layout(layer: str, *names: str) -> tuple[re.Pattern[str], dict[str, str]]:
    """The pattern of a module's tensors, and its names of `_PARTS`."""
    pattern = re.compile(rf"^(?:.*\.)?{layer}(?=(.*))")
    return pattern, dict(zip((f"{name}." for name in names), _PARTS, strict=True))


_QWEN_NORMS = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
_MIMO_NORMS = "token_layernorm", "hidden_layernorm", "final_layernorm"
_LAYOUTS = {
    "deepseek": _layout(
        r"layers\.(\d+)\.", "eh_proj", "enorm", "hnorm", "shared_head.norm"
    ),
    "qwen": _layout(r"mtp\.(?:layers\.(\d+)\.)?", "fc", *_QWEN_NORMS),
    "mimo": _layout(r"mtp_layers\.(\d+)\.", "input_proj", *_MIMO_NORMS),
}  # By publisher.

HIDDEN_FIRST = "mtp_hidden_states_first"
_COPIED_PREFIXES = ("shared_head.head.", "embed_tokens.")  # Copies of the target's.


class Mtp(Eagle):
    """A head with a layer of its target's own kind; its files are the target's."""

    published = "MTP"
    speculators = ()
    in_target = True
    recognized_last = False

    def _make_stack(self, target: Any) -> HeadLayers:
        return make_target_layers(target, self.config.num_layers)

    def kv_shapes(self, target: StepContract) -> tuple[tuple[int, int], ...]:
        """Return (0, 0) for unknown: each kind of layer has other names for sizes."""
        return ((0, 0),)

    @classmethod
    def recognizes(cls, files: HeadFiles) -> bool:
        return _find_layout(files) is not None

    @classmethod
    def check(cls, files: HeadFiles) -> None:
        pass  # the target's own config is checked when the target is loaded

    @classmethod
    def rename_tensors(cls, files: HeadFiles) -> dict[str, Tensor]:
        # `configure` picks the module's, which the target tells.
        return dict(files.tensors)

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        """Read the config, and rename `tensors` in place; refuses several modules."""
        layout = _find_layout(files)
        assert layout is not None
        text = target.model.config.get_text_config(decoder=True)
        own, shared = _split_tensors(files, layout, text.num_hidden_layers)
        fc, *norms = (f"{name}weight" for name in _LAYOUTS[layout][1])
        for name in norms:
            if name not in shared | own:
                prefix = files.stored_name(fc, shared | own).removesuffix(fc)
                raise files.refusal(f"lacks weight {prefix + name!r}")
        named = _stack_experts(_rename_tensors(layout, own, shared))
        tensors.clear()
        tensors.update(named)
        first = files.config.get(HIDDEN_FIRST, layout == "mimo")
        return mtp_config(target, hidden_first=bool(first)), None


def mtp_config(target: Checkpoint, hidden_first: bool = False) -> EagleConfig:
    """Return the sizes and flags of an MTP head for `target`; may refuse its config."""
    text = target.model.config.get_text_config(decoder=True)
    if getattr(text, "mtp_use_dedicated_embeddings", False):
        raise CheckpointError(
            f"the MTP module of {target.source} has an embedding of its own, which "
            "jetdraft does not read; leave it out (--head none)"
        )
    first = hidden_first or bool(getattr(text, HIDDEN_FIRST, False))
    flags = {"join_norms": True, "hidden_first": first, "carries_normed": True}
    return EagleConfig.beside(target, text.hidden_size, **flags)


def _find_layout(files: HeadFiles) -> str | None:
    """Return the key in `_LAYOUTS` of the layout of an MTP module; None without one."""
    for layout, (pattern, names) in _LAYOUTS.items():
        fc = next(iter(names))
        for name in files.tensors:
            match = pattern.match(name)
            if match and match[2] == f"{fc}weight":
                return layout
    return None


def _split_tensors(
    files: HeadFiles, layout: str, layers: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return tensors of the module's layer, and its others; refuses several modules."""
    pattern, _ = _LAYOUTS[layout]
    modules: dict[int, dict[str, Tensor]] = {}
    shared: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        match = pattern.match(name)
        if match is None or (layout == "deepseek" and int(match[1]) < layers):
            continue
        numbered = layout != "qwen" or match[1] is not None
        into = modules.setdefault(int(match[1]), {}) if numbered else shared
        into[match[2]] = tensor
    if len(modules) != 1:
        fix = "jetdraft reads files with one module"
        raise files.refusal(f"has {len(modules)} MTP modules", fix)
    ((_, tensors),) = modules.items()
    return tensors, shared


def _rename_tensors(
    layout: str, of_layer: dict[str, Tensor], shared: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Rename both kinds as in `Eagle`, without copies of the target's matrices."""
    names = _LAYOUTS[layout][1]
    named = {}
    for tensors, table, others in (
        (shared, names, ""),
        (of_layer, {} if layout == "qwen" else names, FIRST_LAYER),
    ):
        for name, tensor in tensors.items():
            old = next((old for old in table if name.startswith(old)), "")
            if not name.startswith(_COPIED_PREFIXES):
                named[table.get(old, others) + name.removeprefix(old)] = tensor
    return named


def stored_name(name: str) -> str:
    """Return the name that Qwen's layout has for a tensor of `Mtp`."""
    if name.startswith("stack."):
        return name.replace("stack", "mtp", 1)
    table = _LAYOUTS["qwen"][1]
    old = next(old for old, new in table.items() if name.startswith(new))
    return f"mtp.{name.replace(table[old], old, 1)}"


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    experts: dict[str, dict[tuple[str, int], Tensor]] = {}
    others = {}
    for name, tensor in tensors.items():
        if match := pattern.fullmatch(name):
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
        else:
            others[name] = tensor
    for name, parts in experts.items():
        count = 1 + max(number for _, number in parts)
        try:
            numbers, kinds = range(count), ("gate", "up", "down")
            stacks = (torch.stack([parts[kind, i] for i in numbers]) for kind in kinds)
            gate, up, down = stacks
        except KeyError as error:
            fact = f"{name} lacks expert {error}"
            raise CheckpointError(f"{fact}; fetch it again") from error
        others[f"{name}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        others[f"{name}.down_proj"] = down
    return others
