"""Recognizes a published head and loads it for a target."""

import contextlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.initialization import no_init_weights

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import as_checkpoint_error
from jetdraft.checkpoints.heads.draft_module import DraftModule
from jetdraft.checkpoints.heads.head_files import HeadFiles, Tensors
from jetdraft.checkpoints.parameters import convert_while_running
from jetdraft.errors import CheckpointError, UnsupportedModelError, printable
from jetdraft.runtime.planning.registry import load_object, methods

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def drafter_classes() -> list[type[DraftModule]]:
    """Return the `DraftModule` classes of all registered methods."""
    names = [name for method in methods().values() for name in method.module]
    return [load_object(name) for name in names]


def load_head(
    source: str | HeadFiles, target: Checkpoint, dtype: torch.dtype
) -> DraftModule:
    """Load a head from a folder or hub id in `dtype`; raises `CheckpointError`.

    head = load_head("AngelSlim/Qwen3-1.7B_eagle3", target, torch.float32)
    """
    files = HeadFiles.read(source) if isinstance(source, str) else source
    with as_checkpoint_error(files.source), no_init_weights():
        kind = find_drafter_class(files, target.source)
        if target.reads_source and not kind.reads.source:
            raise UnsupportedModelError(
                f"{target.source} is an encoder-decoder, and a head for it is a "
                "drafter of `jetdraft train block`; give one, or a checkpoint with "
                "--drafter"
            )
        tensors = kind.rename_tensors(files)
        config, ids = kind.configure(files, target, tensors)
        head = kind(config, target.model)
        head.ids = ids
        head.make_own_matrices(files.source, tensors)
        _load_tensors(files, head, tensors, head.target_weight_prefixes(target))
        head.after_loading()
    fusion = [w for part in head.fusion_modules().values() for w in part.parameters()]
    for weight in fusion:
        weight.data = weight.data.float()
    # The target's own modules run in their type already.
    others = {id(weight) for weight in (*fusion, *target.model.parameters())}
    convert_while_running(head, dtype, others)
    return head.requires_grad_(False).eval()


def check_head(files: HeadFiles, target: str) -> None:
    """Raise `CheckpointError` for files without a head, before the target is loaded."""
    with as_checkpoint_error(files.source):
        find_drafter_class(files, target).check(files)


def has_own_head(target: str | Path) -> bool:
    """Whether a target's folder holds a head too; a hub id may, and its files tell."""
    if not os.path.exists(target):
        return True
    names: set[str] = set()
    with contextlib.suppress(OSError, ValueError, SafetensorError):
        for file in Path(target).glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                names |= {*opened.keys()}
    files = HeadFiles(str(target), {}, dict.fromkeys(names, torch.empty(0)))
    own = (kind for kind in drafter_classes() if kind.in_target)
    return any(kind.recognizes(files) for kind in own)


def find_drafter_class(files: HeadFiles, target: str) -> type[DraftModule]:
    """Return the class that reads these files; raises `CheckpointError`."""
    name, known = files.config.get("speculators_model_type"), drafter_classes()
    speculators = [name for kind in known for name in kind.speculators]
    if name not in (None, *speculators):
        raise CheckpointError(
            f"{files.source} is a {printable(repr(name), 60)} drafter of speculators, "
            f"from which jetdraft reads {', '.join(speculators)}; an MTP module is "
            "read from the folder of its target"
        )
    # Kinds without a mark of their own come last.
    for kind in sorted(known, key=lambda kind: kind.recognized_last):
        if kind.recognizes(files):
            return kind
    raise CheckpointError(_no_head_message(files, target))


def _no_head_message(files: HeadFiles, target: str) -> str:
    source = files.source
    both_exist = os.path.exists(target) and os.path.exists(source)
    if source == target or (both_exist and os.path.samefile(source, target)):
        return (
            f"{source} has no MTP module that jetdraft knows, so it is no head of "
            "itself; export without the head"
        )
    if files.is_model:
        return f"{source} is a whole model, not a head; give it as --drafter"
    if files.has_tensor(r".*\.kv_a_proj_with_mqa\..*"):
        return (
            f"{source} is a head with latent attention (MLA), which jetdraft does not "
            "export yet; give a head that attends as Llama does"
        )
    published = [kind.published for kind in drafter_classes() if kind.published]
    fact = f"{source} holds no head that jetdraft knows"
    return f"{fact}; it reads heads of {', '.join(published)}"


def _load_tensors(
    files: HeadFiles, head: DraftModule, tensors: Tensors, taken: tuple[str, ...]
) -> None:
    """Check and load a head's tensors; names that begin as in `taken` are skipped."""
    source, state = files.source, head.state_dict()
    wanted = {n: w for n, w in state.items() if not n.startswith(taken or ("\0",))}
    given = {n: t for n, t in tensors.items() if not n.startswith(taken or ("\0",))}
    for fact, a, b in (("lacks", wanted, given), ("has the unknown", given, wanted)):
        if names := sorted(a.keys() - b.keys()):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            first = files.stored_name(names[0], tensors)
            lacking = f"{fact} weight {printable(repr(first), 100)}{more}"
            fix = "give a head that is complete and of a known layout"
            raise files.refusal(lacking, fix)
    for name, tensor in given.items():
        stored, shape = files.stored_name(name, tensors), wanted[name].shape
        if tensor.shape != shape:
            raise CheckpointError(
                f"{stored} of {source} is {list(tensor.shape)}, but its config and the "
                f"target need {list(shape)}; give the head of this target"
            )
        if tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            fact = f"{stored} of {source} is {kind}; the weights of heads are read"
            raise CheckpointError(f"{fact} as float32, float16 or bfloat16")
        if not tensor.isfinite().all():
            fact = f"{stored} of {source} has a NaN or an infinite number"
            raise CheckpointError(f"{fact}; fetch it again, or train the head again")
    # A module that is filled must not lose what it shares with the target.
    head.load_state_dict(given, strict=False, assign=True)
