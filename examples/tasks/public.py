"""Write a public task: function calls that answer a user's question.

    python examples/tasks/public.py folders/smollm2 -o tasks

gives tasks/calls with train.jsonl and test.jsonl, out of the Berkeley Function-Calling
Leaderboard (the package bfcl-eval, Apache-2.0): its questions that expect one call. A
prompt has a line for each function on offer and the question; a completion is the call
as JSON, with the first of the values that the leaderboard takes for each parameter.

Half of the tests ask for functions that no training example offers. No prompt of the
test file is in the training file. Examples of more tokens than `--tokens`, as the
checkpoint's tokenizer counts them, are dropped.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import click
from make import Example, write
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).parents[1] / "real"))

from package import lines

PACKAGE = "bfcl-eval==2026.3.23"
QUESTIONS = "bfcl_eval/data/BFCL_v4_{}.json"
ANSWERS = "bfcl_eval/data/possible_answer/BFCL_v4_{}.json"
SETS = ("simple_python", "multiple", "live_simple", "live_multiple")
"""The sets in Python's types whose questions expect one call."""

MARK = "call:"
LEFT_OUT = ""
"""Stands among the possible values of a parameter that a call may leave out."""

TYPES = {
    "string": "str",
    "integer": "int",
    "boolean": "bool",
    "array": "list",
    "dict": "{}",
}

GROUP_SHARE = 20
"""No group of functions has more than this part of the test's examples held out."""


@dataclass(frozen=True)
class Case:
    """An example, the function that it calls, and the functions on offer."""

    example: Example
    called: str
    offered: frozenset[str]


def type_of(schema: dict[str, Any]) -> str:
    """The type of a parameter, or its values if only some are allowed."""
    if "enum" in schema:
        return "|".join(map(str, schema["enum"]))
    if schema.get("properties"):
        return "{" + parameters(schema) + "}"
    kind = str(schema.get("type", "any"))
    if kind == "array" and "items" in schema:
        return f"[{type_of(schema['items'])}]"
    return TYPES.get(kind, kind)


def parameters(schema: dict[str, Any]) -> str:
    """Names with types, and a question mark behind the names that may be left out."""
    required = schema.get("required", [])
    return ", ".join(
        f"{name}{'' if name in required else '?'}: {type_of(value)}"
        for name, value in schema["properties"].items()
    )


def signature(function: dict[str, Any]) -> str:
    """A function in one line, with the first sentence of its description.

    math.factorial(number: int) - Calculate the factorial of a given number
    """
    words = " ".join(function["description"].split())
    sentence = words.partition(". ")[0].removesuffix(".")
    return f"{function['name']}({parameters(function['parameters'])}) - {sentence}"


def value_of(possible: Any) -> Any:
    """A value without alternatives, of which most names inside a dict have a list."""
    if isinstance(possible, dict):
        lists = {
            name: values if isinstance(values, list) else [values]
            for name, values in possible.items()
        }
        return {
            name: value_of(values[0])
            for name, values in lists.items()
            if values and LEFT_OUT not in values
        }
    if isinstance(possible, list):
        return [value_of(value) for value in possible]
    return possible


def arguments_of(
    possible: dict[str, list[Any]], schema: dict[str, Any]
) -> dict[str, Any] | None:
    """The first value of each parameter that must be given; None if it has none."""
    required = schema.get("required", [])
    arguments = {}
    for name, values in possible.items():
        said = [value for value in values if value != LEFT_OUT]
        if values and (name in required or LEFT_OUT not in values):
            arguments[name] = value_of(said[0]) if said else LEFT_OUT
    is_valid = set(required) <= set(arguments) <= set(schema["properties"])
    return arguments if is_valid else None


def case_of(question: dict[str, Any], answer: dict[str, Any]) -> Case | None:
    """The case of a question, or None if its answer does not fit its functions."""
    functions = {function["name"]: function for function in question["function"]}
    ((called, possible),) = answer["ground_truth"][0].items()
    arguments = arguments_of(possible, functions[called]["parameters"])
    if arguments is None:
        return None
    (messages,) = question["question"]
    said = [message["content"].strip() for message in messages]
    prompt = "\n".join([*map(signature, functions.values()), *said, MARK])
    call = {"name": called, "arguments": arguments}
    completion = " " + json.dumps(call, ensure_ascii=False)
    return Case((prompt, completion), called, frozenset(functions))


def groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that share functions, directly or through other cases."""
    parts: list[tuple[frozenset[str], list[Case]]] = []
    for case in cases:
        names, members = case.offered, [case]
        apart = []
        for part in parts:
            if part[0] & case.offered:
                names, members = names | part[0], part[1] + members
            else:
                apart.append(part)
        parts = [*apart, (names, members)]
    return [members for _, members in parts]


def split(cases: list[Case], count: int, seed: int) -> tuple[list[Case], list[Case]]:
    """Cases to train on, and `count` to test with, half of them of held functions.

    Raises `UsageError` where the cases are too few for that.
    """
    pick = random.Random(seed)
    held: list[Case] = []
    rest: list[Case] = []
    parts = groups(cases)
    pick.shuffle(parts)
    for part in parts:
        room = min(count // 2 - len(held), max(1, count // GROUP_SHARE))
        (held if len(part) <= room else rest).extend(part)
    pick.shuffle(rest)
    left = Counter(case.called for case in rest)
    seen: list[Case] = []
    train: list[Case] = []
    for case in rest:
        if len(seen) < count - count // 2 and left[case.called] > 1:
            left[case.called] -= 1
            seen.append(case)
        else:
            train.append(case)
    test = held + seen
    if len(held) < count // 2 or len(test) < count:
        raise click.UsageError(
            f"{len(cases)} examples are too few for {count} tests, half of them of "
            "functions apart; give fewer --tests or more --tokens"
        )
    pick.shuffle(test)
    return train, test


def read() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The questions of all sets, each with its answer."""
    members = [kind.format(name) for kind in (QUESTIONS, ANSWERS) for name in SETS]
    files = lines(PACKAGE, tuple(members))
    questions = [line for file in files[: len(SETS)] for line in file]
    answers = {line["id"]: line for file in files[len(SETS) :] for line in file}
    return [(question, answers[question["id"]]) for question in questions]


def sizes(cases: list[Case], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """The tokens of each prompt and of its completion."""
    return [
        (len(prompt), len(completion))
        for prompt, completion in (
            tokenizer.encode_batch(list(case.example), add_special_tokens=False)
            for case in cases
        )
    ]


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--tokens", default=288, show_default=True, help="Most of an example.")
@click.option(
    "--tests",
    type=click.IntRange(2),
    default=200,
    show_default=True,
    help="Examples to test with.",
)
@click.option("--seed", default=1, show_default=True)
def main(checkpoint: Path, output: Path, tokens: int, tests: int, seed: int) -> None:
    """Write the task for CHECKPOINT, a Hugging Face folder with a tokenizer."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    pairs = read()
    fitting = [case for pair in pairs if (case := case_of(*pair)) is not None]
    first: dict[str, Case] = {}
    for case in fitting:
        first.setdefault(case.example[0], case)
    cases = list(first.values())
    counted = zip(cases, sizes(cases, tokenizer), strict=True)
    short = [case for case, size in counted if sum(size) <= tokens]
    train, test = split(short, tests, seed)
    folder = output / "calls"
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", [case.example for case in train])
    write(folder / "test.jsonl", [case.example for case in test])
    for words, number in (
        ("whose answers do not fit their functions", len(pairs) - len(fitting)),
        ("with a prompt that was there before", len(fitting) - len(cases)),
        (f"of more than {tokens} tokens", len(cases) - len(short)),
    ):
        click.echo(f"dropped {number} {words}", err=True)
    for name, part in (("train.jsonl", train), ("test.jsonl", test)):
        prompt, completion = map(mean, zip(*sizes(part, tokenizer), strict=True))
        size = f"{prompt:.0f} and {completion:.0f} tokens on average"
        click.echo(f"{name}: {len(part)} prompts and completions of {size}", err=True)


if __name__ == "__main__":
    main()
