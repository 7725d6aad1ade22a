"""Recognizes a published head and loads it for a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.attached.chimera import (
    Chimera,
    is_chimera,
    read_chimera,
)
from jetdraft.checkpoints.heads.attached.exit_adapter import (
    ExitAdapter,
    is_kangaroo,
    read_kangaroo,
)
from jetdraft.checkpoints.heads.attached.falcon import Falcon, is_falcon, read_falcon
from jetdraft.checkpoints.heads.attached.glide import Glide, is_glide, read_glide
from jetdraft.checkpoints.heads.block_drafter import BlockDrafter
from jetdraft.checkpoints.heads.block_reader import (
    is_dflash,
    is_diffusion,
    read_block_drafter,
)
from jetdraft.checkpoints.heads.eagle_reader import eagle_tensors, read_eagle
from jetdraft.checkpoints.heads.head import Head
from jetdraft.checkpoints.heads.head_config import DFLASH, EAGLE3
from jetdraft.checkpoints.heads.head_fields import FIRST_LAYER
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.hydra import Hydra, is_hydra, read_hydra
from jetdraft.checkpoints.heads.medusa import Medusa, is_medusa, read_medusa
from jetdraft.checkpoints.heads.mtp import is_mtp, read_mtp
from jetdraft.checkpoints.parameters import run_in
from jetdraft.checkpoints.reading.loading_errors import as_checkpoint_error
from jetdraft.errors import CheckpointError

AnyHead = Head | BlockDrafter | Medusa | Hydra | ExitAdapter | Glide | Chimera | Falcon

_KINDS = (
    "EAGLE-1, EAGLE-2, EAGLE-3, MTP, DFlash, Medusa, Hydra, Kangaroo, GliDe, "
    "Chimera and Falcon"
)


def load_head(source: str, target: Checkpoint, dtype: torch.dtype) -> AnyHead:
    """The head in a local folder or a hub repository, which computes in `dtype`.

    Its weights keep the type they are stored in, except the fusion's, which are
    float32. A head that is a part of the target (MTP) is in the target's own folder.
    Raises `CheckpointError` for a head that is unknown, damaged or of another target.

        head = load_head("AngelSlim/Qwen3-1.7B_eagle3", target, torch.float32)
    """
    files = HeadFiles.read(source)
    kind = files.config.get("speculators_model_type")
    if kind not in (None, EAGLE3, DFLASH):
        raise CheckpointError(
            f"{source} is a {kind!r} drafter of speculators; jetdraft reads {_KINDS}"
        )
    with as_checkpoint_error(source), no_init_weights():
        head = _built(files, target)
    _compute_in(head, target, dtype)
    return head.requires_grad_(False).eval()


def _built(files: HeadFiles, target: Checkpoint) -> AnyHead:
    for is_one, build in (
        (is_medusa, _medusa),
        (is_hydra, _hydra),
        (lambda files: is_dflash(files) or is_diffusion(files), _block_drafter),
        (is_kangaroo, _kangaroo),
        (is_glide, _glide),
        (is_chimera, _chimera),
        (is_falcon, _falcon),
        (is_mtp, _mtp),
        (_is_eagle, _eagle),
    ):
        if is_one(files):
            return build(files, target)
    raise CheckpointError(
        f"the tensors of {files.source} are no head's; jetdraft reads {_KINDS}"
    )


def _medusa(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_medusa(files, target)
    medusa = Medusa(config)
    _fill(files.source, medusa, tensors)
    return medusa


def _hydra(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_hydra(files, target)
    hydra = Hydra(config, target.model.get_input_embeddings())
    _fill(files.source, hydra, tensors, taken=("embed_tokens.",))
    return hydra


def _block_drafter(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors, ids = read_block_drafter(files, target)
    drafter = BlockDrafter(config, target.model)
    if not drafter.reads_text:
        return _with_matrices(files.source, drafter, tensors, ids)
    _fill(files.source, drafter, tensors, taken=("lm_head.",))
    drafter.lm_head.weight = drafter.embed_tokens.weight
    return drafter


def _kangaroo(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_kangaroo(files, target)
    adapter = ExitAdapter(config, target.model)
    _fill(files.source, adapter, tensors, taken=("lm_head.",))
    return adapter


def _glide(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_glide(files, target)
    drafter = Glide(config, target.model)
    _fill(files.source, drafter, tensors, taken=("embed_tokens.", "lm_head."))
    return drafter


def _chimera(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_chimera(files, target)
    drafter = Chimera(config, target.model)
    _fill(files.source, drafter, tensors, taken=("embed_tokens.", "lm_head."))
    return drafter


def _falcon(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_falcon(files, target)
    drafter = Falcon(config, target.model)
    _fill(files.source, drafter, tensors, taken=("embed_tokens.", "lm_head."))
    return drafter


def _mtp(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_mtp(files, target)
    return _with_matrices(files.source, Head(config, target.model), tensors, None)


def _is_eagle(files: HeadFiles) -> bool:
    return f"{FIRST_LAYER}self_attn.q_proj.weight" in eagle_tensors(files)


def _eagle(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors, ids = read_eagle(files, target)
    return _with_matrices(files.source, Head(config, target.model), tensors, ids)


_Reader = TypeVar("_Reader", Head, BlockDrafter)


def _with_matrices(
    source: str, head: _Reader, tensors: Mapping[str, Tensor], ids: Tensor | None
) -> _Reader:
    """The filled head, with its own embedding and LM head where it has them."""
    config = head.config
    head.ids = ids
    taken = ["embed_tokens.", "lm_head."]
    embedding = tensors.get("embed_tokens.weight")
    if embedding is not None and not _equal(embedding, head.embed_tokens.weight):
        head.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        taken.remove("embed_tokens.")
    rows = tensors.get("lm_head.weight")
    if rows is not None and (ids is not None or not _equal(rows, head.lm_head.weight)):
        size = config.draft_vocab_size
        head.lm_head = nn.Linear(config.hidden_size, size, bias=False)
        taken.remove("lm_head.")
    elif ids is not None:
        head.lm_head = _cut(head.lm_head, ids)
    _check_width(source, head)
    _fill(source, head, tensors, tuple(taken))
    return head


def _equal(one: Tensor, other: Tensor | nn.Module) -> bool:
    assert isinstance(other, Tensor)
    return one.shape == other.shape and torch.equal(one.float(), other.detach().float())


def _cut(lm_head: nn.Module, ids: Tensor) -> nn.Linear:
    """The rows of these tokens of the target's LM head."""
    weight = lm_head.weight
    assert isinstance(weight, Tensor)
    cut = nn.Linear(weight.shape[1], len(ids), bias=False)
    cut.weight = nn.Parameter(weight.detach()[ids].clone())
    return cut


