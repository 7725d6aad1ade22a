"""Spec-Drafter (SpecDec, 2203.16487): a block drafter for an encoder-decoder."""

import copy
import hashlib
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from jetdraft.checkpoints import attention
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.blocks import MAX_BLOCK_TOKENS
from jetdraft.checkpoints.heads.draft_module import DraftModule, Reads
from jetdraft.checkpoints.heads.head_files import HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.errors import UnsupportedModelError

MODEL_TYPE = "jetdraft-block"  # What the config of a drafter calls itself.


class SourceDrafter(DraftModule):
    """The encoder and some decoder layers of a target, with a mask for each place."""

    model_types = (MODEL_TYPE,)
    reads = Reads(source=True, guesses=True)
    keys = frozenset({"model_type", "target_type", "target_words", "block_size"})
    renames = ()

    def __init__(self, config: HeadConfig, target: Any) -> None:
        super().__init__(config, target)
        ends = target.get_input_embeddings(), target.get_output_embeddings()
        shared = {id(weight): weight for end in ends for weight in end.parameters()}
        self.model = copy.deepcopy(target, shared)
        name, layers = find_decoder_layers(self.model)
        kept = spread_layers(config.num_layers, len(layers))
        chosen = nn.ModuleList(layers[i] for i in kept)
        for place, layer in enumerate(chosen):  # by which attention finds its buffers
            for module in layer.modules():
                if getattr(module, "layer_idx", None) is not None:
                    module.layer_idx = place  # type: ignore[assignment]
        setattr(self.model.get_decoder(), name, chosen)
        self.masks = nn.Parameter(torch.zeros(config.slots, config.hidden_size))
        attention.set_attention(self.model, attention.SOURCE_ATTENTION)

    @property
    def lm_head(self) -> Any:
        """The target's LM head; a trace fails if a module has two names."""
        return self.model.get_output_embeddings()

    def get_encoder(self) -> Any:
        return self.model.get_encoder()

    def get_decoder(self) -> Any:
        """The decoder: a module that keeps some of the target's layers."""
        return self.model.get_decoder()

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def forward(
        self, tokens: Tensor, positions: Tensor, rows: Any, **source: Any
    ) -> Tensor:
        """The logits float32 of the k decoder rows that `rows` selects.

        `tokens` and `positions` are int64 [b, m]; the token vocab_size + j is mask j.
        `rows` indexes states [b, m, h]: the result is [1, k, vocab] or [k, vocab].
        """
        embed, size = self.get_decoder().embed_tokens, self.config.vocab_size
        states = embed(tokens.clamp(max=size - 1))
        masks = self.masks[(tokens - size).clamp(min=0)].to(states.dtype)
        states = torch.where((tokens >= size)[..., None], masks, states)
        table = getattr(self.get_decoder(), "embed_positions", None)
        if table is not None:  # a block may end after the last position
            last = table.weight.shape[0] - getattr(table, "offset", 0) - 1
            positions = positions.clamp(max=last)
        answered = attention.answering_rows(self.model, rows)
        with attention.at_positions(self.model, positions), answered:
            logits: Tensor = self.model(decoder_inputs_embeds=states, **source).logits
        return logits.float()

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        fields = files.config
        files.check_keys(cls.keys)
        slots = files.positive_integer("block_size")
        layers = files.positive_integer("num_hidden_layers")
        config = source_config(target, layers, slots)
        own = target.model.config.model_type
        words = embedding_sha256(target)
        most, limit = len(find_decoder_layers(target.model)[1]), MAX_BLOCK_TOKENS
        for is_wrong, fact in (
            (fields.get("target_type") != own, f"is not for a {own}"),
            (fields.get("target_words") != words, "was trained for other weights"),
            (layers > most, f"has {layers} layers, but the target's decoder {most}"),
            (slots > limit, f"fills {slots} tokens, and jetdraft at most {limit}"),
        ):
            if is_wrong:
                fix = f"give the drafter that was trained for {target.source}"
                raise files.refusal(fact, fix)
        return config, None

    def target_weight_prefixes(self, target: Checkpoint) -> tuple[str, ...]:
        """Return the names of weights that the target shares, and of all buffers."""
        shared = {id(weight) for weight in target.model.parameters()}
        named = self.named_parameters(remove_duplicate=False)
        buffers = (name for name, _ in self.named_buffers())
        return (*(name for name, weight in named if id(weight) in shared), *buffers)


def spread_layers(count: int, layers: int) -> list[int]:
    """Spread `count` layer numbers over `layers` layers: (3, 8) gives [0, 4, 7]."""
    return [round(i * (layers - 1) / max(1, count - 1)) for i in range(count)]


def find_decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the attribute with the decoder's layers, and the layers, bottom first."""
    for name, child in model.get_decoder().named_children():
        if isinstance(child, nn.ModuleList):
            return name, child
    raise UnsupportedModelError.of(model, "has no list of layers in its decoder")


def source_config(target: Checkpoint, layers: int, slots: int) -> HeadConfig:
    """Make a drafter's config; raises `UnsupportedModelError` for other targets."""
    if not target.reads_source or target.speech is not None:
        fact, fix = "is a decoder alone", "take a drafter of another kind"
        if target.speech is not None:
            fact, fix = "hears", "draft with a smaller Whisper (export --drafter)"
        raise UnsupportedModelError(
            f"{target.source} {fact}, and a drafter of kind block is for an "
            f"encoder-decoder of text, like T5, BART or Marian; {fix}"
        )
    width = target.model.get_input_embeddings().weight.shape[1]
    return HeadConfig.beside(target, width, num_layers=layers, slots=slots)


def source_fields(target: Checkpoint, config: HeadConfig) -> dict[str, Any]:
    """Return the config.json of a drafter of this target."""
    return {
        "model_type": MODEL_TYPE,
        "target_type": target.model.config.model_type,
        "target_words": embedding_sha256(target),
        "num_hidden_layers": config.num_layers,
        "block_size": config.slots,
    }


def embedding_sha256(target: Checkpoint) -> str:
    """Hash the embeddings of tokens in float16, without rows that have no token."""
    words = target.model.get_input_embeddings().weight.detach()
    if target.tokenizer is not None:
        words = words[: Tokenizer.from_str(target.tokenizer).get_vocab_size()]
    return hashlib.sha256(words.to("cpu", torch.float16).numpy().tobytes()).hexdigest()
