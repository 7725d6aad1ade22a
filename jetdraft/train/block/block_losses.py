"""The loss of drafters of blocks: many blocks of a sequence in one pass.

Behind the rows of a sequence come the rows of its blocks. A block sees itself and the
context before it, as in a draft that starts there, and no other block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.heads.blocks import masked
from jetdraft.train.block.block_places import Blocks
from jetdraft.train.data import IGNORED
from jetdraft.train.head.head_losses import Lesson
from jetdraft.train.taught.chosen_rows import at
from jetdraft.train.taught.place_sums import Sums, sums_of
from jetdraft.train.taught.precision import precision


class BlockObjective(nn.Module):
    """A drafter and its loss, as one module, so that several processes can share it.

    With `of_text` the loss is the cross entropy of the text, else that of the target's
    distribution.

        sums = BlockObjective(drafter)(lesson, blocks)
    """

    def __init__(self, drafter: Any, of_text: bool = False) -> None:
        super().__init__()
        self.drafter: Any = drafter
        self.of_text = of_text

    def forward(self, lesson: Lesson, blocks: Blocks) -> Sums:
        """The sums of a batch."""
        with precision(lesson.ids.device):
            return self._sums(lesson, blocks)

    def _sums(self, lesson: Lesson, blocks: Blocks) -> Sums:
        slots = self.drafter.config.slots
        distance = torch.arange(slots, device=lesson.ids.device)
        places = blocks.anchors[..., None] + 1 + distance  # [b, n, slots]
        inside = places < lesson.ids.shape[1]
        places = places.clamp(max=lesson.ids.shape[1] - 1)
        open_places = inside & (at(lesson.labels, places) != IGNORED)
        open_places = open_places & blocks.is_real[..., None]
        is_known = self.known(lesson, blocks, places, open_places)
        learned = open_places & ~is_known
        logits = self.logits(lesson, blocks, places, is_known, learned)
        teacher = at(lesson.logits, places - 1)[learned].float()
        tokens = at(lesson.ids, places)[learned]
        scores = logits.float().log_softmax(-1)
        if self.of_text:
            lost = -scores.gather(-1, tokens[:, None])[:, 0]
        else:
            lost = -(teacher.softmax(-1) * scores).sum(-1)
        right = scores.argmax(-1) == teacher.argmax(-1)
        far = (distance - blocks.known[..., None])[learned]
        return sums_of(lost, right, far, learned)

    def known(
        self, lesson: Lesson, blocks: Blocks, places: Tensor, open_places: Tensor
    ) -> Tensor:
        """Whether the token of a place in a block is told, bool [b, n, slots].

        `places` int64 [b, n, slots] are those of the guesses; those that are open can
        be learned.
        """
        slots = torch.arange(self.drafter.config.slots, device=places.device)
        return slots < blocks.known[..., None]

    def logits(
        self,
        lesson: Lesson,
        blocks: Blocks,
        places: Tensor,
        is_known: Tensor,
        learned: Tensor,
    ) -> Tensor:
        """The logits [k, vocabulary] of the learned guesses."""
        drafter, ids = self.drafter, lesson.ids
        count, sequences = ids.shape[1], len(ids)
        block = at(ids, places).masked_fill(~is_known, drafter.config.vocab_size)
        first = blocks.anchors
        if not drafter.reads_text:
            block = torch.cat([at(ids, blocks.anchors)[..., None], block], dim=-1)
            first = first - 1
        size = drafter.block_rows
        own = first[..., None] + 1 + torch.arange(size, device=ids.device)
        rows = torch.arange(count, device=ids.device).expand(sequences, -1)
        states = drafter(
            ids if drafter.reads_text else drafter.fuse(lesson.taps),
            block.flatten(1),
            torch.cat([rows, own.flatten(1)], dim=1),
            masked(block_mask(first, size, count, drafter.reads_text)),
        )
        states = states[:, -own[0].numel() :].unflatten(1, own.shape[1:])
        logits: Tensor = drafter.lm_head(drafter.guessed(states)[learned])
        return logits


def block_mask(last: Tensor, size: int, count: int, context_asks: bool) -> Tensor:
    """What rows see: bool [b, 1, q, count + n * size], for `count` rows of context.

    `last` int64 [b, n] is the last row of the context of each block. The rows with
    queries are the blocks', and before them the context's if it asks.
    """
    blocks = last.shape[1]
    rows = torch.arange(count, device=last.device)
    seen = (rows <= last[..., None]).repeat_interleave(size, dim=1)
    one = torch.eye(blocks, dtype=torch.bool, device=last.device)
    own = one.repeat_interleave(size, 0).repeat_interleave(size, 1)
    mask = torch.cat([seen, own.expand(len(last), -1, -1)], dim=2)
    if context_asks:
        causal = torch.ones(count, mask.shape[2], dtype=torch.bool, device=last.device)
        causal = causal.tril()
        causal[:, count:] = False
        mask = torch.cat([causal.expand(len(last), -1, -1), mask], dim=1)
    return mask[:, None]


def total(sums: Sums, places: Tensor) -> Tensor:
    """The loss to minimise; `places` are those of all processes, [slots].

    The weight falls with the distance, to a third at half of the block: a token counts
    only if all before it are right.
    """
    slots = len(places)
    weights = torch.exp(-2 * torch.arange(slots, device=places.device) / (slots + 1))
    return (weights * sums.lost / places.clamp(min=1)).sum()
