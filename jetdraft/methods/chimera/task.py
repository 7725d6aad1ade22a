"""How a Chimera drafter is trained: `jetdraft train chimera`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints.attention import Attention
from jetdraft.methods.chimera.module import ROW_TOKENS, Chimera
from jetdraft.train.heads import DRAFT_ROWS, LayerTask
from jetdraft.train.task import Run
from jetdraft.train.teacher import Lesson


class ChimeraTask(LayerTask):
    """A trigram encoder and a layer over the target's states."""

    help = "Train a layer that drafts for TARGET from three tokens and its states."
    product = "a Chimera drafter"
    drafter_class = Chimera

    def new_drafter(self, run: Run) -> Chimera:
        """Make a drafter that ignores earlier tokens and passes surrogates on."""
        drafter: Chimera = super().new_drafter(run)
        for matrix in (drafter.trigram["down"].weight, drafter.out.weight):
            assert isinstance(matrix, Tensor)
            nn.init.zeros_(matrix)
            nn.init.eye_(matrix[:, -self.config.hidden_size :])
        return drafter

    def hidden(self, drafter: Chimera, lesson: Lesson, starts: Tensor) -> Tensor:
        """Return the states of all rows [b, T, h]; zeros before the first draft."""
        (features,) = lesson.taps
        count = features.shape[1]
        rows = torch.arange(count, device=features.device)
        firsts = rows[(rows > 0) & (rows == starts)]
        trigrams = F.pad(lesson.ids, (ROW_TOKENS - 1, 0)).unfold(1, ROW_TOKENS, 1)
        keys_values = drafter.keys_values(features, rows[None])
        seen = SeenRows(*keys_values, rows < firsts[:, None])
        state, parts = features[:, firsts - 1], []
        for place in range(DRAFT_ROWS):
            at = (firsts + place).clamp(max=count - 1)
            read = state, (at - 1)[None], seen.attention_at(place)
            hidden, state = drafter(trigrams[:, at], *read)
            parts.append(hidden)
        behind = torch.stack(parts, dim=2).flatten(1, 2)
        first = int(firsts[0])
        return F.pad(behind[:, : count - first], (0, 0, first, 0))


class SeenRows:
    """The keys and values [b, kv_heads, T, head_dim] of a text, and the d drafts' own.

    `known` bool [d, T] says which rows of the text a draft sees.
    """

    def __init__(self, keys: Tensor, values: Tensor, known: Tensor) -> None:
        self.keys, self.values, self.known = keys, values, known
        self._own: list[tuple[Tensor, Tensor]] = []

    def attention_at(self, place: int) -> Attention:
        """Return the attention of row `place` in all drafts; a call adds its keys."""

        def attention(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if place:  # the first row's own feature is the last that is known
                self._own.append((key, value))
            by_group: Any = query * module.scaling
            query = by_group.unflatten(1, (key.shape[1], -1))
            far = query @ self.keys[:, :, None].transpose(-1, -2)
            far = far.masked_fill(~self.known, -torch.inf)
            near = [(query * k[:, :, None]).sum(-1, keepdim=True) for k, _ in self._own]
            weights = torch.cat([far, *near], dim=-1).float().softmax(-1).to(far.dtype)
            mixed = weights[..., : far.shape[-1]] @ self.values[:, :, None]
            for index, (_, v) in enumerate(self._own, far.shape[-1]):
                mixed = mixed + weights[..., index, None] * v[:, :, None]
            return mixed.flatten(1, 2).transpose(1, 2)

        return attention
