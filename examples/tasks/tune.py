"""Tune a small drafter on a task, so that streams are not compared with a stranger.

    python examples/tasks/tune.py examples/pycode/drafter \\
        --data /tmp/tasks/sql/train.jsonl -o /tmp/sql-drafter

It learns the completions by cross entropy, as the target with its streams does.
"""

import shutil
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from jetdraft.train.data import IGNORED, Corpus
from jetdraft.train.taught.precision import precision


@click.command()
@click.argument("drafter", type=click.Path(exists=True, path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--steps", default=600, show_default=True)
@click.option("--batch-size", default=32, show_default=True)
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(
    drafter: Path,
    data: Path,
    output: Path,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Tune DRAFTER and write it to OUTPUT."""
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(drafter / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(drafter, dtype=torch.float32)
    ends = model.config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    corpus = Corpus.read([data], tokenizer, ends, 256, 4, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for step in range(steps):
        batch = corpus.batch(step, batch_size)
        with precision(torch.device("cpu")):
            logits = model(input_ids=batch.ids).logits[:, :-1]
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.labels[:, 1:].flatten(),
            ignore_index=IGNORED,
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            click.echo(f"step {step}: loss {loss.item():.3f}")
    model.half().save_pretrained(output)
    for file in drafter.glob("*token*.json"):
        shutil.copy(file, output / file.name)


if __name__ == "__main__":
    main()
