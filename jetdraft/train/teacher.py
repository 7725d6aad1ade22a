"""The target as a teacher: its states and logits for texts, computed or from a disk."""

import hashlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.gguf import is_gguf
from jetdraft.checkpoints.parameters import store_weights_in
from jetdraft.checkpoints.streams import SHARED
from jetdraft.errors import CheckpointError, DataError, OutputError, as_error
from jetdraft.files import check_writable, is_free, write_text
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.machine import precision


def load_target(source: str, learned: str = "heads") -> tuple[Checkpoint, str]:
    """Load a target in float32, and a text to add to the hash of its weights.

    The text identifies a merged LoRA of streams, else "". Raises `CheckpointError`.
    """
    refuse_gguf(source, learned)
    target, tuned = Checkpoint.load(source, torch.float32), ""
    if target.streams is not None and target.streams.mode == SHARED:
        streamed = target.add_probes(1.0)
        target, tuned = (Checkpoint.load(source, torch.float32), f" {streamed.lora_id}")
        target.model.load_state_dict(streamed.model.state_dict(), assign=True)
    store_weights_in(target.model, torch.float32)
    target.model.set_attn_implementation("sdpa")
    return target, tuned


def refuse_gguf(source: str, learned: str) -> None:
    """Raise `CheckpointError` for a GGUF file; `learned` names what is trained."""
    if is_gguf(source):
        fact = f"{source} is a GGUF file, and {learned} are trained for a folder"
        raise CheckpointError(f"{fact}; give the model's Hugging Face folder")


@dataclass(frozen=True)
class Lesson:
    """What a head learns from: a batch, and the target's states and logits for it.

    `ids` and `labels` are int64 [b, T]. `final` [b, T, target hidden] is the state
    after the final norm, `taps` are the states that the head reads. `logits` [b, T,
    draft vocabulary] are the target's; `known` bool [b, T] says if its choice is in it.
    """

    ids: Tensor
    labels: Tensor
    taps: list[Tensor]
    final: Tensor
    logits: Tensor
    known: Tensor


@torch.no_grad()
def make_lesson(
    model: Any,
    batch: Batch,
    taps: Sequence[int] = (),
    ids: Tensor | None = None,
    cache: "TensorCache | None" = None,
) -> Lesson:
    """Run the target on a batch, on the batch's device; returns the lesson.

    `taps` are numbers of layers, `ids` int64 [draft vocabulary] what the head can
    draft, None for all. With a `cache` the target reads each text once; states are
    float16, or float32 where they are too large.
    """
    with precision(batch.ids.device):
        every = (*taps, -1)
        joined = _tap_states(model, batch, every, cache)
        *states, final = joined.chunk(len(every), dim=-1)
        logits = model.get_output_embeddings()(final)
        known = torch.ones_like(batch.ids, dtype=torch.bool)
        if ids is not None:
            ids = ids.to(logits.device)
            known = torch.isin(logits.argmax(-1), ids)
            logits = logits[..., ids]
    taken = list(states) or [final]
    return Lesson(batch.ids, batch.labels, taken, final, logits, known)


def _tap_states(
    model: Any, batch: Batch, taps: Sequence[int], cache: "TensorCache | None"
) -> Tensor:
    """Return the states at the taps, joined to [b, T, s], from the cache or into it."""
    if cache is None:
        return compute_states(model, batch.ids, taps)
    # The last token of a text is learned; what follows is padding.
    ends = [int(row.nonzero()[-1]) + 1 for row in batch.labels != IGNORED]
    texts = [ids[:end] for ids, end in zip(batch.ids, ends, strict=True)]
    known = [cache.read(cache_key(text)) for text in texts]
    if all(row is not None for row in known):
        rows = [row.float() for row in known if row is not None]
        return pad_sequence(rows, batch_first=True).to(batch.ids.device)
    states = compute_states(model, batch.ids, taps)
    for text, row in zip(texts, states.cpu(), strict=True):
        own = row[: len(text)]
        half = own.half()
        cache.write(cache_key(text), half if bool(torch.isfinite(half).all()) else own)
    return states


def compute_states(model: Any, ids: Tensor, taps: Sequence[int]) -> Tensor:
    """Run the target; returns its states at the taps, joined to float32 [b, T, s]."""
    return torch.cat(states_at(model, ids, taps), dim=-1).float()


@torch.no_grad()
def states_at(model: Any, ids: Tensor, taps: Sequence[int]) -> list[Tensor]:
    """Run the target; returns its states [b, T, h] after `taps` layers, -1: normed."""
    wanted = {"output_hidden_states": True, "use_cache": False, "logits_to_keep": 1}
    states = model(input_ids=ids, **wanted).hidden_states
    return [states[tap] for tap in taps]


