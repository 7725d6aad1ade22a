"""Teaching a head when drafted tokens are accepted (SpecDec++, 2405.19715, 3.3).

Instead of mixing drafted tokens into a text of the target's, real rounds are watched:
each drafted token that was compared gives its drafter's hidden state and the verdict,
which is the chance that is asked for, given that all tokens before it were right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from jetdraft.errors import DataError, MethodError, OutputError
from jetdraft.files import replacing
from jetdraft.runtime.drafts.arrays import Float32s, Int64s
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.graph import Answer
from jetdraft.runtime.proposers import DraftProposer
from jetdraft.runtime.proposers.draft_stops import REPEATED, AcceptanceHead, Stopping

LOOK_EVERY = 10
"""Steps between looks at what was held out."""

REJECTED_WEIGHT = 6.0
"""Of rejected tokens in the loss, since they are few."""

LENGTH = 8
"""Drafted tokens a round while watching."""

LEAST = 50
"""Tokens of both verdicts together that a head needs."""


class Watching(Stopping):
    """Stops nothing, and notes the hidden state that each token is drafted from."""

    name = "watching"
    usual = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Float32s] = []

    def begin(self) -> None:
        """A new draft."""
        self.seen = []

    def stop(self, answer: Answer) -> bool:
        """Never."""
        assert answer.hidden is not None
        self.seen.append(answer.hidden[0].copy())
        return False


def watch(
    model: Model,
    prompts: Sequence[Int64s],
    max_new_tokens: int,
    temperature: float,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Float32s, Float32s]:
    """Hidden states float32 [n, h] of compared tokens, and 1 for those accepted."""
    drafter = model.planner.proposers.get("draft")
    if not isinstance(drafter, DraftProposer):
        raise MethodError("the bundle has no drafter; export one with --drafter")
    if not drafter.graph.contract.hidden_size:
        raise MethodError("the bundle is of an older version; export it again")
    hidden, verdicts = list[Float32s](), list[bool]()
    drafter.stopping = watching = Watching()
    try:
        for prompt in prompts:
            stream = model.stream(
                token_ids=prompt,
                method="draft",
                num_draft_tokens=LENGTH,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
            )
            for piece in stream:
                # The last token of a draft is not asked about: nothing follows it.
                for place, state in enumerate(watching.seen[: piece.from_draft + 1]):
                    hidden.append(state)
                    verdicts.append(place < piece.from_draft)
                watching.seen = []
            tick()
    finally:
        drafter.stopping = None
    if len(verdicts) < LEAST or len(set(verdicts)) < 2:
        raise DataError(
            f"only {len(verdicts)} drafted tokens were compared, or all with the same "
            "verdict; give more prompts"
        )
    return np.array(hidden), np.array(verdicts, np.float32)


def fit(
    hidden: Float32s, accepted: Float32s, steps: int = 300, seed: int = 0
) -> tuple[AcceptanceHead, float]:
    """Learn the head; and the least loss on a tenth that was held out.

    The weights are those of that step: few tokens are soon learned by heart.
    """
    torch.manual_seed(seed)
    size = hidden.shape[1]
    scale = 1.0 / max(float(np.sqrt((hidden**2).mean())), 1e-9)
    x, y = torch.from_numpy(hidden * scale), torch.from_numpy(accepted)
    order = torch.randperm(len(x))
    held, learned = order[: len(x) // 10 + 1], order[len(x) // 10 + 1 :]
    block = (torch.randn(size, size) * size**-0.5 * 0.1).requires_grad_(True)
    out, bias = (
        torch.zeros(size, requires_grad=True),
        torch.zeros((), requires_grad=True),
    )
    optimizer = torch.optim.AdamW([block, out, bias], lr=2e-3, weight_decay=0.05)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        h = x[rows]
        for _ in range(REPEATED):
            h = h + F.silu(h @ block.T)
        weight = torch.where(y[rows] > 0, 1.0, REJECTED_WEIGHT)
        return F.binary_cross_entropy_with_logits(h @ out + bias, y[rows], weight)

    least, best = math.inf, list[torch.Tensor]()
    for step in range(steps):
        batch = learned[torch.randint(len(learned), (256,))]
        optimizer.zero_grad()
        loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % LOOK_EVERY == 0 or step == steps - 1:
            with torch.no_grad():
                left = loss(held).item()
            if left < least:
                least, best = left, [p.detach().clone() for p in (block, out, bias)]
    found = (*best, torch.tensor(scale))
    return AcceptanceHead(*(p.numpy().astype(np.float32) for p in found)), least


def write(head: AcceptanceHead, file: Path, bundle: str) -> None:
    """Keep a head; the file appears whole. Raises `OutputError`."""
    try:
        file.parent.mkdir(exist_ok=True)
        with replacing(file) as partial:
            head.save(partial, bundle)
    except OSError as error:
        raise OutputError(
            f"cannot write {file} ({error.strerror}); copy the bundle to a folder that "
            "can be written"
        ) from error
