"""Recognizes a published head and loads it for a target."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.initialization import no_init_weights

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import as_checkpoint_error
from jetdraft.checkpoints.heads.draft_module import DraftModule
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.parameters import run_in
from jetdraft.errors import CheckpointError, UnsupportedModelError, printable
from jetdraft.runtime.planning.registry import load_object, methods

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def kinds() -> list[type[DraftModule]]:
    """The drafters of all methods."""
    names = [name for method in methods().values() for name in method.module]
    return [load_object(name) for name in names]


def load_head(
    source: str | HeadFiles, target: Checkpoint, dtype: torch.dtype
) -> DraftModule:
    """The head in a folder or a hub repository, which computes in `dtype`.

    Its weights keep the type they are stored in, the fusion's are float32. MTP is in
    the target's own folder. Raises `CheckpointError`.

        head = load_head("AngelSlim/Qwen3-1.7B_eagle3", target, torch.float32)
    """
    files = HeadFiles.read(source) if isinstance(source, str) else source
    with as_checkpoint_error(files.source), no_init_weights():
        kind = kind_of(files, target.source)
        if target.reads_source and not kind.reads.source:
            raise UnsupportedModelError(
                f"{target.source} is an encoder-decoder, and a head for it is a "
                "drafter of `jetdraft train block`; give one, or a checkpoint with "
                "--drafter"
            )
        tensors = kind.named(files)
        config, ids = kind.configure(files, target, tensors)
        head = kind(config, target.model)
        head.ids = ids
        head.adopt(files.source, tensors)
        _fill(files, head, tensors, head.borrowed(target))
        head.filled()
    fusion = [w for part in head.fusion().values() for w in part.parameters()]
    for weight in fusion:
        weight.data = weight.data.float()
    # The target's own modules run in their type already.
    others = {id(weight) for weight in (*fusion, *target.model.parameters())}
    run_in(head, dtype, others)
    return head.requires_grad_(False).eval()


def check_head(files: HeadFiles, target: str) -> None:
    """Raise `CheckpointError` for files without a head, or with a wrong config.

    Only the name of the target is needed, so this comes before the target is loaded.
    """
    with as_checkpoint_error(files.source):
        kind_of(files, target).check(files)


def kind_of(files: HeadFiles, target: str) -> type[DraftModule]:
    """The kind of the head in the files; raises `CheckpointError`."""
    name, known = files.config.get("speculators_model_type"), kinds()
    speculators = [kind.speculators for kind in known if kind.speculators]
    if name not in (None, *speculators):
        raise CheckpointError(
            f"{files.source} is a {printable(repr(name), 60)} drafter of speculators, "
            f"from which jetdraft reads {' and '.join(speculators)}; an MTP module is "
            "read from the folder of its target"
        )
    # Kinds without a mark of their own come last.
    for kind in sorted(known, key=lambda kind: kind.by_form):
        if kind.recognizes(files):
            return kind
    raise CheckpointError(_refusal(files, target))


def _refusal(files: HeadFiles, target: str) -> str:
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
    if files.is_model:
        return f"{source} is a whole model, not a head; give it as --drafter"
    published = [kind.published for kind in kinds() if kind.published]
    return (
        f"{source} holds no head that jetdraft knows; it reads heads of "
        f"{', '.join(published)}"
    )


def _fill(
    files: HeadFiles,
    head: DraftModule,
    tensors: Mapping[str, Tensor],
    taken: tuple[str, ...],
) -> None:
    """Give the head its tensors, but the target's where modules are `taken` from it.

    Raises `CheckpointError` unless tensors and weights agree in names and shapes.
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
