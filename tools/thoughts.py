"""Lets a made model think with published chat templates, behind the server.

    python -m tools.thoughts FOLDER

FOLDER has templates, as NAME.jinja. The model is random, so its thoughts are noise:
what counts is that a thought ends at its budget, that an answer in a form follows, that
a stream says the same, and what becomes of a thought in later turns.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import httpx
from tokenizers import AddedToken

from jetdraft import Pool
from jetdraft.bundle import CHAT_TEMPLATE, Bundle
from jetdraft.cli import StandaloneCommand
from jetdraft.cli.flags import PATH
from jetdraft.server.app import Service
from tests import tiny
from tests.server.serving import served

CAPACITY, BUDGET, ANSWER = 4096, 8, "[a-z]{9}"
MARK = re.compile(r"<[|\uff5c/]?\w+[|\uff5c]?>")
"""A token of a template that marks a turn, a thought or a call."""

MOST_MARKS = 24
"""The tiny vocabulary has room for so few beside its bytes."""

FORGOTTEN, USER = "pondering", {"role": "user", "content": "Hi"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "7"}


def bundle_with(base: Path, folder: Path, source: str) -> Path:
    """Copy a bundle, with a template and its marks as tokens."""
    marks = dict.fromkeys(["<think>", "</think>", *MARK.findall(source)])
    added = [mark for mark in marks if mark in source][:MOST_MARKS]
    shutil.copytree(
        base, folder, ignore=shutil.ignore_patterns("bundle.json", "profiles")
    )
    (folder / CHAT_TEMPLATE).write_text(source)
    tokens = [AddedToken(mark, special="think" not in mark) for mark in added]
    tiny.tokenizer(added=tokens).save(str(folder / "tokenizer.json"))
    replace(Bundle.open(base), path=folder, files={}, special_tokens={}).save()
    return folder


def call_after(thought: str) -> dict[str, Any]:
    """The assistant's message that thinks, then calls a function."""
    function = {"name": "read", "arguments": {}}
    calls = [{"id": "c", "type": "function", "function": function}]
    said = {"role": "assistant", "content": "", "reasoning_content": thought}
    return {**said, "tool_calls": calls}


def ask(
    address: str, messages: list[Any], stream: bool = False, **more: Any
) -> tuple[str, str, dict[str, Any]]:
    """The thought and the answer to `messages`, and the usage unless it streams."""
    body = {"messages": messages, "stream": stream, "regex": ANSWER, **more}
    body |= {"max_tokens": 64, "max_thinking_tokens": BUDGET, "temperature": 0}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    if answer.status_code != 200:
        raise click.ClickException(answer.text)
    if stream:
        lines = [line[len("data: ") :] for line in answer.text.split("\n\n")[:-2]]
        parts, usage = [json.loads(line)["choices"][0]["delta"] for line in lines], {}
    else:
        whole = answer.json()
        parts, usage = [whole["choices"][0]["message"]], whole["usage"]
    thought = "".join(part.get("reasoning_content") or "" for part in parts)
    return thought, "".join(part.get("content") or "" for part in parts), usage


def examine(path: Path) -> list[object]:
    """How a thought begins, its tokens, its fate in later turns, and the rows reused.

    Raises `AssertionError` where the server does not do as its documents say.
    """
    with Pool(path, 1, threads=1) as pool, served(Service(pool, "m")) as address:
        model = pool.models[0].twin()
        think = {"logit_bias": {str(model.encode("<think>")[0]): 100}}
        ways: dict[str, tuple[list[Any], dict[str, Any]]] = {
            "at once": ([USER], {}),
            "after `<think>`": ([USER], think),
            "after a tool": ([USER, call_after(""), RESULT], {"enable_thinking": True}),
        }
        answers = ((way, ask(address, ways[way][0], **ways[way][1])) for way in ways)
        first = next((answer for answer in answers if answer[1][0]), None)
        if first is None:
            fact = f"{path.name}.jinja never thinks; give templates that do"
            raise click.ClickException(fact)
        way, (thought, text, usage) = first
        messages, more = ways[way]
        assert re.fullmatch(ANSWER, text), text
        spent = usage["completion_tokens_details"]["reasoning_tokens"]
        assert ask(address, messages, True, **more)[:2] == (thought, text)
        said = {"role": "assistant", "content": text, "reasoning_content": thought}
        _, text, usage = ask(address, [*messages, said, USER], **more)
        assert re.fullmatch(ANSWER, text), text
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        said["reasoning_content"] = FORGOTTEN
        later = [USER, said, USER], [USER, call_after(FORGOTTEN), RESULT]
        prompts = [model.decode(model.chat_prompt(turns)) for turns in later]
        fates = ["kept" if FORGOTTEN in prompt else "dropped" for prompt in prompts]
        return [way, spent, *fates, f"{cached} of {usage['prompt_tokens']}"]


@click.command(cls=StandaloneCommand)
@click.argument("folder", type=PATH)
def main(folder: Path) -> None:
    """Let a made model think with the templates in FOLDER; prints a row for each."""
    with tempfile.TemporaryDirectory() as made:
        source = Path(made, "checkpoint")
        sizes = {"num_hidden_layers": 1, "max_position_embeddings": CAPACITY}
        tiny.save_checkpoint(source, tiny.llama_config(**sizes))
        base = tiny.exported(source, Path(made, "bundle"), "int8", capacity=CAPACITY)
        for file in sorted(folder.glob("*.jinja")):
            path = bundle_with(base.path, Path(made, file.stem), file.read_text())
            click.echo(
                " | ".join(map(str, ["", file.stem, *examine(path), ""])).strip()
            )


if __name__ == "__main__":
    main()
