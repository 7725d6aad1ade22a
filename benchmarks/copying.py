"""What `lookup` gives an encoder-decoder that copies from its source: texts and times.

    python benchmarks/copying.py bundles/flan --checkpoint folders/flan-t5-small

runs ten tasks (corrections, summaries, translations, questions) with each method in
turns, and prints a table for each kind of task. With the checkpoint's folder it says
how many texts are those that transformers decodes greedily. The first turn warms up;
times are sums, medians over the turns, and ratios to the first method in the same turn.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click
from contenders import Turns, contenders, line

import jetdraft

TASKS = {
    "correct": (
        "Fix the grammar: She go to school every day and her brother go to the office "
        "with the train, because they has no car.",
        "Fix the grammar: The childrens was playing in the garden when it begin to "
        "rain, so they runned into the house and closed the door.",
        "Correct the spelling: The goverment anounced on Monday that the old libary "
        "beside the station will be closed for too years.",
        "Repeat the text: The city council voted last night to build a new library "
        "beside the station, and the work will begin in spring.",
    ),
    "summarize": (
        "summarize: The tower is 324 metres tall, about the height of an 81-storey "
        "building, and the tallest structure in Paris. Its base is square, measuring "
        "125 metres on each side. During its construction, the tower surpassed the "
        "Washington Monument to become the tallest man-made structure in the world.",
        "summarize: The first railways carried coal from the mines to the sea. Horses "
        "pulled the waggons until steam engines became strong enough. Within thirty "
        "years, people travelled between the large cities in a few hours.",
        "summarize: The patient has had a fever since Monday. Her blood pressure is "
        "normal, and there is no pain in the chest. She should drink plenty of water "
        "and call again if the fever does not fall within two days.",
    ),
    "other": (
        "translate English to German: The house is wonderful.",
        "translate English to French: Where is the next station, please?",
        "Which animal gives us milk and eats grass?",
    ),
}


def greedy(folder: Path, prompts: list[str], new: int) -> list[str]:
    """The texts of transformers, without special tokens."""
    import torch
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            tokens = model.generate(ids, max_new_tokens=new, do_sample=False)[0]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return texts


@click.command()
@click.argument("bundle")
@click.option("--checkpoint", type=click.Path(path_type=Path))
@click.option("--method", default="plain,none,lookup,lookup:3,auto")
@click.option("--max-new-tokens", default=64)
@click.option("--turns", default=3)
@click.option("--threads", default=1)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(
    bundle: str,
    checkpoint: Path | None,
    method: str,
    max_new_tokens: int,
    turns: int,
    threads: int,
    file: Path | None,
) -> None:
    """Decode the tasks with each method, in turns."""
    model, report = jetdraft.load(bundle, threads=threads), {}
    prompts = [prompt for group in TASKS.values() for prompt in group]
    texts = [
        model.generate(prompt, max_new_tokens=max_new_tokens, method="none").text
        for prompt in prompts
    ]
    if checkpoint is not None:
        expected = greedy(checkpoint, prompts, max_new_tokens)
        same = sum(a.strip() == b.strip() for a, b in zip(texts, expected, strict=True))
        report["same_as_transformers"] = f"{same} of {len(texts)}"
        click.echo(f"transformers decodes the same text in {same} of {len(texts)}")
    for task, group in TASKS.items():
        write = partial(model.generate, max_new_tokens=max_new_tokens)
        report[task] = Turns(contenders(method), group, write).run(turns).rows()
        click.echo(task)
        for name, row in report[task].items():
            click.echo(line(name, row))
    if file is not None:
        whole = {"bundle": bundle, "texts": texts, **report}
        file.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
