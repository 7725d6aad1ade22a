"""How a GliDe drafter is trained: `jetdraft train glide`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.contracts.tensors import HIDDEN
from jetdraft.errors import UnsupportedModelError
from jetdraft.methods.glide.module import Glide
from jetdraft.train.data import Batch
from jetdraft.train.heads import LayerTask
from jetdraft.train.machine import precision
from jetdraft.train.task import Run
from jetdraft.train.teacher import Lesson


@dataclass(frozen=True)
class GlideLesson(Lesson):
    """A lesson with the target's `keys` and `values` [b, kv_heads, T, d], rotated."""

    keys: Tensor
    values: Tensor


class GlideTask(LayerTask):
    """Trains a layer that reads the keys and values of the target's last layer."""

    help = "Train a layer that drafts for TARGET from its keys and values."
    product = "a GliDe drafter"
    drafter_class = Glide

    def target_lesson(self, run: Run, batch: Batch) -> GlideLesson:
        """Run the target; the last layer with keys gives the lesson's."""
        with torch.no_grad(), precision(batch.ids.device):
            outputs = run.teacher(input_ids=batch.ids, use_cache=True)
        layers = outputs.past_key_values.layers[: len(decoder_layers(run.teacher))]
        # A layer with a recurrent state has no keys.
        *_, last = (one for one in layers if getattr(one, "keys", None) is not None)
        if last.keys.shape[2] != batch.ids.shape[1]:
            raise UnsupportedModelError(
                f"{run.target.source} attends in sliding windows, and GliDe reads all "
                "rows of its last layer; train another drafter"
            )
        return GlideLesson(
            *(batch.ids, batch.labels, list[Tensor](), last.keys, outputs.logits),
            *(torch.ones_like(batch.ids, dtype=torch.bool), last.keys, last.values),
        )

    def hidden(self, drafter: Glide, lesson: GlideLesson, starts: Tensor) -> Tensor:
        """Return the states; a row reads the target up to the row before its draft."""
        rows = torch.arange(len(starts), device=starts.device)
        bias = torch.where(rows >= starts[:, None], HIDDEN, 0.0)[None, None]
        read = lesson.keys, lesson.values, bias
        hidden: Tensor = drafter(lesson.ids, rows[None], *read)
        return hidden