def _check_width(source: str, head: Head | BlockDrafter) -> None:
    """Raise `CheckpointError` if a matrix of the target has another width."""
    width = head.config.hidden_size
    for name in ("embed_tokens", "lm_head"):
        matrix = getattr(head, name).weight
        if matrix.shape[1] != width:
            raise CheckpointError(
                f"{source} has no {name}.weight, and the target's is "
                f"{matrix.shape[1]} wide where the head is {width}; fetch it again"
            )


def _fill(
    source: str,
    head: nn.Module,
    tensors: Mapping[str, Tensor],
    taken: tuple[str, ...] = (),
) -> None:
    """Give the head its tensors in the types they are stored in.

    Modules `taken` from the target keep theirs. Raises `CheckpointError` unless every
    other weight has a tensor of its shape, and every tensor a weight.
    """
    wanted = {
        name: weight
        for name, weight in head.state_dict().items()
        if not name.startswith(taken or ("\0",))
    }
    given = {n: t for n, t in tensors.items() if not n.startswith(taken or ("\0",))}
    for fact, names in (
        ("lacks", wanted.keys() - given.keys()),
        ("has the unknown", given.keys() - wanted.keys()),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{source} {fact} weight {sorted(names)[0]!r}{more}; give a head that "
                "is complete and of a known layout"
            )
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{name} of {source} is {list(tensor.shape)}, but its config and the "
                f"target need {list(wanted[name].shape)}; give the head of this target"
            )
    # A module that is filled must not lose what it shares with the target.
    head.load_state_dict(given, strict=False, assign=True)


def _compute_in(head: AnyHead, target: Checkpoint, dtype: torch.dtype) -> None:
    """Let the head's own modules run in `dtype`; the target's do already."""
    fusion = _fusion(head)
    for weight in fusion:
        weight.data = weight.data.float()
    others = {id(weight) for weight in (*fusion, *target.model.parameters())}
    run_in(head, dtype, others)


def _fusion(head: AnyHead) -> list[Tensor]:
    """The weights of the fusion of taps, which runs in float32."""
    if isinstance(head, BlockDrafter) and not head.reads_text:
        parts: list[nn.Module] = [head.fc, head.hidden_norm]
    elif isinstance(head, Head) and head.config.family == EAGLE3:
        parts = [head.fc]
        parts += [head.input_norm] if head.config.norm_before_fc else []
        parts += [head.fc_norm] if head.config.fc_norm else []
    else:
        return []
    return [weight for part in parts for weight in part.parameters()]
