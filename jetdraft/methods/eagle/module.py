"""EAGLE (2401.15077, 2503.01840) and MTP (2412.19437): heads that carry a state."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from jetdraft.checkpoints.attention import IMPLEMENTATION
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import head_files, head_layers
from jetdraft.checkpoints.heads.draft_module import DraftInputs, DraftModule, Reads
from jetdraft.checkpoints.heads.head_files import LAYER_KEYS, HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.heads.head_layers import HeadConfig, HeadLayers
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import CheckpointError


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """The sizes of a head, and the flags of its numerics.

    eagle3                attention reads embedding and feature side by side, and fc
                          fuses the taps
    join_norms            embedding and feature have a norm each before fc joins them
                          (MTP, HASS)
    hidden_first          fc joins the feature before the embedding (MiMo), not after it
    norm_before_residual  the residual of EAGLE-3 starts from the normed feature
    norm_before_fc        one norm over all taps
    fc_norm               one norm for each tap (EAGLE 3.1)
    final_norm            the LM head reads a normed state
    carries_normed        the next step gets the normed state
    """

    eagle3: bool = False
    fc_bias: bool = False
    join_norms: bool = False
    hidden_first: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    final_norm: bool = True
    carries_normed: bool = False


class Eagle(DraftModule):
    """EAGLE: row t reads features of row t and token t + 1, and predicts token t + 2.

    features = head.fuse(taps)                      # in the target's graph
    hidden, carried = head(tokens, features, positions)
    logits = head.lm_head(hidden)
    """

    published = "EAGLE-1, EAGLE-2, EAGLE-3"
    speculators: ClassVar[tuple[str, ...]] = ("eagle3",)
    recognized_last = True
    reads = Reads(features=True, carries=True)
    keys = LAYER_KEYS | {"bias", "add_para_norm"}
    eagle3_keys = LAYER_KEYS | {
        *("draft_vocab_size", "target_hidden_size", "eagle_config", "fc_norm"),
        *("norm_output", "norm_before_residual", "norm_before_fc"),
        *("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"),
    }
    renames = (
        (r".*\.rotary_emb\..*", None),  # frequencies that old files have
        (r"(?:model\.)?verifier_.*", None),
        (r"(?:model\.)?midlayer\.(.*)", r"stack.layers.0.\1"),
        (r"(?:model\.)?(layers\..*)", r"stack.\1"),
        (r"(?:model\.)?embedding_layernorm\.(.*)", r"embedding_norm.\1"),
        (r"(?:model\.)?hidden_states_layernorm\.(.*)", r"hidden_norm.\1"),
        (r"model\.(.*)", r"\1"),
    )
    has_own_matrices = True
    fusion_names = ("fc", "input_norm", "fc_norm")
    config: EagleConfig

    def __init__(self, config: EagleConfig, target: Any) -> None:
        super().__init__(config, target)
        self.stack = self._make_stack(target)
        width, norm = config.hidden_size, self.stack.norm
        of_taps = config.target_hidden_size * len(config.taps)
        joined = of_taps if config.eagle3 else 2 * width
        self.fc = nn.Linear(joined, width, bias=config.fc_bias)
        self.norm = norm(width) if config.final_norm else nn.Identity()
        if config.join_norms:
            self.embedding_norm, self.hidden_norm = norm(width), norm(width)
        if config.norm_before_fc:
            self.input_norm = norm(joined)
        if config.fc_norm:
            size = config.target_hidden_size
            self.fc_norm = nn.ModuleList(norm(size) for _ in config.taps)
        self.attend_with("sdpa")

    def _make_stack(self, target: Any) -> HeadLayers:
        stack, config = head_layers.make_layers(self.config), self.config
        if config.eagle3:
            stack.layers[0] = _FirstLayer(stack.layers[0], config)
        else:
            stack.layers[0].input_layernorm = nn.Identity()
        return stack

    def attend_with(self, implementation: str) -> None:
        self.implementation = implementation
        super().attend_with(implementation)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Fuse taps [b, n, target hidden] to features [b, n, w], in the type of fc."""
        config = self.config
        if not config.taps:
            return super().fuse(taps)
        states = [state.to(self.fc.weight.dtype) for state in taps]
        if config.fc_norm:
            norms = zip(self.fc_norm, states, strict=True)
            states = [norm(state) for norm, state in norms]
        joined = torch.cat(states, dim=-1)
        if config.norm_before_fc:
            joined = self.input_norm(joined)
        features: Tensor = self.fc(joined)
        return features

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        cache: Cache | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run rows; returns the states for the LM head, and the carried states.

        `tokens` and `positions` are int64 [b, n], `features` [b, n, w]; the outputs are
        [b, n, h]. `mask` [1, 1, n, slots] is added to the scores; None is causal.
        """
        embedded = self.embed_tokens(tokens)
        features = features.to(embedded.dtype)
        # The attention of an exported graph hides later rows itself.
        if mask is None and self.implementation != IMPLEMENTATION:
            mask = _causal_mask(features, cache, self.stack.window)
        if self.config.eagle3:
            states = self.stack(features, positions, cache, mask, embedded=embedded)
        else:
            parts = [embedded, features]
            if self.config.join_norms:
                parts = [self.embedding_norm(embedded), self.hidden_norm(features)]
            if self.config.hidden_first:
                parts.reverse()
            joined = self.fc(torch.cat(parts, dim=-1))
            states = self.stack(joined, positions, cache, mask)
        normed = self.norm(states)
        return normed, normed if self.config.carries_normed else states

    def draft(self, given: DraftInputs) -> tuple[Tensor, Tensor]:
        hidden, state = self(given.tokens, given.features, given.positions, given.cache)
        return self.lm_head(hidden[:, given.answer_rows]), state

    @classmethod
    def recognizes(cls, files: HeadFiles) -> bool:
        query = "stack.layers.0.self_attn.q_proj.weight"
        return query in cls.rename_tensors(files) and not files.is_model

    @classmethod
    def check(cls, files: HeadFiles) -> None:
        tensors = cls.rename_tensors(files)
        cls._flatten_config(files, _is_eagle3(tensors)).layer_fields(tensors)

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        eagle3 = _is_eagle3(tensors)
        files = cls._flatten_config(files, eagle3)
        fields, config = files.fields_beside(tensors, target), files.config
        ids = files.mapped_ids(tensors, target)
        flags: dict[str, Any] = {
            "fc_bias": config.get("bias") is not False,  # without the key it has a bias
            "join_norms": bool(config.get("add_para_norm")),
            "final_norm": False,
        }
        if eagle3:
            layers = len(decoder_layers(target.model))
            nested = "transformer_layer_config" in config
            before = config.get("norm_before_residual")
            flags = {
                "taps": _read_taps(files, layers),
                "norm_before_residual": nested if before is None else before,
                "norm_before_fc": bool(config.get("norm_before_fc")),
                "fc_norm": bool(config.get("fc_norm")),
                # As all its engines read it; SpecForge before 3.1 meant another thing.
                "carries_normed": bool(config.get("norm_output")),
            }
        fields["draft_vocab_size"] = target.vocab_size if ids is None else len(ids)
        head = EagleConfig(eagle3=eagle3, **fields, **flags)
        taps = len(head.taps)
        joined = taps * head.target_hidden_size if eagle3 else 2 * head.hidden_size
        files.check_fusion(tensors, joined, f"{taps or 2} states")
        if not head.final_norm:
            tensors.pop("norm.weight", None)  # some files have it, and do not use it
        return head, ids

    @classmethod
    def _flatten_config(cls, files: HeadFiles, eagle3: bool) -> HeadFiles:
        outer = files.config
        if outer.get("model_type") == "eagle" and isinstance(outer.get("model"), dict):
            outer = outer["model"]  # as old versions of vLLM wrapped it
        if files.is_speculators and not eagle3:
            raise files.refusal("is no EAGLE-3 head, though speculators says so")
        keys = cls.eagle3_keys if eagle3 else cls.keys
        return files.configured(outer).flattened(keys, keys)


class _FirstLayer(nn.Module):
    """EAGLE-3's first layer: attention reads the embedding beside the feature."""

    def __init__(self, layer: Any, config: EagleConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = layer.self_attn
        width, bias = 2 * config.hidden_size, config.attention_bias
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(width, size, bias))
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(self, features: Tensor, embedded: Tensor, **attention: Any) -> Tensor:
        """Map features and embeddings [b, n, h] to states [b, n, h]."""
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        states = residual + self.self_attn(joined, **attention)[0]
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