def cache_key(numbers: Tensor) -> str:
    """Return the key of a text in a cache: 32 hex digits of a hash of `numbers`."""
    return hashlib.sha256(numbers.cpu().numpy().tobytes()).hexdigest()[:32]


def logits_at(model: Any, ids: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """A causal LM's logits [k, vocabulary] after the tokens `ids[rows, places]`."""

    def choose(head: Any, args: tuple[Tensor]) -> Tensor:
        return args[0][rows, places]

    with model.get_output_embeddings().register_forward_pre_hook(choose):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def rows_at(rows: Tensor, places: Tensor) -> Tensor:
    """Return `rows[i, places[i]]` of each sequence i: [b, T, ...] at int64 [b, ...]."""
    sequences = torch.arange(len(rows), device=rows.device)
    return rows[sequences.view(-1, *[1] * (places.ndim - 1)), places]


def shift_rows(rows: Tensor, places: int, fill: float = 0) -> Tensor:
    """Return `rows` [b, T, ...] with row t + `places` in row t; the last are `fill`."""
    moved = torch.full_like(rows, fill)
    moved[:, : max(0, rows.shape[1] - places)] = rows[:, places:]
    return moved


SHARD_TENSORS = 64  # Tensors in a file of the cache.
OWNER_FILE = "owner.txt"  # The file that says what the tensors were computed with.


def check_cache_folder(folder: Path | None) -> None:
    """Raise `OutputError` unless `folder` is None, empty, missing, or a cache."""
    if folder is None:
        return
    try:
        is_cache = (folder / OWNER_FILE).is_file() or is_free(folder)
    except OSError:
        is_cache = False
    if not is_cache:
        fact = f"{folder} is neither an empty folder nor the cache of a training"
        raise OutputError(f"{fact}; choose another folder")
    check_writable(folder / OWNER_FILE)


class TensorCache:
    """Tensors by key in a folder that it creates for `owner`; raises `OutputError`."""

    def __init__(self, folder: Path, owner: str, process: int = 0) -> None:
        self.folder, self.process = folder, process
        self._pending: dict[str, Tensor] = {}
        self._places: dict[str, Path] = {}
        note = folder / OWNER_FILE
        fact = f"cannot write {folder}"
        with as_error(OutputError, OSError, fact, "choose another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            if note.exists() and note.read_text(encoding="utf-8") != owner:
                fact = f"{folder} holds what another target said, or for other taps, "
                fact += "another draft vocabulary or other --cache-tokens"
                raise OutputError(f"{fact}; choose another folder")
            # Whole at once, since other processes of the training read it now.
            write_text(note, owner)
        for file in sorted(folder.glob("states-*.safetensors")):
            with _convert_errors(file), safe_open(file, "pt") as opened:
                self._places |= dict.fromkeys(opened.keys(), file)

    def read(self, key: str) -> Tensor | None:
        """Return the tensor of a key, on the CPU, or None. Raises `DataError`."""
        if key in self._pending:
            return self._pending[key]
        if key not in self._places:
            return None
        file = self._places[key]
        with _convert_errors(file), safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
        return tensor

    def write(self, key: str, tensor: Tensor) -> None:
        """Add a tensor, unless the key has one; writes a file per `SHARD_TENSORS`."""
        if key in self._pending or key in self._places:
            return
        self._pending[key] = tensor.cpu().contiguous()
        if len(self._pending) >= SHARD_TENSORS:
            self.flush()

    def flush(self) -> None:
        """Write the tensors that are in no file yet; raises `OutputError`."""
        if not self._pending:
            return
        # Two trainings may share the folder, and each has a process 0.
        mine = f"states-{self.process}-{os.getpid()}-"
        numbers = (int(f.stem[len(mine) :]) for f in self.folder.glob(f"{mine}*"))
        # Beyond the last, since a shard before it may have been deleted.
        name = f"{mine}{max(numbers, default=-1) + 1:08}.safetensors"
        file, partial = self.folder / name, self.folder / f".{name}.partial"
        fact, fix = f"cannot write {file}", "free some space or choose another folder"
        with as_error(OutputError, (OSError, SafetensorError), fact, fix):
            save_file(self._pending, partial)
            partial.rename(file)
        self._places |= dict.fromkeys(self._pending, file)
        self._pending = {}


def _convert_errors(file: Path) -> AbstractContextManager[None]:
    causes = OSError, SafetensorError
    return as_error(DataError, causes, f"{file} is damaged", "delete it")
