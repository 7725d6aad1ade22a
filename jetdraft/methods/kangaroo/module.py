"""Kangaroo's adapter (2404.18911): an attention layer after the lower half."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import draft_module
from jetdraft.checkpoints.heads.head_files import LAYER_KEYS, HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.heads.head_layers import CACHE, HeadConfig, make_layers
from jetdraft.checkpoints.layers import decoder_layers


class Kangaroo(draft_module.DraftModule):
    """A norm, attention over its own rows, a residual and a norm; no MLP."""

    published = "Kangaroo"
    architecture = "KangarooAdapter"
    reads = draft_module.Reads(features=True, cut=True)
    keys = LAYER_KEYS | {"exit_layer"}
    renames = ((r".*\.rotary_emb\..*", None), *draft_module.TARGET_RENAMES)

    def __init__(self, config: HeadConfig, target: Any) -> None:
        super().__init__(config, target)
        del self.embed_tokens  # it reads states alone
        self.stack = make_layers(config)
        del self.first_layer.mlp, self.first_layer.post_attention_layernorm
        self.norm = self.stack.norm(config.hidden_size)
        self.attend_with("sdpa")

    @property
    def exit_layer(self) -> int:
        """The number of layers in the lower half."""
        return self.config.taps[0]

    def forward(
        self, states: Tensor, positions: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Map states [b, n, h] at positions int64 [b, n] to states for the LM head."""
        how: dict[str, Any] = {"attention_mask": None, CACHE: cache}
        how["position_embeddings"] = self.stack.rotations(states, positions)
        read = self.first_layer.input_layernorm(states)
        mixed = self.first_layer.self_attn(read, **how)[0]
        normed: Tensor = self.norm(states + mixed)
        return normed

    def draft(self, given: draft_module.DraftInputs) -> tuple[Tensor, None]:
        hidden = self(given.features, given.positions, given.cache)
        return self.lm_head(hidden[:, given.answer_rows]), None

    @classmethod
    def recognizes(cls, files: HeadFiles) -> bool:
        has_layer = files.has_tensor(r"layers\.0\..*")
        without_mlp = has_layer and not files.has_tensor(r"layers\.0\.(.*\.)?mlp\..*")
        return files.architecture == cls.architecture or without_mlp

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        config, ids = super().configure(files, target, tensors)
        layers = len(decoder_layers(target.model))
        layer = files.positive_integer("exit_layer")
        if layer >= layers:
            fact = f"reads the state below layer {layer}, but {target.source} has "
            fact += f"{layers} layers"
            raise files.refusal(fact, "give the adapter of this target")
        return replace(config, taps=(layer,)), ids
