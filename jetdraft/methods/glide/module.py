"""GliDe (2402.02082) and Gemma 4's assistant: layers that read the target's buffers."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel
from transformers.cache_utils import Cache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import head_layers
from jetdraft.checkpoints.heads.draft_module import DraftInputs, DraftModule, Reads
from jetdraft.checkpoints.heads.head_files import HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.layers import head_size
from jetdraft.contracts.tensors import HIDDEN
from jetdraft.errors import UnsupportedModelError


def attend_to_target(
    query: Any, keys: Tensor, values: Tensor, bias: Tensor, scale: float
) -> Tensor:
    """Attend with [b, heads, n, d] to [b, kv_heads, slots, d]: [b, n, heads, d]."""
    # The heads of a group lie beside each other: [b, kv_heads, group, n, d].
    rows = query.unflatten(1, (keys.shape[1], -1))
    scores = (rows @ keys[:, :, None].transpose(3, 4)).float()
    weights = (scores * scale + bias.float()[:, :, None]).softmax(-1).to(values.dtype)
    mixed: Tensor = (weights @ values[:, :, None]).flatten(1, 2).transpose(1, 2)
    return mixed


class Glide(DraftModule):
    """A decoder layer with cross-attention to the target's last keys and values.

        y = x + SelfAttention(norm(x))
        y = y + W_o Attention(rotated(W_q y), target's keys, target's values)
        z = y + MLP(norm(y))

    The rotation is the target's; the norm before the LM head is the drafter's.
    """

    published, mark = "GliDe", "cross.q_proj.weight"
    architecture = "GlideDrafter"
    reads = Reads(target_kv=True)

    def __init__(self, config: head_layers.HeadConfig, target: Any) -> None:
        super().__init__(config, target)
        self.stack = head_layers.make_layers(config)
        rotary: Any = getattr(target.get_decoder(), "rotary_emb", None)
        row = torch.zeros(1, 1)
        self.stack.rotary = copy.deepcopy(rotary)
        turned = self.stack.rotations(row[None], row)[0].shape[-1] if rotary else 0
        if turned != config.head_dim:
            raise UnsupportedModelError(
                f"{type(target).__name__} rotates {turned} of {config.head_dim} "
                "numbers of its keys, and GliDe reads whole rotations; choose another "
                "drafter"
            )
        width, inner = config.hidden_size, config.num_heads * config.head_dim
        sizes = {"q_proj": (width, inner), "o_proj": (inner, width)}
        parts = {n: nn.Linear(*size, bias=False) for n, size in sizes.items()}
        self.cross = nn.ModuleDict(parts)
        self.norm = self.stack.norm(width)
        self.attend_with("sdpa")

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the states for the LM head, [b, n, h].

        `tokens` and `positions` are int64 [b, n], rotated `keys` and `values` [b,
        kv_heads, slots, d] the target's. The `bias` broadcasts to [b, 1, n, slots].
        """
        layer = self.first_layer
        states = self.embed_tokens(tokens)
        turns = self.stack.rotations(states, positions)
        mixed = layer.self_attn(
            layer.input_layernorm(states),
            position_embeddings=turns,
            attention_mask=None,
            **{head_layers.CACHE: cache},
        )[0]
        states, size = states + mixed, self.config.head_dim
        query = self.cross["q_proj"](states).unflatten(-1, (-1, size))
        rows = head_layers.rotate_rows(query.transpose(1, 2), turns)
        mixed = attend_to_target(rows, keys, values, bias, size**-0.5)
        states = states + self.cross["o_proj"](mixed.flatten(2))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        normed: Tensor = self.norm(states)
        return normed

    def draft(self, given: DraftInputs) -> tuple[Tensor, None]:
        keys, values = given.target[0]
        slots = torch.arange(keys.shape[2])
        hides = (slots >= given.target_length).to(keys.dtype) * HIDDEN
        reads = keys, values, hides[None, None, None]
        hidden = self(given.tokens, given.positions, *reads, given.cache)
        return self.lm_head(hidden[:, given.answer_rows]), None

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        config, ids = super().configure(files, target, tensors)
        text = target.model.config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = head_size(text)
        if size != config.head_dim or config.num_heads % heads:
            fact = f"has {config.num_heads} heads of {config.head_dim} numbers, but "
            fact += f"{target.source} keeps {heads} of {size}"
            raise files.refusal(fact, "give the drafter of this target")
        return config, ids


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
class AssistantConfig(head_layers.HeadConfig):
    """The sizes of an assistant, and the config of its layers."""

    text: Any = None


class Assistant(DraftModule):
    """Gemma 4's assistant; it scores the tokens of all clusters, likely or not.

    All rows of a draft have the position of its root.

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
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
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
