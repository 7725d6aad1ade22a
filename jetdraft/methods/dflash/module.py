"""DFlash (2602.06036) and DSpark (2607.05147): heads that fill a block from states.

Ids of layers name outputs in the authors' and SpecForge's configs, inputs in
speculators' configs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.blocks import BlockConfig, BlockDrafter, read_block_size
from jetdraft.checkpoints.heads.draft_module import Reads
from jetdraft.checkpoints.heads.head_files import LAYER_KEYS, HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.errors import CheckpointError

_MARKOV_RANK, _ANCHOR = "markov_rank", "sample_from_anchor"
_KEYS = {
    *("block_size", "num_target_layers", "dflash_config", "mask_token_id", _ANCHOR),
    *("target_layer_ids", "target_hidden_size", _MARKOV_RANK),
    # The confidence head says where to cut a block, as `confidence` does here.
    *("enable_confidence_head", "confidence_head_with_markov", "num_anchors"),
    "confidence_head_alpha",
}
_SPECULATOR_KEYS = _KEYS | {
    *("draft_vocab_size", "aux_hidden_state_layer_ids"),
    *("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start"),
    *("lambda_base_decay_ratio", "auf"),
}
# Flags of DFlash's descendants, with the values that are read.
_VALUES = {
    "projector_type": ("dflash", "dspark"),
    "markov_head_type": ("vanilla",),
    "attention_mode": ("gqa", "mha"),
    "shift_label": (False,),
    "sliding_window_non_causal": (False,),
}
# Names of DFlash and its descendants, with what keeps a head from being read.
_ARCHITECTURES = {
    **dict.fromkeys(("DFlashDraftModel", "DSparkDraftModel", "Qwen3DSparkModel"), ""),
    "DFlash2DraftModel": "DFlash2's convolutions and its selector of candidates",
    "DominoDraftModel": "Domino's recurrent layer over a block",
}


class Dflash(BlockDrafter):
    """A head with the target's embedding, and its LM head unless it has its own."""

    published = "DFlash, DSpark"
    speculators = ("dflash", "dspark")
    reads = Reads(features=True, guesses=True, anchored=True)
    keys = LAYER_KEYS | _KEYS
    renames = (
        (r"(?:logit_head\.)?confidence_head\..*", None),
        (r"(?:logit_head\.)?markov_head\.(markov_w[12]\..*)", r"\1"),
        *BlockDrafter.renames,
    )
    has_own_matrices = True
    fusion_names = ("fc", "hidden_norm")

    def __init__(self, config: BlockConfig, target: Any) -> None:
        super().__init__(config, target)
        joined = len(config.taps) * config.target_hidden_size
        self.fc = nn.Linear(joined, config.hidden_size, bias=False)
        self.hidden_norm = self.stack.norm(config.hidden_size)
        if rank := config.markov_rank:
            self.markov_w1 = nn.Embedding(config.vocab_size, rank)
            self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)

    @property
    def block_rows(self) -> int:
        return self.config.slots + (not self.config.anchor_drafts)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        states = [state.to(self.fc.weight.dtype) for state in taps]
        features: Tensor = self.hidden_norm(self.fc(torch.cat(states, dim=-1)))
        return features

    def logits(self, states: Tensor, block: Tensor) -> Tensor:
        """Return the logits; a Markov head adds what the token before a slot says."""
        logits = super().logits(states, block)
        if not self.config.markov_rank:
            return logits
        slots: list[Tensor] = []
        for index, slot in enumerate(logits.unbind(1)):
            token = block[:, index : index + 1]
            if slots:
                best = slots[-1].argmax(-1)
                best = best if self.ids is None else self.ids[best]
                token = torch.where(token < self.config.vocab_size, token, best)
            slots.append(slot[:, None] + self.markov_w2(self.markov_w1(token)))
        return torch.cat(slots, dim=1)

    @classmethod
    def recognizes(cls, files: HeadFiles) -> bool:
        of_speculators = files.config.get("speculators_model_type") in cls.speculators
        named = files.architecture in _ARCHITECTURES
        return named or of_speculators or "dflash_config" in files.config

    @classmethod
    def check(cls, files: HeadFiles) -> None:
        cls._flatten_config(files)

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        files = cls._flatten_config(files)
        mask = _read_mask_token(files, target)
        fields = files.fields_beside(tensors, target)
        layers = len(decoder_layers(target.model))
        if files.is_speculators:
            ids = files.config.get("aux_hidden_state_layer_ids")
            taps = files.taps_of(ids, layers)
        else:
            usual = default_output_layers(fields["num_layers"], layers)
            ids = files.config.get("target_layer_ids") or usual
            taps = files.taps_of(ids, layers, shift=1)
        joined = len(taps) * fields["target_hidden_size"]
        files.check_fusion(tensors, joined, "its taps")
        ids = files.mapped_ids(tensors, target)
        # A config of DSpark without the flag is of its authors, or of SpecForge.
        anchor_drafts = files.config.get(_ANCHOR, _MARKOV_RANK in files.config)
        return BlockConfig(
            draft_vocab_size=target.vocab_size if ids is None else len(ids),
            taps=taps,
            slots=read_block_size(files, least=2) - (not anchor_drafts),
            anchor_drafts=bool(anchor_drafts),
            markov_rank=int(files.config.get(_MARKOV_RANK) or 0),
            mask_token=mask,
            **fields,
        ), ids

    @classmethod
    def _flatten_config(cls, files: HeadFiles) -> HeadFiles:
        if lacking := _ARCHITECTURES.get(files.architecture):
            fact = f"has {lacking}, which jetdraft does not compute"
            raise files.refusal(fact, "give a head of DFlash or DSpark")
        config = {**files.config, **(files.config.get("dflash_config") or {})}
        on = {n: v for n, v in config.items() if v not in _VALUES.get(n, ())}
        return files.configured(on).flattened(cls.keys, _SPECULATOR_KEYS)


def default_output_layers(count: int, layers: int) -> list[int]:
    """Choose layers whose outputs a head reads: (5, 36) is [1, 9, 17, 25, 33]."""
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


def _read_mask_token(files: HeadFiles, target: Checkpoint) -> int:
    """Return the token of masks; raises `CheckpointError` for an unfit target."""
    layers = len(decoder_layers(target.model))
    meant = files.config.get("num_target_layers") or layers
    if meant != layers:
        fact = f"is for a target of {meant} layers, but {target.source} has {layers}"
        raise files.refusal(fact, "give the head of this target")
    embedding = target.model.get_input_embeddings()
    if type(embedding).forward is not nn.Embedding.forward:
        raise CheckpointError(
            f"{target.source} has a {type(embedding).__name__}, and DFlash reads plain "
            "embeddings only; export without the head"
        )
    token = files.config.get("mask_token_id")
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise CheckpointError(
            f"the config of {files.source} has mask_token_id={token!r}, but "
            f"{target.source} embeds the tokens 0 to {target.vocab_size - 1}; give the "
            "head of this target"
        )
    return token
