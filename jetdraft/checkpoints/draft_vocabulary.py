"""The rows of a drafter's matrices, and the target's tokens that they stand for.

As EAGLE-3 stores it, `d2t` int64 [n] has the id less the row, `t2d` bool marks ids.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from jetdraft.errors import CheckpointError

D2T, T2D = "d2t", "t2d"  # The names of the two tensors of a draft vocabulary.
# The most rows by which paddings of one vocabulary differ; DeepSeek has 2,385 rows
# without a token. Where a tokenizer is missing, matrices that differ by more belong to
# two vocabularies.
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
        raise CheckpointError(
            f"the d2t of {source} does not map {rows} rows to different ids below "
            f"{vocab_size}; fetch it again"
        )
    if marked is not None and not torch.equal(
        marked.nonzero().flatten(), ids.sort().values
    ):
        raise CheckpointError(
            f"d2t and t2d of {source} name different tokens, so the map was perhaps "
            "never set; fetch it again"
        )
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
