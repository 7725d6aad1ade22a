"""Tune an encoder-decoder on a task; a block drafter can then learn to draft for it.

    python examples/tasks/tune_source.py folders/flan-t5-small \\
        --data tasks/data/train.jsonl -o flan-data

It learns the completions by cross entropy, as `tune.py` does for other models.
"""

import json
import random
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from jetdraft.train.data import IGNORED
from jetdraft.train.taught.precision import precision


def tensors(tokenizer: Any, pairs: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """The inputs of a batch, and its labels [rows, tokens]."""
    sources = tokenizer(
        [pair["prompt"] for pair in pairs], padding=True, return_tensors="pt"
    )
    texts = tokenizer(
        text_target=[pair["completion"] for pair in pairs],
        padding=True,
        return_tensors="pt",
    )
    labels = texts["input_ids"].masked_fill(texts["attention_mask"] == 0, IGNORED)
    return {**sources, "labels": labels}


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--steps", default=200, show_default=True)
@click.option("--batch-size", default=16, show_default=True)
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(
    model: Path,
    data: Path,
    output: Path,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Tune MODEL and write it to OUTPUT."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tuned = AutoModelForSeq2SeqLM.from_pretrained(model, dtype=torch.float32)
    with data.open(encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    pick = random.Random(seed)
    for step in range(steps):
        batch = tensors(tokenizer, pick.choices(pairs, k=batch_size))
        with precision(torch.device("cpu")):
            loss = tuned(**batch).loss
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == steps - 1:
            click.echo(f"step {step}: loss {loss.item():.3f}")
    tuned.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    main()
