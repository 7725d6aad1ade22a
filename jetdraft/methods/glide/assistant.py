"""Gemma 4's assistant: layers that attend to the last buffers of the target.

All rows of a draft have the position of its root.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.draft_module import DraftInputs, DraftModule, Reads
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.contracts.tensors import HIDDEN
from jetdraft.methods.glide.module import attend_to_target

# The name under which the attention is registered with transformers.
ATTENTION = "jetdraft-target"
# The kinds of layers, whose last in the target the assistant reads.
FULL, SLIDING = "full_attention", "sliding_attention"


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **given: Any
) -> tuple[Tensor, None]:
    """Attend to keys and values of the target, as `AttentionInterface` wants it."""
    return attend_to_target(query, key, value, mask, given["scaling"]), None


AttentionInterface.register(ATTENTION, _attend)


@dataclass(frozen=True)
class AssistantConfig(HeadConfig):
    """The sizes of an assistant, and the config of its layers."""

    text: Any = None


class Assistant(DraftModule):
    """Gemma 4's assistant; it scores the tokens of all clusters, likely or not.

    x = pre_projection(embedding of the token, state)
    state = norm(layers(x))         # logits = lm_head(state)
    next state = post_projection(state)
    """

    published = "Gemma 4's assistants"
    model_types = ("gemma4_assistant", "gemma4_unified_assistant")
    reads = Reads(features=True, target_kv=True, carries=True, buffers=False)
    renames = (
        (r"masked_embedding\..*", None),
        (r"lm_head\..*", None),
        (r"model\.embed_tokens\.weight", "lm_head.weight"),
    )
    keys = (
        *("model_type", "text_config", "backbone_hidden_size"),
        *("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"),
    )
    config: AssistantConfig

    def __init__(self, config: AssistantConfig, target: Any) -> None:
        super().__init__(config, target)
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        joined = 2 * config.target_hidden_size
        self.pre_projection = nn.Linear(joined, config.hidden_size, bias=False)
        sizes = config.hidden_size, config.target_hidden_size
        self.post_projection = nn.Linear(*sizes, bias=False)
        self.model = AutoModel.from_config(config.text, attn_implementation=ATTENTION)
        self.model.embed_tokens = nn.Identity()  # the LM head has its matrix
        text = target.config.get_text_config(decoder=True)
        shared = getattr(text, "num_kv_shared_layers", 0)
        kinds = list(text.layer_types[: text.num_hidden_layers - shared])
        self.target_layers = tuple(
            len(kinds) - 1 - kinds[::-1].index(kind) for kind in (FULL, SLIDING)
        )

    def draft(self, given: DraftInputs) -> tuple[Tensor, Tensor]:
        states = torch.cat([self.embed_tokens(given.tokens), given.features], dim=-1)
        slots = torch.arange(given.target[0][0].shape[2])
        behind = (slots >= given.target_length) * HIDDEN
        # As in transformers, the window has a row more than the target's.
        before = slots < given.target_length - self.config.text.sliding_window - 1
        masks = behind, behind + before * HIDDEN
        output = self.model(
            inputs_embeds=self.pre_projection(states),
            position_ids=given.positions * 0 + given.target_length,
            attention_mask={
                kind: mask.to(states.dtype)[None, None, None]
                for kind, mask in zip((FULL, SLIDING), masks, strict=True)
            },
            shared_kv_states=dict(zip((FULL, SLIDING), given.target, strict=True)),
            use_cache=False,
            # As a number it would let transformers cut rows off.
            logits_to_keep=given.answer_rows,
        )
        state = output.last_hidden_state
        return self.lm_head(state[:, given.answer_rows]), self.post_projection(state)

    @classmethod
    def configure(
        cls, files: HeadFiles, target: Checkpoint, tensors: dict[str, Tensor]
    ) -> tuple[AssistantConfig, None]:
        whole = AutoConfig.for_model(**files.config)
        text, own = whole.text_config, target.model.config.get_text_config(decoder=True)
        files.check_keys(cls.keys)
        layers = {**files.config["text_config"], "layer_types": None}
        files.configured(layers).check_keys(
            {*type(text)().to_dict(), "global_head_dim", "num_global_key_value_heads"}
        )
        fix = "give the assistant of this target"
        if not {FULL, SLIDING} <= set(getattr(own, "layer_types", None) or ()):
            fact = "reads layers with and without a sliding window, which "
            raise files.refusal(f"{fact}{target.source} does not have", fix)
        if whole.backbone_hidden_size != own.hidden_size:
            fact = f"reads states of {whole.backbone_hidden_size} numbers, but "
            raise files.refusal(f"{fact}{target.source} has {own.hidden_size}", fix)
        files.check_vocabulary(target, text.vocab_size)
        sizes = {"hidden_size": text.hidden_size, "text": text}
        return AssistantConfig.beside(target, own.hidden_size, **sizes), None
