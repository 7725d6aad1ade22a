"""Cuts the LM head of a drafter to the tokens that it may draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from jetdraft.bundle import DRAFTER
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.attached.source_drafter import SourceDrafter
from jetdraft.checkpoints.heads.head_reader import AnyHead
from jetdraft.checkpoints.heads.hydra import Hydra
from jetdraft.checkpoints.heads.medusa import Medusa
from jetdraft.checkpoints.parameters import run_in
from jetdraft.quant.blocks import Blocks
from jetdraft.quant.weights import Quantization


@dataclass(frozen=True)
class CutHead:
    """A drafter's checkpoint whose LM head has the rows of the tokens `ids` only.

    `ids` are int64 [n]. An embedding that was tied to the whole LM head keeps its
    rows, and is quantized as the head was: `embedding` is its name now, `whole` the
    head's before, and `blocks` are the integers of the checkpoint before.

        cut = CutHead.of(checkpoint, ids, torch.float32)
        quantization = cut.quantization(quantization)
    """

    checkpoint: Checkpoint
    ids: Tensor
    embedding: str | None
    whole: str
    blocks: Mapping[str, Blocks]

    @classmethod
    def of(cls, checkpoint: Checkpoint, ids: Tensor, dtype: torch.dtype) -> CutHead:
        """Cut the LM head of the checkpoint's model, in place; it runs in `dtype`."""
        model, whole = checkpoint.model, checkpoint.head
        weight = model.get_output_embeddings().weight
        table = model.get_input_embeddings().weight
        packed = checkpoint.packed
        blocks = dict(packed.blocks) if packed else {}
        model.set_output_embeddings(_rows(model.get_output_embeddings(), ids, dtype))
        if packed is not None and whole in blocks:
            kept = blocks[whole].columns(ids.numpy())
            forms = packed.forms
            packed = replace(
                packed,
                blocks={**blocks, checkpoint.head: kept},
                forms={**forms, checkpoint.head: forms[whole]},
            )
        embedding = checkpoint.names()[id(table)] if table is weight else None
        return cls(replace(checkpoint, packed=packed), ids, embedding, whole, blocks)

    def quantization(self, plain: Quantization) -> Quantization:
        """How the cut checkpoint is quantized, from how it would be without a cut."""
        if self.embedding is None:
            return plain
        lender = replace(plain, head=self.whole, packed=self.blocks)
        return replace(plain, borrowed={self.embedding: self.whole}, lender=lender)


def cut_head(head: AnyHead, ids: Tensor, dtype: torch.dtype) -> None:
    """Let a head that reads states choose among these tokens, in place.

    The target's own LM head stays as it is.
    """
    assert not isinstance(head, SourceDrafter)  # refused before
    if isinstance(head, Medusa | Hydra):
        cut = (_rows(lm_head, ids, dtype) for lm_head in head.lm_heads)
        head.lm_heads = nn.ModuleList(cut)
    else:
        head.lm_head = _rows(head.lm_head, ids, dtype)
    head.ids = ids


def write_vocabulary(folder: Path, ids: Tensor | None) -> str | None:
    """Write a draft vocabulary into a bundle; gives the file's name."""
    if ids is None:
        return None
    name = f"{DRAFTER}-vocabulary.npy"
    np.save(folder / name, ids.numpy().astype(np.int64))
    return name


def _rows(lm_head: nn.Module, ids: Tensor, dtype: torch.dtype) -> nn.Linear:
    """The rows of these tokens of an LM head, in the type they are stored in."""
    weight, bias = lm_head.weight, lm_head.bias
    assert isinstance(weight, Tensor)
    cut = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
    cut.weight = nn.Parameter(weight.detach()[ids].clone(), requires_grad=False)
    if isinstance(bias, Tensor):
        cut.bias = nn.Parameter(bias.detach()[ids].clone(), requires_grad=False)
    run_in(cut, dtype)
    return cut
