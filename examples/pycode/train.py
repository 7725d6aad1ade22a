"""Train a small Python-code target and its drafter on the standard library."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import click
import corpus
import measure
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from jetdraft.train.machine import Muon, precision

HERE = Path(__file__).parent
ROWS = 8
WARM_UP = 0.03
SAVE_EVERY = 120.0
SAMPLED_SHARE = 0.4
SAMPLED_ROWS = 64
SAMPLED_PREFIX = 96
SAMPLED_LENGTH = 257
HARD_LABELS = 0.1
STAGES = ("target", "drafter", "drafter-sampled")

Batch: TypeAlias = tuple[Tensor, Tensor]
Source: TypeAlias = Callable[[int], Iterator[Batch]]
Loss: TypeAlias = Callable[[LlamaForCausalLM, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Stage:
    """One training run: how long, how fast, and where its state is kept."""

    name: str
    seconds: float
    rate: float
    work: Path

    @property
    def path(self) -> Path:
        """Return the file that holds the run's state."""
        return self.work / f"{self.name}.pt"


def build(width: int, layers: int, heads: int, hidden: int) -> LlamaForCausalLM:
    """Return an untrained model of the given shape."""
    config = LlamaConfig(
        vocab_size=corpus.VOCABULARY,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def corpus_batches(stream: Tensor, seed: int, done: int) -> Iterator[Batch]:
    """Yield shuffled batches for ever, without those of the steps done before."""
    windows = corpus.windows(stream)
    generator = torch.Generator().manual_seed(seed)
    step = 0
    while True:
        order = torch.randperm(len(windows), generator=generator)
        for chosen in torch.split(order, ROWS):
            step += 1
            if step <= done:
                continue
            batch = windows[chosen]
            # Short rows are cheaper; some long ones teach the later positions.
            length = corpus.WINDOW // (1 if step % 4 == 0 else 2)
            yield batch[:, :-1].reshape(-1, length), batch[:, 1:].reshape(-1, length)


def sampled_batches(
    target: LlamaForCausalLM, stream: Tensor, seed: int, done: int
) -> Iterator[Batch]:
    """Yield batches that the target wrote itself from the corpus's beginnings."""
    windows = corpus.windows(stream)
    generator = torch.Generator().manual_seed(seed + done)
    while True:
        chosen = torch.randint(len(windows), (SAMPLED_ROWS,), generator=generator)
        prefix = windows[chosen, :SAMPLED_PREFIX]
        count = SAMPLED_LENGTH - SAMPLED_PREFIX
        # Half greedy, half sampled: the two ways in which a target is used.
        halves = [
            measure.extend(target, part, count, temperature)
            for part, temperature in zip(prefix.chunk(2), (0.0, 0.8), strict=True)
        ]
        # Generating costs more than training, so each text is seen twice.
        order = torch.randperm(2 * SAMPLED_ROWS, generator=generator)
        for rows in torch.split(order % SAMPLED_ROWS, 2 * ROWS):
            batch = torch.cat(halves)[rows]
            yield batch[:, :-1], batch[:, 1:]


def label_loss(model: LlamaForCausalLM, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy against the text."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def distilled_loss(target: LlamaForCausalLM) -> Loss:
    """Return a loss that pulls a model to the target's distribution."""

    def loss(model: LlamaForCausalLM, inputs: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
            wanted = wanted.float().log_softmax(-1)
        logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        got = logits.float().log_softmax(-1)
        divergence = F.kl_div(got, wanted, reduction="batchmean", log_target=True)
        hard = F.nll_loss(got, labels.flatten())
        return (1 - HARD_LABELS) * divergence + HARD_LABELS * hard

    return loss


def rate(stage: Stage, spent: float) -> float:
    """Return the learning rate after some seconds: warm-up, then cosine."""
    done = min(1.0, spent / stage.seconds)
    if done < WARM_UP:
        return stage.rate * max(done, 0.001) / WARM_UP
    return stage.rate * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def optimizers_of(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for all the rest."""
    layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim != 2]
    groups = [
        {"params": [model.model.embed_tokens.weight], "weight_decay": 0.1},
        {"params": gains, "weight_decay": 0.0},
    ]
    # Few steps fit into half an hour, and Muon makes more of each than AdamW.
    return [
        Muon(layers, lr=0.0),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True),
    ]


def gradients(model: LlamaForCausalLM, loss_of: Loss, batch: Batch) -> float:
    """Leave a batch's clipped gradients on the model and return its loss."""
    with precision(torch.device("cpu")):
        loss = loss_of(model, *batch)
    model.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item()


class Run:
    """A stage under way, which can be saved and taken up again."""

    def __init__(self, model: LlamaForCausalLM, stage: Stage) -> None:
        self.model, self.stage = model, stage
        self.optimizers = optimizers_of(model)
        self.spent, self.steps = 0.0, 0
        if stage.path.exists():
            self.load()

    def load(self) -> None:
        """Take up the state that an earlier process left."""
        state = torch.load(self.stage.path)
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.spent, self.steps = state["spent"], state["steps"]

    def save(self) -> None:
        """Keep the state, replacing the last one only when it is complete."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "spent": self.spent,
            "steps": self.steps,
        }
        partial = self.stage.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.stage.path)

    def advance(self, loss_of: Loss, batches: Iterator[Batch]) -> float:
        """Take one step, count its seconds and return its loss."""
        start = time.monotonic()
        loss = gradients(self.model, loss_of, next(batches))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(self.stage, self.spent)
            optimizer.step()
        self.spent += time.monotonic() - start
        self.steps += 1
        return loss


def fit(model: LlamaForCausalLM, stage: Stage, loss_of: Loss, source: Source) -> int:
    """Train until the stage's seconds are spent and return the steps taken."""
    run, saved, average = Run(model, stage), time.monotonic(), 0.0
    batches = source(run.steps)
    model.train()
    while run.spent < stage.seconds:
        loss = run.advance(loss_of, batches)
        average = 0.95 * average + 0.05 * loss if average else loss
        if run.steps % 20 == 0:
            click.echo(f"{stage.name} {run.steps} {run.spent:.0f}s {average:.3f}")
        if time.monotonic() - saved > SAVE_EVERY:
            run.save()
            saved = time.monotonic()
    run.save()
    model.eval()
    return run.steps


def train_target(
    stream: Tensor, minutes: float, seed: int, work: Path
) -> tuple[LlamaForCausalLM, int]:
    """Train the target on the corpus."""
    torch.manual_seed(seed)
    model = build(width=384, layers=7, heads=6, hidden=1024)
    stage = Stage(STAGES[0], 60 * minutes, 4e-3, work)
    source = partial(corpus_batches, stream, seed)
    return model, fit(model, stage, label_loss, source)


def train_drafter(
    target: LlamaForCausalLM, stream: Tensor, minutes: float, seed: int, work: Path
) -> tuple[LlamaForCausalLM, int]:
    """Distil the drafter, first along the corpus, then along the target's text."""
    torch.manual_seed(seed + 1)
    model = build(width=192, layers=2, heads=3, hidden=512)
    loss = distilled_loss(target)
    first = Stage(STAGES[1], 60 * minutes * (1 - SAMPLED_SHARE), 4e-3, work)
    steps = fit(model, first, loss, partial(corpus_batches, stream, seed + 1))
    last = Stage(STAGES[2], 60 * minutes * SAMPLED_SHARE, 2e-3, work)
    source = partial(sampled_batches, target, stream, seed + 2)
    return model, steps + fit(model, last, loss, source)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint folder that Transformers loads."""
    # A copy, because the drafter still learns from the unrounded target.
    half = type(model)(model.config)
    half.load_state_dict(model.state_dict())
    half.half().save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=corpus.END,
        pad_token=corpus.END,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    wrapped.save_pretrained(folder)
    # Older Transformers know the tokenizer's class by its former name only.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_prompts(tokenizer: Tokenizer, held_out: dict[str, str], output: Path) -> None:
    """Write the held-out files' names and the prompts cut from them."""
    names = "".join(f"{name}\n" for name in held_out)
    (output / "heldout.txt").write_text(names, encoding="utf-8")
    prompts = corpus.prompts(tokenizer, held_out, 24)
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (output / "prompts.jsonl").write_text(lines, encoding="utf-8")


@click.command()
@click.option("--minutes-target", default=30.0, show_default=True)
@click.option("--minutes-drafter", default=10.0, show_default=True)
@click.option(
    "--target",
    "trained",
    type=click.Path(path_type=Path),
    help="Distil from this trained target instead of training one.",
)
@click.option("--seed", default=7, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), default=HERE)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=HERE / "work",
    help="Where unfinished training is kept, to be taken up again.",
)
def main(
    minutes_target: float,
    minutes_drafter: float,
    trained: Path | None,
    seed: int,
    threads: int,
    output: Path,
    work: Path,
) -> None:
    """Train both models, write their checkpoints and print their figures."""
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    train, held_out = corpus.read()
    tokenizer = corpus.train_tokenizer(list(train.values()))
    write_prompts(tokenizer, held_out, output)
    stream = corpus.encode(tokenizer, list(train.values()))
    click.echo(f"{len(train)} files, {len(stream)} tokens")
    if trained is not None:
        target, steps = LlamaForCausalLM.from_pretrained(trained).float().eval(), 0
    else:
        target, steps = train_target(stream, minutes_target, seed, work)
    save(target, tokenizer, output / "target")
    drafter, drafter_steps = train_drafter(target, stream, minutes_drafter, seed, work)
    save(drafter, tokenizer, output / "drafter")
    click.echo(f"{steps} target steps, {drafter_steps} drafter steps")
    for stage in STAGES:
        # A later run must start afresh rather than take this one for its own.
        (work / f"{stage}.pt").unlink(missing_ok=True)
    click.echo(json.dumps(measure.figures(output, list(held_out.values())), indent=2))


if __name__ == "__main__":
    main()
