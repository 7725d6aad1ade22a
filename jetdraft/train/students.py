"""A bundle's drafter as it learns from use: its weights in floats, and its loss."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from jetdraft.bundle import DRAFTER, Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.checkpoints.parameters import store_weights_in
from jetdraft.errors import CheckpointError, as_error
from jetdraft.export import drafters
from jetdraft.export.draft_vocab import cut_head
from jetdraft.learning.lessons import Lesson
from jetdraft.methods.eagle.module import Eagle
from jetdraft.train.heads import unroll
from jetdraft.train.teacher import load_target, logits_at, states_at

UNROLLED_STEPS = 4  # A wrong place counts once in each step of a draft.


@dataclass(frozen=True)
class LessonBatch:
    """Some lessons: `tokens` int64 [b, T], padded on the right.

    Lesson `rows[i]` has a wrong token at `places[i]`, int64 [w] both; the row before
    predicts it. The target's candidates there are `ids` int64 [w, k] with `logits`
    float32 [w, k], filled up with minus infinity.
    """

    tokens: Tensor
    rows: Tensor
    places: Tensor
    ids: Tensor
    logits: Tensor

    @classmethod
    def of(cls, lessons: Sequence[Lesson]) -> "LessonBatch":
        """Join at least one lesson to a batch."""
        widest = max(lesson.ids.shape[1] for lesson in lessons)

        def widened(arrays: Iterable[Any], fill: float) -> Tensor:
            parts = (torch.tensor(array) for array in arrays)
            padded = [F.pad(p, (0, widest - p.shape[1]), value=fill) for p in parts]
            return torch.cat(padded)

        return cls(
            pad_sequence([torch.tensor(o.tokens) for o in lessons], batch_first=True),
            torch.arange(len(lessons)).repeat_interleave(
                torch.tensor([len(lesson.places) for lesson in lessons])
            ),
            torch.cat([torch.tensor(lesson.places) for lesson in lessons]),
            widened((lesson.ids for lesson in lessons), 0),
            widened((lesson.logits for lesson in lessons), -torch.inf),
        )

    def select(self, chosen: Tensor) -> "LessonBatch":
        """Return the batch with the wrong places where `chosen` bool [w] is true."""
        parts = (self.rows, self.places, self.ids, self.logits)
        return LessonBatch(self.tokens, *(part[chosen] for part in parts))


@dataclass(frozen=True)
class Missed:
    """Mean cross entropy, and the share of `right` tokens, at `places` wrong places."""

    loss: Tensor
    right: float
    places: int


def compare_missed(logits: Tensor, batch: LessonBatch, known: Tensor | None) -> Missed:
    """Compare a drafter's logits float [w, tokens] at wrong places with the target.

    Both distributions are within `known` bool [vocabulary], None for all; a place
    without such tokens does not count. A drafter may lack the target's last tokens.
    """
    ours, wanted = logits.float(), batch.logits
    if known is not None:
        ours = F.pad(ours, (0, len(known) - ours.shape[-1]))
        ours = ours.masked_fill(~known, -torch.inf)
        wanted = wanted.masked_fill(~known[batch.ids], -torch.inf)
    counts = wanted.isfinite().any(-1)
    ours, wanted, ids = ours[counts], wanted[counts], batch.ids[counts]
    scores = ours.log_softmax(-1).gather(-1, ids)
    # What has no probability must not be multiplied with minus infinity.
    scores = scores.where(wanted.isfinite(), 0.0)
    places = max(1, len(ids))
    loss = -(wanted.softmax(-1) * scores).sum() / places
    best = batch.ids.gather(-1, batch.logits.argmax(-1, keepdim=True))[counts, 0]
    agreed = (ours.detach().argmax(-1) == best).float()
    return Missed(loss, agreed.sum().item() / places, len(ids))


def join_missed(parts: Sequence[Missed]) -> Missed:
    """Return the figures over all places of some batches."""
    places = sum(part.places for part in parts)
    total = sum((part.places * part.loss for part in parts), torch.zeros(()))
    right = sum(part.places * part.right for part in parts)
    return Missed(total / max(1, places), right / max(1, places), places)


class Student(ABC):
    """A bundle's drafter that can be trained; `source` is its checkpoint in floats."""

    def __init__(self, bundle: Bundle, source: str) -> None:
        self.bundle, self.source = bundle, source
        contract, ids = bundle.graphs[DRAFTER].contract, bundle.draft_vocabulary()
        self.dtype = getattr(torch, contract.dtype)
        known, size = contract.vocab_size, bundle.target.contract.vocab_size
        can_draft = None
        if ids is not None or known != size:
            can_draft = torch.zeros(size).bool()
            can_draft[slice(known) if ids is None else torch.from_numpy(ids)] = True
        self.can_draft = can_draft
        """The tokens that it can draft, bool [vocabulary]; None for all."""

    @abstractmethod
    def load(self, weights: Mapping[str, Tensor]) -> Any:
        """Load the drafter, replacing `weights` by name; raises `CheckpointError`."""

    @abstractmethod
    def layers(self, model: Any) -> Iterable[nn.Module]:
        """Return the layers that get LoRA."""

    @abstractmethod
    def missed(self, model: Any, lessons: Sequence[Lesson]) -> Missed:
        """Return the figures of a loaded drafter at the wrong places of lessons."""

    @abstractmethod
    def arrays(self, weights: Mapping[str, Tensor], text: Tensor) -> drafters.Arrays:
        """Return the bundle's arrays that change; recipes may read `text` int64 [n]."""

    def replace_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Replace weights of a model in place; raises `CheckpointError`."""
        own = dict(model.named_parameters())
        for name, weight in weights.items():
            if name not in own or own[name].shape != weight.shape:
                fact = f"the learned weights do not fit {self.source}"
                raise CheckpointError(f"{fact}; give the checkpoint that was exported")
            own[name].data = weight


class ModelStudent(Student):
    """A drafter that is a model of its own."""

    def __init__(self, bundle: Bundle, source: str) -> None:
        super().__init__(bundle, source)
        drafters.check_trainable(bundle, self._checkpoint())

    def load(self, weights: Mapping[str, Tensor]) -> Any:
        model = self._load_with(weights).model
        model.set_attn_implementation("sdpa")
        return model

    def layers(self, model: Any) -> Iterable[nn.Module]:
        return decoder_layers(model)

    def missed(self, model: Any, lessons: Sequence[Lesson]) -> Missed:
        """Return the figures of the drafter; each wrong place counts once."""
        batch = LessonBatch.of(lessons)
        logits = logits_at(model, batch.tokens, batch.rows, batch.places - 1)
        return compare_missed(logits, batch, self.can_draft)

    def arrays(self, weights: Mapping[str, Tensor], text: Tensor) -> drafters.Arrays:
        return drafters.drafter_arrays(self.bundle, self._load_with(weights), text)

    def _checkpoint(self) -> Checkpoint:
        fact = "cannot read the drafter's checkpoint"
        with as_error(CheckpointError, CheckpointError, fact, "name it with --from"):
            checkpoint = Checkpoint.load(self.source, self.dtype)
        return checkpoint.fit_to_target(self.bundle.target.contract.vocab_size)

    def _load_with(self, weights: Mapping[str, Tensor]) -> Checkpoint:
        checkpoint = self._checkpoint()
        store_weights_in(checkpoint.model, torch.float32)
        self.replace_weights(checkpoint.model, weights)
        return checkpoint


class HeadStudent(Student):
    """A head of EAGLE or MTP; the fusion of its taps is in the target's graph."""

    def __init__(self, bundle: Bundle, source: str, target: str) -> None:
        super().__init__(bundle, source)
        fact = "cannot read the checkpoint of the target, whose states the head reads"
        with as_error(CheckpointError, CheckpointError, fact, "name it with --target"):
            self._target, _ = load_target(target)
        self.load({})

    def load(self, weights: Mapping[str, Tensor]) -> Any:
        head = self._load_head(self._target, torch.float32)
        store_weights_in(head, torch.float32)
        self.replace_weights(head, weights)
        return head

    def layers(self, model: Any) -> Iterable[nn.Module]:
        layers: nn.ModuleList = model.stack.layers
        return layers

    def missed(self, model: Any, lessons: Sequence[Lesson]) -> Missed:
        """Return the figures over draft steps; row t predicts token t + 2 + step."""
        batch = LessonBatch.of(lessons)
        states = states_at(self._target.model, batch.tokens, model.config.taps or (-1,))
        steps = unroll(model, batch.tokens, model.fuse(states), UNROLLED_STEPS)
        parts = []
        for step, (hidden, _) in enumerate(steps):
            rows = batch.places - 2 - step
            chosen = batch.select(rows >= 0)
            logits = model.lm_head(hidden[chosen.rows, rows[rows >= 0]])
            if model.ids is not None:
                size = self.bundle.target.contract.vocab_size
                wide = logits.new_full((len(logits), size), -torch.inf)
                logits = wide.index_copy(1, model.ids, logits)
            parts.append(compare_missed(logits, chosen, self.can_draft))
        return join_missed(parts)

    def arrays(self, weights: Mapping[str, Tensor], text: Tensor) -> drafters.Arrays:
        target = Checkpoint.load(self._target.source, self.dtype)
        head = self._load_head(target, self.dtype)
        self.replace_weights(head, weights)
        return drafters.head_arrays(self.bundle, target, head)

    def _load_head(self, target: Checkpoint, dtype: torch.dtype) -> Eagle:
        """Load the head, cut to the bundle's tokens; raises `CheckpointError`."""
        fact = "cannot read the head"
        with as_error(CheckpointError, CheckpointError, fact, "name it with --from"):
            head = load_head(self.source, target, dtype)
        if not isinstance(head, Eagle):
            fact = f"{self.source} is not a head of EAGLE or MTP"
            raise CheckpointError(f"{fact}; give the head that was exported")
        ids = self.bundle.draft_vocabulary()
        if ids is not None and head.ids is None:
            cut_head(head, torch.from_numpy(ids), dtype)
        return head


def load_student(bundle: Bundle, source: str = "", target: str = "") -> Student:
    """Load a bundle's drafter to train it; a head reads the states of `target`.

    "" is the exported checkpoint. Raises `CheckpointError`, `PairError`, `OptionError`.
    """
    entry = drafters.check_swappable(bundle)
    source = source or entry.source
    if entry.contract.feature_input:
        return HeadStudent(bundle, source, target or bundle.target.source)
    return ModelStudent(bundle, source)
