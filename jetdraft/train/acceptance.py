"""The training of an acceptance head (SpecDec++, 2405.19715, 3.3), on real rounds."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from jetdraft.contracts.tensors import Float32s, Int64s
from jetdraft.errors import DataError, OptionError, OutputError, as_error
from jetdraft.files import replacing
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.planning.registry import methods
from jetdraft.runtime.proposers import model_proposer
from jetdraft.runtime.proposers.model_proposer import AcceptanceHead, ModelProposer

LOOK_EVERY = 10  # Training steps between two measurements of the held-out loss.
REJECTED_WEIGHT = 6.0  # The weight of rejected tokens in the loss; they are few.
DRAFT_LENGTH = 8  # Drafted tokens of each round that is watched.
LEAST_TOKENS = 50  # The fewest compared tokens that a head can learn from.


class StateRecorder(model_proposer.DraftStop):
    """A rule that never stops a draft, and keeps the hidden state of each token."""

    def __init__(self) -> None:
        super().__init__(lambda answer: 1.0, 0.0)
        self.states: list[Float32s] = []

    def begin(self) -> None:
        """Forget the states of the previous draft."""
        self.states = []

    def ends_draft(self, answer: Answer) -> bool:
        assert answer.hidden is not None
        self.states.append(answer.hidden[0].copy())
        return False


def record_verdicts(
    model: Model,
    prompts: Sequence[Int64s],
    max_new_tokens: int,
    temperature: float,
    tick: Callable[[], None] = lambda: None,
    seed: int = 0,
) -> tuple[Float32s, Float32s]:
    """Generate texts; returns the drafter's states [n, h] and verdicts [n], float32.

    A verdict is 1 if the target accepted a token that it compared, else 0. Raises
    `OptionError` without a drafter, `DataError` if too few tokens were compared.
    """
    hidden, verdicts = list[Float32s](), list[bool]()
    name, proposer = _find_drafting(model)
    watching = proposer.stop = StateRecorder()
    try:
        for prompt in prompts:
            for piece in model.stream(
                token_ids=prompt,
                method=name,
                num_draft_tokens=DRAFT_LENGTH,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
            ):
                for place, state in enumerate(watching.states[: piece.from_draft + 1]):
                    hidden.append(state)
                    verdicts.append(place < piece.from_draft)
                watching.states = []
            tick()
    finally:
        proposer.stop = None
    if len(verdicts) < LEAST_TOKENS or len(set(verdicts)) < 2:
        fact = f"only {len(verdicts)} drafted tokens were compared"
        raise DataError(f"{fact}, or all have the same verdict; give more prompts")
    return np.array(hidden), np.array(verdicts, np.float32)


def _find_drafting(model: Model) -> tuple[str, ModelProposer]:
    drafter = model.parts.drafter
    if drafter is None or not drafter.contract.stands_alone:
        fix = "export with --drafter, and do not pass --drafter-provider off"
        raise OptionError(f"an acceptance head needs a drafter; {fix}", "method")
    if not drafter.contract.hidden_size:
        fix = "export the bundle again with this version"
        raise OptionError(f"the drafter gives no hidden states; {fix}", "bundle")
    for name, proposer in model.planner.proposers().items():
        if methods()[name].cost == "drafter" and isinstance(proposer, ModelProposer):
            return name, proposer
    raise AssertionError("no method drafts with a drafter")


def fit_head(
    hidden: Float32s, accepted: Float32s, steps: int = 300, seed: int = 0
) -> tuple[AcceptanceHead, float]:
    """Train a head; returns it at its least loss on a held-out tenth, and that loss."""
    torch.manual_seed(seed)
    size = hidden.shape[1]
    scale = 1.0 / max(float(np.sqrt((hidden**2).mean())), 1e-9)
    x, y = torch.from_numpy(hidden * scale), torch.from_numpy(accepted)
    order = torch.randperm(len(x))
    held_out, training = order[: len(x) // 10 + 1], order[len(x) // 10 + 1 :]
    block = (torch.randn(size, size) * size**-0.5 * 0.1).requires_grad_(True)
    out, bias = (torch.zeros(shape, requires_grad=True) for shape in ((size,), ()))
    optimizer = torch.optim.AdamW([block, out, bias], lr=2e-3, weight_decay=0.05)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        h = x[rows]
        for _ in range(model_proposer.REPEATS):
            h = h + F.silu(h @ block.T)
        weight = torch.where(y[rows] > 0, 1.0, REJECTED_WEIGHT)
        return F.binary_cross_entropy_with_logits(h @ out + bias, y[rows], weight)

    least, best = math.inf, list[torch.Tensor]()
    for step in range(steps):
        batch = training[torch.randint(len(training), (256,))]
        optimizer.zero_grad()
        loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % LOOK_EVERY == 0 or step == steps - 1:
            with torch.no_grad():
                held_loss = loss(held_out).item()
            if held_loss < least:
                least = held_loss
                best = [p.detach().clone() for p in (block, out, bias)]
    weights = (*best, torch.tensor(scale))
    return AcceptanceHead(*(p.numpy().astype(np.float32) for p in weights)), least


def save_head(head: AcceptanceHead, file: Path, bundle: str) -> None:
    """Write a head; the file appears whole. Raises `OutputError`."""
    fact = f"cannot write {file}"
    with as_error(OutputError, OSError, fact, "copy the bundle to a writable folder"):
        file.parent.mkdir(exist_ok=True)
        with replacing(file) as partial:
            head.save(partial, bundle)
