"""New heads for a target: their sizes, their layouts, and what they learn by place."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.draft_module import DraftModule
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.checkpoints.layers import final_norm, head_size
from jetdraft.options import setting
from jetdraft.train import task, teacher
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.teacher import Lesson, make_lesson, shift_rows

ConfigT = TypeVar("ConfigT", bound=HeadConfig)


def make_config(
    target: Checkpoint, kind: type[ConfigT], inner: int = 0, **changes: Any
) -> ConfigT:
    """Make a `kind` of the target's sizes; `inner` is the MLP's width, 0: its own."""
    text = target.model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    theta = float(rope.get("rope_theta", 10000.0))
    config = HeadConfig.beside(
        target,
        text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_size(text),
        intermediate_size=inner or text.intermediate_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        # Without the target's scaling: a head reads few rows back.
        rope={"rope_type": "default", "rope_theta": theta},
        max_positions=text.max_position_embeddings,
    )
    return kind(**{**vars(config), **changes})


def stored_tensors(
    weights: Mapping[str, Tensor],
    in_float16: bool,
    rename: Callable[[str], str] = lambda name: name.removeprefix("stack."),
) -> tuple[str, dict[str, Tensor]]:
    """Return float16 or float32 by its name, and renamed weights in this type."""
    dtype = torch.float16 if in_float16 else torch.float32
    tensors = {rename(n): w.to(dtype).contiguous() for n, w in weights.items()}
    return str(dtype).removeprefix("torch."), tensors


def layer_contents(
    config: HeadConfig, weights: Mapping[str, Tensor], half: bool, **fields: Any
) -> task.Contents:
    """Return a config.json with a head's layers and `fields`, and its tensors."""
    dtype, tensors = stored_tensors(weights, half)
    plain = {"torch_dtype": dtype, "tie_word_embeddings": False}
    rope = {"rope_theta": config.rope["rope_theta"], "rope_scaling": None}
    return config.fields | rope | plain | fields, tensors


def copy_weights(module: nn.Module, other: nn.Module) -> None:
    """Copy into `module` the weights that `other` has under the same name and shape."""
    theirs = dict(other.named_parameters())
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name in theirs and theirs[name].shape == weight.shape:
                weight.copy_(theirs[name])


def copy_norm(norm: nn.Module, other: nn.Module, width: int) -> None:
    """Copy the weights of `other`, unless `norm` would then compute something else."""
    before = {name: weight.clone() for name, weight in norm.state_dict().items()}
    copy_weights(norm, other)
    probe = torch.randn(1, width)
    device = next((weight.device for weight in other.parameters()), probe.device)
    with torch.no_grad():
        theirs = other(probe.to(device)).cpu()
        if not torch.allclose(norm(probe), theirs, atol=1e-4):
            norm.load_state_dict(before)


# The weight of step i is DECAY to the power i (EAGLE-3, 3.2; Medusa, 2.2.1).
DECAY = 0.8


@dataclass(frozen=True)
class HeadSettings(task.DrafterSettings):
    """Settings of heads that are unrolled over the steps of a draft.

    unrolled: Steps of a draft that are trained: the tokens it has.
    cache: Keep the target's states in this folder.
    """

    unrolled: int = setting(7, allowed=(1, 32))
    cache: Path | None = setting(None, unset="compute them in each step")


