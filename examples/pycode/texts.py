"""Texts for a head to learn from: the target's own, and some of the corpus.

python texts.py --minutes 5 --corpus some.txt -o texts.jsonl
"""

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import click
import corpus
import measure
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from jetdraft.files import replacing

HERE = Path(__file__).parent
PREFIX = 96
LENGTH = 256
ROWS = 32
# The two ways in which a target is used.
TEMPERATURES = (0.0, 0.8)


def continued(
    target: LlamaForCausalLM, tokenizer: Tokenizer, prefixes: Tensor, temperature: float
) -> Iterator[str]:
    """Yield the target's texts after some beginnings, those of at most LENGTH tokens.

    A sampled text with broken characters reads back as more tokens than were written.
    """
    rows = measure.extend(target, prefixes, LENGTH - PREFIX, temperature)
    for row in rows.tolist():
        text = tokenizer.decode(row, skip_special_tokens=False)
        if len(tokenizer.encode(text).ids) <= LENGTH:
            yield text


@click.command()
@click.option("--minutes", default=5.0, show_default=True)
@click.option("--seed", default=11, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option(
    "--corpus",
    "some",
    type=click.Path(path_type=Path),
    help="Write some training files here, as one text.",
)
@click.option(
    "--stride", default=24, show_default=True, help="Files from one to the next."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(
    minutes: float,
    seed: int,
    threads: int,
    some: Path | None,
    stride: int,
    output: Path,
) -> None:
    """Continue beginnings of training files until the minutes are over."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    tokenizer = Tokenizer.from_file(str(HERE / "target" / "tokenizer.json"))
    target = LlamaForCausalLM.from_pretrained(HERE / "target").float().eval()
    train, _ = corpus.read()
    texts = list(train.values())
    if some is not None:
        joined = corpus.END.join(texts[::stride])
        some.write_text(joined, encoding="utf-8", newline="")
    windows = corpus.windows(corpus.encode(tokenizer, texts))
    end, count = time.monotonic() + 60 * minutes, 0
    with replacing(output) as partial, partial.open("w", encoding="utf-8") as file:
        for temperature in itertools.cycle(TEMPERATURES):
            if time.monotonic() > end:
                break
            chosen = torch.randint(len(windows), (ROWS,), generator=generator)
            prefixes = windows[chosen, :PREFIX]
            for text in continued(target, tokenizer, prefixes, temperature):
                file.write(json.dumps({"text": text}) + "\n")
                count += 1
    click.echo(f"{count} texts")


if __name__ == "__main__":
    main()
