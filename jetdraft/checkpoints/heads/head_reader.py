"""Recognizes a published head and loads it for a target."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
from jetdraft.checkpoints.heads.attached.source_drafter import (
    SourceDrafter,
    is_source_drafter,
    read_source_drafter,
)
from jetdraft.checkpoints.heads.block_drafter import BlockDrafter
from jetdraft.checkpoints.heads.block_reader import (
    is_dflash,
    is_diffusion,
    read_block_drafter,
)
from jetdraft.checkpoints.heads.eagle_reader import (
    eagle_layer,
    eagle_tensors,
    is_model,
    read_eagle,
)
from jetdraft.checkpoints.heads.head import Head
from jetdraft.checkpoints.heads.head_config import DFLASH, EAGLE3
from jetdraft.checkpoints.heads.head_fields import EMBEDDING, FIRST_LAYER, HEAD
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.hydra import Hydra, check_hydra, is_hydra, read_hydra
from jetdraft.checkpoints.heads.medusa import (
    Medusa,
    check_medusa,
    is_medusa,
    read_medusa,
)
from jetdraft.checkpoints.heads.mtp import is_mtp, read_mtp
from jetdraft.checkpoints.parameters import run_in
from jetdraft.checkpoints.reading.loading_errors import as_checkpoint_error
from jetdraft.errors import CheckpointError, UnsupportedModelError, printable

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

AnyHead = (
    Head
    | BlockDrafter
    | SourceDrafter
    | Medusa
    | Hydra
    | ExitAdapter
    | Glide
    | Chimera
    | Falcon
)

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
    if target.reads_source and not is_source_drafter(files):
        raise UnsupportedModelError(
            f"{target.source} is an encoder-decoder, and a head for it is a drafter of "
            "train drafter --kind block; give one, or a checkpoint with --drafter"
        )
    with as_checkpoint_error(source), no_init_weights():
        head = _builder(files, target.source)(files, target)
    _compute_in(head, target, dtype)
    return head.requires_grad_(False).eval()


def check_head(source: str, target: str) -> None:
    """Raise `CheckpointError` for a source without a head, or with a wrong config.

    Only the name of the target is needed, so this comes before the target is loaded.
    Configs of jetdraft's own trainings, of blocks and of MTP are checked later.

        check_head("AngelSlim/Qwen3-1.7B_eagle3", "Qwen/Qwen3-1.7B")
    """
    files = HeadFiles.read(source)
    with as_checkpoint_error(source):
        build = _builder(files, target)
        if build in _CHECKS:
            _CHECKS[build](files)


def _builder(
    files: HeadFiles, target: str
) -> Callable[[HeadFiles, Checkpoint], AnyHead]:
    """What builds the head that is in the files."""
    kind = files.config.get("speculators_model_type")
    if kind not in (None, EAGLE3, DFLASH):
        raise CheckpointError(
            f"{files.source} is a {printable(repr(kind), 60)} drafter of speculators, "
            f"from which jetdraft reads {EAGLE3} and {DFLASH}; an MTP module is read "
            "from the folder of its target"
        )
    for is_one, build in (
        (is_source_drafter, _source_drafter),
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
            return build
    raise CheckpointError(_refusal(files, target))


def _refusal(files: HeadFiles, target: str) -> str:
    """What the files hold in place of a head."""
    source = files.source
    if source == target or (
        os.path.exists(target)
        and os.path.exists(source)
        and os.path.samefile(source, target)
    ):
        return (
            f"{source} has no MTP module that jetdraft knows, so it is no head of "
            "itself; export without the head"
        )
    if is_model(eagle_tensors(files)):
        return f"{source} is a whole model, not a head; give it as --drafter"
    return f"the tensors of {source} are no head's; jetdraft reads {_KINDS}"


def _medusa(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_medusa(files, target)
    medusa = Medusa(config)
    medusa.ids = config.first_ids
    _fill(files, medusa, tensors)
    return medusa


def _hydra(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_hydra(files, target)
    hydra = Hydra(config, target.model.get_input_embeddings())
    hydra.ids = config.first_ids
    _fill(files, hydra, tensors, taken=("embed_tokens.",))
    return hydra


def _block_drafter(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors, ids = read_block_drafter(files, target)
    drafter = BlockDrafter(config, target.model)
    if not drafter.reads_text:
        return _with_matrices(files, drafter, tensors, ids)
    _fill(files, drafter, tensors, taken=("lm_head.",))
    drafter.lm_head.weight = drafter.embed_tokens.weight
    if ids is not None:
        drafter.lm_head, drafter.ids = _cut(drafter.lm_head, ids), ids
    return drafter


def _source_drafter(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_source_drafter(files, target)
    drafter = SourceDrafter(config, target.model)
    _fill(files, drafter, tensors, _lent_names(drafter, target))
    return drafter


def _lent_names(drafter: nn.Module, target: Checkpoint) -> tuple[str, ...]:
    """The names of all weights and buffers that a drafter has from its target."""
    lent = {id(weight) for weight in target.model.parameters()}
    named = drafter.named_parameters(remove_duplicate=False)
    buffers = (name for name, _ in drafter.named_buffers())
    return (*(name for name, weight in named if id(weight) in lent), *buffers)


def _kangaroo(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_kangaroo(files, target)
    adapter = ExitAdapter(config, target.model)
    _fill(files, adapter, tensors, taken=("lm_head.",))
    return adapter


def _glide(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_glide(files, target)
    drafter = Glide(config, target.model)
    _fill(files, drafter, tensors, taken=("embed_tokens.", "lm_head."))
    return drafter


def _chimera(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_chimera(files, target)
    drafter = Chimera(config, target.model)
    _fill(files, drafter, tensors, taken=("embed_tokens.", "lm_head."))
    return drafter


def _falcon(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_falcon(files, target)
    drafter = Falcon(config, target.model)
    _fill(files, drafter, tensors, taken=("embed_tokens.", "lm_head."))
    return drafter


def _mtp(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors = read_mtp(files, target)
    return _with_matrices(files, Head(config, target.model), tensors, None)


def _is_eagle(files: HeadFiles) -> bool:
    tensors = eagle_tensors(files)
    return f"{FIRST_LAYER}self_attn.q_proj.weight" in tensors and not is_model(tensors)


def _eagle(files: HeadFiles, target: Checkpoint) -> AnyHead:
    config, tensors, ids = read_eagle(files, target)
    return _with_matrices(files, Head(config, target.model), tensors, ids)


_CHECKS: dict[Callable[[HeadFiles, Checkpoint], AnyHead], Callable[..., object]] = {
    _medusa: check_medusa,
    _hydra: check_hydra,
    _eagle: eagle_layer,
}
"""What checks the config of a head without its target."""

_Reader = TypeVar("_Reader", Head, BlockDrafter)


def _with_matrices(
    files: HeadFiles, head: _Reader, tensors: Mapping[str, Tensor], ids: Tensor | None
) -> _Reader:
    """The filled head, with its own embedding and LM head where it has them."""
    config = head.config
    head.ids = ids
    taken = ["embed_tokens.", "lm_head."]
    embedding = tensors.get(EMBEDDING)
    if embedding is not None and not _equal(embedding, head.embed_tokens.weight):
        head.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        taken.remove("embed_tokens.")
    rows = tensors.get(HEAD)
    if rows is not None and (ids is not None or not _equal(rows, head.lm_head.weight)):
        size = config.draft_vocab_size
        head.lm_head = nn.Linear(config.hidden_size, size, bias=False)
        taken.remove("lm_head.")
    elif ids is not None:
        head.lm_head = _cut(head.lm_head, ids)
    _check_width(files.source, head)
    _fill(files, head, tensors, tuple(taken))
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
    files: HeadFiles,
    head: nn.Module,
    tensors: Mapping[str, Tensor],
    taken: tuple[str, ...] = (),
) -> None:
    """Give the head its tensors in the types they are stored in.

    Modules `taken` from the target keep theirs. Raises `CheckpointError` unless every
    other weight has a tensor of finite floats of its shape, and every tensor a weight.
    """
    source = files.source
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
            first = files.name_of(sorted(names)[0], tensors)
            raise CheckpointError(
                f"{source} {fact} weight {printable(repr(first), 100)}{more}; give a "
                "head that is complete and of a known layout"
            )
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{files.name_of(name, tensors)} of {source} is {list(tensor.shape)}, "
                f"but its config and the target need {list(wanted[name].shape)}; give "
                "the head of this target"
            )
        _check_numbers(source, files.name_of(name, tensors), tensor)
    # A module that is filled must not lose what it shares with the target.
    head.load_state_dict(given, strict=False, assign=True)


def _check_numbers(source: str, name: str, tensor: Tensor) -> None:
    """Raise `CheckpointError` for weights that are no floats, or not finite."""
    if tensor.dtype not in _FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name} of {source} is {kind}; the weights of heads are read as float32, "
            "float16 or bfloat16"
        )
    if not tensor.isfinite().all():
        raise CheckpointError(
            f"{name} of {source} has a NaN or an infinite number; fetch it again, or "
            "train the head again"
        )


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