def unroll(
    head: Any, ids: Tensor, features: Tensor, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a head for some steps of a draft, which begins in every row of a text.

    `ids` int64 [b, T] are texts, `features` [b, T, w] the target's. Yields each step's
    states for the LM head and carried states, [b, T, h] both. In step i row t reads
    token t + 1 + i, and after step 0 what the step before carried.
    """
    count, cache = ids.shape[1], DynamicCache()
    positions = torch.arange(count, device=features.device)
    for step in range(steps):
        hidden, features = head(
            shift_rows(ids, 1 + step),
            features,
            (positions + step)[None],
            cache,
            unrolled_mask(count, step, features),
        )
        yield hidden, features


def unrolled_mask(count: int, step: int, like: Tensor) -> Tensor:
    """The additive mask [1, 1, count, (step + 1) * count] of draft step `step`.

    Of the first `count` columns, which have the target's features, row t sees 0 to t;
    of each later step's columns it sees column t: its own draft so far.
    """
    own = torch.eye(count, dtype=torch.bool, device=like.device)
    visible = torch.cat([torch.ones_like(own).tril(), *([own] * step)], dim=1)
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill(~visible, torch.finfo(like.dtype).min)[None, None]


def decayed_means(sums: task.Sums, places: Tensor) -> Tensor:
    """Return the mean loss of each place i, times `DECAY` to the power i: [places]."""
    weights = DECAY ** torch.arange(len(sums.losses), device=sums.losses.device)
    return weights * sums.losses / places.clamp(min=1)


class HeadTask(task.Task):
    """A head of EAGLE or Medusa: in step i row t predicts token t + 2 + i."""

    config: Any
    taps: tuple[int, ...] = ()
    ids: Tensor | None = None  # The draft vocabulary, ascending; None for all tokens.
    _cache: teacher.TensorCache | None = None

    def shortest_sequence(self) -> tuple[int, str]:
        """Return the steps of a draft, and two more: a row before, a token after."""
        return self.settings.unrolled + 2, f"{self.settings.unrolled} steps"

    def lesson(self, run: task.Run, batch: Batch, learns: bool) -> tuple[Any, ...]:
        folder = self.settings.cache
        if self._cache is None and folder is not None:
            owner = f"{run.base} {list(self.taps)}", run.accelerator.process_index
            self._cache = teacher.TensorCache(folder, *owner)
        return (make_lesson(run.teacher, batch, self.taps, self.ids, self._cache),)

    @abstractmethod
    def predictions(
        self, drafter: Any, lesson: Lesson, learns: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each step carried states [b, T, h] and logits [b, T, n]."""

    def losses(self, step: int, state: Tensor, scores: Tensor, lesson: Any) -> Tensor:
        """Return the cross entropy [b, T] to the target; `scores` are log softmax."""
        wanted = shift_rows(lesson.logits, 1 + step).float()
        return -(wanted.softmax(-1) * scores).sum(-1)

    def sums(self, drafter: Any, lesson: Lesson, learns: bool) -> task.Sums:
        """Return the sums by step, over the tokens of a batch that are learned."""
        parts = []
        predictions = self.predictions(drafter, lesson, learns)
        for step, (carried, logits) in enumerate(predictions):
            best = shift_rows(lesson.logits, 1 + step).argmax(-1)
            learned = shift_rows(lesson.labels, 2 + step, IGNORED) != IGNORED
            learned = learned & shift_rows(lesson.known, 1 + step, False)
            losses = self.losses(step, carried, logits.float().log_softmax(-1), lesson)
            losses = torch.where(learned, losses, 0.0).sum()
            right = ((logits.argmax(-1) == best) & learned).sum().float()
            parts.append((losses, learned.sum().float(), right))
        return task.Sums(*(torch.stack(sums) for sums in zip(*parts, strict=True)))

    def total(self, sums: task.Sums, places: Tensor) -> Tensor:
        """Return the sum of the steps' mean losses; later steps weigh less."""
        return decayed_means(sums, places).sum()

    def figures(self, run: task.Run, parts: Sequence[Any]) -> dict[str, Any]:
        """Return losses and shares of right tokens by step; writes the cache."""
        if self._cache is not None:
            self._cache.flush()
        return super().figures(run, parts)

    def settings_of_run(self, run: task.Run) -> dict[str, Any]:
        own = super().settings_of_run(run) | {"taps": list(self.taps)}
        del own["cache"]  # the folder may move
        return own


DRAFT_ROWS = 5  # Rows of a draft, as in GliDe's training.


@dataclass(frozen=True)
class LayerSettings(task.DrafterSettings):
    """Settings of drafters with a layer of the target's kind."""

    inner: int = setting(
        0, "Width inside the MLP of the drafter.", (0, 10**6), unset="the target's"
    )


class NextTokenTask(task.Task):
    """A drafter whose row t predicts token t + 1, as the target does.

    Sequences are cut into drafts of `DRAFT_ROWS` rows: later rows may know less.
    """

    drafter_class: type[DraftModule]
    config: HeadConfig

    def shortest_sequence(self) -> tuple[int, str]:
        return 2 * DRAFT_ROWS, f"drafts of {DRAFT_ROWS}"

    @abstractmethod
    def new_config(self, target: Checkpoint) -> HeadConfig:
        """Make the config of the drafter; raises `OptionError`."""

    def hidden(self, drafter: Any, lesson: Any, starts: Tensor) -> Tensor:
        """Return states [b, T, h] for the LM head; row t's draft is at `starts[t]`."""
        raise NotImplementedError

    def sums(self, drafter: Any, lesson: Any, first: int, learns: bool) -> task.Sums:
        """Return sums of cross entropies to the target, by the place in a draft."""
        rows = torch.arange(lesson.ids.shape[1], device=lesson.ids.device)
        starts = rows - (rows - first) % DRAFT_ROWS
        hidden = self.hidden(drafter, lesson, starts)
        learned = torch.zeros_like(lesson.labels, dtype=torch.bool)
        learned[:, :-1] = lesson.labels[:, 1:] != IGNORED
        learned &= starts > 0  # no draft begins before the text
        scores = drafter.lm_head(hidden[learned]).float().log_softmax(-1)
        wanted = lesson.logits[learned].float()
        losses = -(wanted.softmax(-1) * scores).sum(-1)
        right = scores.argmax(-1) == wanted.argmax(-1)
        return sums_by_place(losses, right, learned, DRAFT_ROWS - first)

    def check(self, run: task.Run) -> None:
        self.config = self.new_config(run.target)

    def new_drafter(self, run: task.Run) -> Any:
        """Make a drafter; its last norm, if it has one, begins as the target's."""
        model = run.target.model
        drafter: Any = self.drafter_class(self.config, model)
        if hasattr(drafter, "norm"):
            copy_norm(drafter.norm, final_norm(model), self.config.hidden_size)
        return drafter

    def lesson(self, run: task.Run, batch: Batch, learns: bool) -> tuple[Any, ...]:
        """Return the target's lesson, and the first draft's row, random in training."""
        first = 1
        if learns:
            draw = torch.Generator().manual_seed(run.seed_of_step)
            first = int(torch.randint(1, DRAFT_ROWS + 1, (1,), generator=draw))
        return self.target_lesson(run, batch), first

    def target_lesson(self, run: task.Run, batch: Batch) -> Any:
        """Make the lesson of a batch, with the target's states at the config's taps."""
        return make_lesson(run.teacher, batch, self.config.taps)

    def own_fields(self) -> dict[str, Any]:
        """Return the fields of config.json that only this kind of drafter has."""
        return {"architectures": [self.drafter_class.architecture]}

    def settings_of_run(self, run: task.Run) -> dict[str, Any]:
        return asdict(self.settings) | self.own_fields() | {"target": run.base}

    def contents(
        self, run: task.Run, weights: task.Tensors, figures: Any
    ) -> task.Contents:
        """Return a Llama config and weights, under the names of transformers."""
        own = {"model_type": "llama"} | self.own_fields()
        return layer_contents(self.config, weights, self.settings.half, **own)


class LayerTask(NextTokenTask):
    """A drafter of one layer with the target's sizes."""

    Settings = LayerSettings

    def new_config(self, target: Checkpoint) -> HeadConfig:
        return make_config(target, HeadConfig, self.settings.inner)


def sums_by_place(
    losses: Tensor, right: Tensor, learned: Tensor, start: int, size: int = DRAFT_ROWS
) -> task.Sums:
    """Sum losses and right guesses of `learned` rows, bool [b, T], by place in drafts.

    Row t is at place (`start` + t) % `size`.
    """
    behind = -(start + learned.shape[1]) % size
    drafts = F.pad(learned, (start, behind)).view(len(learned), -1, size)
    places = torch.arange(size, device=drafts.device).expand(drafts.shape)
    return task.Sums.of(losses, right, places[drafts], drafts)
