"""SpecDiff (2408.05636): a small diffusion model that reads text and fills masks."""

from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import head_files
from jetdraft.checkpoints.heads.blocks import BlockConfig, BlockDrafter, read_block_size
from jetdraft.checkpoints.heads.draft_module import Reads, lm_head_rows
from jetdraft.checkpoints.heads.head_files import HeadFiles, Sizes, Tensors

MODEL_TYPE = "jetdraft-diffusion"  # What the config of a drafter calls itself.


class Diffusion(BlockDrafter):
    """A drafter with an embedding of its own, to which its LM head is tied."""

    model_types = (MODEL_TYPE,)
    cuts_vocabulary = False
    reads = Reads(guesses=True)
    keys = head_files.LAYER_KEYS | {"block_size"}
    reads_text = True

    def __init__(self, config: BlockConfig, target: Any = None) -> None:
        super().__init__(config, target)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.mask = nn.Parameter(torch.zeros(width))

    def embed(self, tokens: Tensor) -> Tensor:
        is_mask, rows = tokens >= self.config.vocab_size, super().embed(tokens)
        return torch.where(is_mask[..., None], self.mask.to(rows.dtype), rows)

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        """Read the config and the draft vocabulary; resizes the embedding in place."""
        files.check_keys(cls.keys)
        own, rows = files.positive_integer("vocab_size"), target.vocab_size
        table = tensors.get(head_files.EMBEDDING_WEIGHT)
        if table is not None and len(table) == own:
            tensors[head_files.EMBEDDING_WEIGHT] = head_files.resize_rows(table, rows)
        ids = torch.arange(own) if own < rows else None
        return BlockConfig(
            target_hidden_size=files.positive_integer("hidden_size"),
            slots=read_block_size(files, least=1),
            vocab_size=files.check_vocabulary(target),
            draft_vocab_size=rows if ids is None else own,
            **files.layer_fields(tensors),
        ), ids

    def target_weight_prefixes(self, target: Checkpoint) -> tuple[str, ...]:
        """Return the LM head's prefix: its weights are the embedding's."""
        return ("lm_head.",)

    def after_loading(self) -> None:
        """Tie the LM head to the embedding, and cut it to the draft vocabulary."""
        self.lm_head.weight = self.embed_tokens.weight
        if self.ids is not None:
            self.lm_head = lm_head_rows(self.lm_head, self.ids)
