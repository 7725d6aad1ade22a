"""Tune a small drafter on a task, so that streams are not compared with a stranger.

    python examples/tasks/tune.py examples/pycode/drafter \\
        --data /tmp/tasks/sql/train.jsonl -o /tmp/sql-drafter

It learns the completions by cross entropy, as the target with its streams does. A T5
can be tuned too, so that a block drafter has a task to learn. With `--lora-rank 16` the
script tunes LoRA, as the training of shared streams does, and merges it in the end.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

from jetdraft.manifest import writing
from jetdraft.train.data import IGNORED, Corpus
from jetdraft.train.machine import precision, this_process

LossOf = Callable[[Any, int], Tensor]
"""Maps a model and the number of a step to the loss of a batch."""


def of_texts(corpus: Corpus, batch_size: int) -> LossOf:
    """The loss of completions behind their prompts, in one sequence."""

    def loss_of(model: Any, step: int) -> Tensor:
        batch = corpus.batch(step, batch_size).to(model.device)
        with precision(model.device):
            logits = model(input_ids=batch.ids).logits[:, :-1]
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.labels[:, 1:].flatten(),
            ignore_index=IGNORED,
        )

    return loss_of


def of_pairs(folder: Path, data: Path, batch_size: int, seed: int) -> LossOf:
    """The loss of completions that a decoder writes about their prompts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pick = random.Random(seed)
    with data.open(encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]

    def loss_of(model: Any, step: int) -> Tensor:
        chosen = pick.choices(pairs, k=batch_size)
        batch = tokenizer(
            [pair["prompt"] for pair in chosen],
            text_target=[pair["completion"] for pair in chosen],
            padding=True,
            return_tensors="pt",
        )
        padding = batch["labels"] == tokenizer.pad_token_id
        batch["labels"] = batch["labels"].masked_fill(padding, IGNORED)
        with precision(model.device):
            loss: Tensor = model(**batch.to(model.device)).loss
        return loss

    return loss_of


def tune(model: Any, loss_of: LossOf, steps: int, learning_rate: float) -> None:
    """Train what is not frozen, with a rate that falls to zero."""
    model.to(this_process().device)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            click.echo(f"step {step}: loss {loss.item():.3f}")


@click.command()
@click.argument("drafter", type=click.Path(exists=True, path_type=Path))
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--steps", default=600, show_default=True)
@click.option("--batch-size", default=32, show_default=True)
@click.option("--sequence-length", default=256, show_default=True)
@click.option(
    "--validation-share",
    default=0.05,
    show_default=True,
    help="Texts left out, which other trainings with the same seed leave out too.",
)
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option(
    "--lora-rank",
    default=0,
    type=click.IntRange(0),
    show_default=True,
    help="0 tunes all weights.",
)
@click.option("--seed", default=0, show_default=True)
def main(
    drafter: Path,
    data: Path,
    output: Path,
    steps: int,
    batch_size: int,
    sequence_length: int,
    validation_share: float,
    learning_rate: float,
    lora_rank: int,
    seed: int,
) -> None:
    """Tune DRAFTER and write it to OUTPUT."""
    if output.exists():
        raise click.UsageError(f"{output} exists; choose another folder")
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(drafter)
    if config.is_encoder_decoder:
        model = AutoModelForSeq2SeqLM.from_pretrained(drafter, dtype=torch.float32)
        loss_of = of_pairs(drafter, data, batch_size, seed)
    else:
        model = AutoModelForCausalLM.from_pretrained(drafter, dtype=torch.float32)
        tokenizer = Tokenizer.from_file(str(drafter / "tokenizer.json"))
        ends = model.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        corpus = Corpus.read(
            [data], tokenizer, ends, sequence_length, 4, validation_share, seed
        )
        loss_of = of_texts(corpus, batch_size)
    if lora_rank:
        lora = LoraConfig(
            r=lora_rank, lora_alpha=lora_rank, target_modules="all-linear"
        )
        model = get_peft_model(model, lora)
    tune(model, loss_of, steps, learning_rate)
    model = model.merge_and_unload() if lora_rank else model
    with writing(output) as folder:
        # A T5's activations overflow in float16.
        (model if config.is_encoder_decoder else model.half()).save_pretrained(folder)
        for file in drafter.glob("*token*.json"):
            shutil.copy(file, folder / file.name)


if __name__ == "__main__":
    main()
