"""The tokens of a pair, and the part of them that a drafter may draft."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from jetdraft.bundle import DRAFTER, TARGET
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.draft_module import DraftModule, lm_head_rows
from jetdraft.checkpoints.layers import MAX_PADDING
from jetdraft.checkpoints.model_reader import read_tokenizer
from jetdraft.checkpoints.parameters import convert_while_running
from jetdraft.errors import CheckpointError, PairError, printable
from jetdraft.export.step import ProbeStep, Step
from jetdraft.quant.divergence import Windows, own_attention
from jetdraft.quant.grids import Matrix
from jetdraft.quant.weights import Quantization

ASKED_TOKENS = 512  # About how many the expected counts are summed over.
OWN_HEAD = "probe_head"  # The name of the LM head of probes.


def frequent_tokens(
    model: Any, windows: Windows, count: int, vocab_size: int | None = None
) -> Tensor:
    """Return the `count` most frequent ids below `vocab_size`, int64, ascending."""
    # How often the model expects each token in the text, float64 [vocab].
    expected = torch.zeros(model.get_output_embeddings().weight.shape[0]).double()
    with own_attention(model), torch.no_grad():
        for ids in windows.ids[: max(1, ASKED_TOKENS // windows.scored)]:
            answer = model(ids[None], use_cache=False, logits_to_keep=windows.scored)
            expected += answer.logits[0].float().softmax(-1).sum(0)
    # Below 1, so that it decides only among equal counts.
    share = expected / (1 + expected.sum())
    score = torch.bincount(windows.tokens, minlength=len(share)) + share
    best = score[:vocab_size].argsort(descending=True, stable=True)[:count]
    return best.sort().values


@dataclass(frozen=True)
class CutHead:
    """A checkpoint whose LM head is cut to the rows of the tokens `ids` [n].

    A tied `embedding` (its name, else None) keeps all rows; `whole` names the uncut LM
    head, `blocks` are its checkpoint's matrices.
    """

    checkpoint: Checkpoint
    ids: Tensor
    embedding: str | None
    whole: str
    blocks: Mapping[str, Matrix]

    @classmethod
    def of(cls, checkpoint: Checkpoint, ids: Tensor, dtype: torch.dtype) -> "CutHead":
        """Cut the LM head of the checkpoint's model, in place; it runs in `dtype`."""
        model, whole = checkpoint.model, checkpoint.lm_head_name
        weight = model.get_output_embeddings().weight
        table = model.get_input_embeddings().weight
        packed = checkpoint.packed
        blocks: dict[str, Any] = dict(packed.blocks) if packed else {}
        lm_head = lm_head_rows(model.get_output_embeddings(), ids)
        convert_while_running(lm_head, dtype)
        model.set_output_embeddings(lm_head)
        if packed is not None and whole in blocks:
            kept = blocks[whole].select_columns(ids.numpy())
            forms = packed.forms
            packed = replace(
                packed,
                blocks={**blocks, checkpoint.lm_head_name: kept},
                forms={**forms, checkpoint.lm_head_name: forms[whole]},
            )
        embedding = checkpoint.weight_names()[id(table)] if table is weight else None
        return cls(replace(checkpoint, packed=packed), ids, embedding, whole, blocks)

    def quantization(self, plain: Quantization) -> Quantization:
        """Return `plain`, but with a tied embedding quantized as the uncut LM head."""
        if self.embedding is None:
            return plain
        lender = replace(plain, head=self.whole, packed=self.blocks)
        return replace(plain, borrowed={self.embedding: self.whole}, lender=lender)


def own_names(step: Step) -> dict[int, str]:
    """The names, by id, of a step's weights that the checkpoint does not have."""
    head = step.model.own_head if isinstance(step, ProbeStep) else None
    weights = () if head is None else head.named_parameters()
    return {id(weight): f"{OWN_HEAD}.{name}" for name, weight in weights}


def with_probe_head(plain: Quantization, ids: Tensor) -> Quantization:
    """Return `plain`, but with an LM head of probes quantized as the whole one."""
    packed: dict[str, Any] = dict(plain.packed)
    if plain.head in packed:
        packed[plain.head] = packed[plain.head].select_columns(ids.numpy())
    lender = replace(plain, packed=packed)
    return replace(plain, borrowed={f"{OWN_HEAD}.weight": plain.head}, lender=lender)


def cut_head(head: DraftModule, ids: Tensor, dtype: torch.dtype) -> None:
    """Cut the LM heads of a `DraftModule` to the tokens `ids` int64 [n], in place."""
    parts = dict(head.named_children())
    for name in parts.keys() & {"lm_head", "lm_heads", "markov_w2"}:
        listed = isinstance(whole := parts[name], nn.ModuleList)
        cuts = [lm_head_rows(p, ids) for p in (whole.children() if listed else [whole])]
        for cut in cuts:
            convert_while_running(cut, dtype)
        setattr(head, name, nn.ModuleList(cuts) if listed else cuts[0])
    head.ids = ids


def write_vocabulary(folder: Path, ids: Tensor | None) -> str | None:
    """Write a draft vocabulary into a bundle; return the name of its file, or None."""
    if ids is None:
        return None
    name = f"{DRAFTER}-vocabulary.npy"
    np.save(folder / name, ids.numpy().astype(np.int64))
    return name


def check_tokenizers(sources: Mapping[str, str]) -> None:
    """Raise `PairError` for a pair with unequal tokenizers; read no weights for it."""
    if DRAFTER not in sources:
        return
    pair = sources[TARGET], sources[DRAFTER]
    with suppress(CheckpointError):  # loading says it in better words
        _check_ids(*pair, *(read_tokenizer(source) for source in pair))


def check_tokens(target: Checkpoint, drafter: Checkpoint) -> None:
    """Raise `PairError` unless the drafter's ids are the target's tokens."""
    _check_ids(target.source, drafter.source, target.tokenizer, drafter.tokenizer)
    rows = target.vocab_size, drafter.vocab_size
    compared = target.tokenizer is not None and drafter.tokenizer is not None
    if not compared and abs(rows[0] - rows[1]) > MAX_PADDING:
        raise PairError(
            f"{drafter.source} has {rows[1]} tokens, {target.source} has {rows[0]}, "
            "and without both tokenizers the tokens cannot be compared; add them, or "
            "choose a drafter with the same tokenizer"
        )


def _check_ids(target: str, drafter: str, ours: str | None, theirs: str | None) -> None:
    if ours is None or theirs is None:
        return
    known = (Tokenizer.from_str(text).get_vocab() for text in (ours, theirs))
    one, other = ({i: token for token, i in ids.items()} for ids in known)
    for i in sorted(one.keys() & other.keys()):
        if one[i] != other[i]:
            tokens = (printable(repr(token), 60) for token in (other[i], one[i]))
            raise PairError(
                f"{drafter} has another tokenizer than {target}: token {i} is "
                f"{', not '.join(tokens)}; choose a drafter with the same tokenizer"
            )
