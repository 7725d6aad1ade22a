"""The loss of prompt tokens, inserted at many places of a sequence.

The target reads a sequence once and says what follows each row. Behind the rows come
the prompt tokens of all places; those of a place see its context, and no other place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.prompts import RANKS, Prompts, PromptSettings
from jetdraft.train.block.block_places import Blocks
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.head.head_losses import DECAY
from jetdraft.train.taught.chosen_rows import at
from jetdraft.train.taught.precision import precision


@dataclass(frozen=True)
class Sums:
    """Sums over the places of each prompt token: `lost` and `places` [gamma].

    `right` [gamma, RANKS] counts the places where the best, the second, ... guess is
    the target's choice.
    """

    lost: Tensor
    places: Tensor
    right: Tensor


class PromptObjective(nn.Module):
    """Prompt tokens and their loss, as one module, so that processes can share it.

    The loss is KL(p || q), p the target's distribution after the true tokens and q that
    of a prompt token (2405.18628, section 3.3).

        sums = PromptObjective(prompts, model)(batch, blocks)
    """

    model: Any

    def __init__(self, prompts: Prompts, model: Any) -> None:
        super().__init__()
        self.prompts = prompts
        # As a submodule, the target would be trained and shared too.
        object.__setattr__(self, "model", model)

    def forward(self, batch: Batch, places: Blocks) -> Sums:
        """The sums of a batch whose prompt tokens follow the rows `places.anchors`."""
        with precision(batch.ids.device):
            teacher, cache = self._read(batch.ids)
            logits = self._guessed(places.anchors, batch.ids.shape[1], cache)
        return _compared(teacher, logits.float(), batch.labels, places)

    @torch.no_grad()
    def _read(self, ids: Tensor) -> tuple[Tensor, Any]:
        """The target's logits [b, T, vocab], and its keys and values."""
        outputs = self.model(input_ids=ids, use_cache=True)
        return outputs.logits, outputs.past_key_values

    def _guessed(self, anchors: Tensor, rows: int, cache: Any) -> Tensor:
        """The logits [b, n, gamma, vocab] of the prompt tokens behind n places."""
        settings, (size, count) = self.prompts.settings, anchors.shape
        if settings.prefix:
            for number, layer in enumerate(cache.layers):
                keys, values = self.prompts.prefix(number)
                layer.keys = _behind(layer.keys, keys)
                layer.values = _behind(layer.values, values)
        distances = torch.arange(1, settings.gamma + 1, device=anchors.device)
        distances = distances.repeat_interleave(settings.members)
        positions = (anchors[..., None] + distances).flatten(1)
        outputs = self.model(
            inputs_embeds=self.prompts.embeddings.repeat(size, count, 1),
            position_ids=positions,
            attention_mask=visible(anchors, rows, settings),
            past_key_values=cache,
            use_cache=True,
        )
        shape = count, settings.gamma, settings.members
        logits: Tensor = outputs.logits.unflatten(1, shape)
        return logits.mean(3)


def _behind(rows: Tensor, prefix: Tensor) -> Tensor:
    """The prefix [1, kv_heads, p, d] behind the rows [b, kv_heads, T, d] of a layer."""
    return torch.cat([rows, prefix.to(rows.dtype).expand(len(rows), -1, -1, -1)], 2)


def visible(anchors: Tensor, rows: int, settings: PromptSettings) -> Tensor:
    """What prompt tokens see: bool [b, 1, n * slots, rows + prefix + n * slots].

    `anchors` int64 [b, n] are the rows that carry them, each with gamma * members slots
    behind it.
    """
    members = settings.members
    slot = torch.arange(settings.gamma * members, device=anchors.device)
    past = torch.arange(rows, device=anchors.device) <= anchors[..., None]
    past = past.repeat_interleave(len(slot), 1)
    below = (slot <= slot[:, None]) & (slot % members == (slot % members)[:, None])
    places = torch.eye(anchors.shape[1], device=anchors.device)
    own = torch.kron(places, below.float()).bool()
    own = torch.nn.functional.pad(own, (settings.prefix, 0), value=True)
    return torch.cat([past, own.expand(len(anchors), -1, -1)], -1)[:, None]


def _compared(teacher: Tensor, logits: Tensor, labels: Tensor, places: Blocks) -> Sums:
    """The losses and the ranks of the right guesses, summed over the places."""
    gamma, length = logits.shape[2], labels.shape[1]
    # The token after the row is the root of the draft; prompt token 1 guesses the next.
    rows = places.anchors[..., None] + torch.arange(1, gamma + 1, device=labels.device)
    wanted = (rows + 1).clamp(max=length - 1)
    learned = (at(labels, wanted) != IGNORED) & (rows + 1 < length)
    learned = learned & places.is_real[..., None]
    p = at(teacher, rows.clamp(max=length - 1)).float().log_softmax(-1)
    lost = (p.exp() * (p - logits.log_softmax(-1))).sum(-1)
    best = logits.detach().topk(min(RANKS, logits.shape[-1]), -1).indices
    right = (best == p.argmax(-1, keepdim=True)) & learned[..., None]
    return Sums(
        torch.where(learned, lost, 0.0).sum((0, 1)),
        learned.sum((0, 1)).float(),
        right.sum((0, 1)).float(),
    )


def total(sums: Sums, places: Tensor) -> Tensor:
    """The loss to minimise; `places` are those of all processes, [gamma]."""
    weights = DECAY ** torch.arange(len(sums.lost), device=sums.lost.device)
    return (weights * sums.lost / places.clamp(min=1)).mean()