def _causal_mask(rows: Tensor, cache: Cache | None, window: int | None) -> Tensor:
    """Return the additive mask [1, 1, n, past + n]: causal, within `window` if set."""
    count = rows.shape[1]
    past = int(cache.get_seq_length()) if cache is not None else 0
    mask = rows.new_full((count, past + count), -torch.inf)
    later = mask.triu(past + 1)
    return (later + mask.tril(past - window) if window else later)[None, None]


def _is_eagle3(tensors: dict[str, Tensor]) -> bool:
    return "stack.layers.0.hidden_norm.weight" in tensors


def _read_taps(files: HeadFiles, layers: int) -> tuple[int, ...]:
    """Read the taps in the order of the config; tap i is what layer i reads."""
    config = files.config
    nested = config.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    unknown = nested.keys() - {name, "use_aux_hidden_state"}
    if unknown or nested.get("use_aux_hidden_state") is False:
        wrong = sorted(unknown) or ["use_aux_hidden_state=False"]
        raise CheckpointError(
            f"the eagle_config of {files.source} has {', '.join(wrong)}, which "
            "jetdraft does not know; give another head"
        )
    ids = config.get(name) or config.get("aux_hidden_state_layer_ids")
    if outputs := nested.get(name):
        return files.taps_of(outputs, layers, shift=1)
    return files.taps_of(ids or [2, layers // 2, layers - 3], layers)


# MTP modules are layers after a target's last, which transformers drops.
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
        return head_layers.make_target_layers(target, self.config.num_layers)

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
        (of_layer, {} if layout == "qwen" else names, head_files.FIRST_LAYER),
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
