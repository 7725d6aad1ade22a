"""Share of HumanEval tasks that a bundle still solves: a fixed 40 of them.

    python benchmarks/human_eval.py BUNDLE... --gguf FILE --json FILE

A GGUF file of the same model runs in llama.cpp (`pip install xllamacpp`), with the
prompts of the first bundle. Greedy answers through the chat template; drafting changes
no text, so bundles answer with "auto". The code of an answer runs with the task's tests
in a process of its own, with limits of time, memory and files, and without the user's
environment. It is code that a model wrote: run this where nothing can be broken.
"""

import json
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from real_prompts import TASK, human_eval

import jetdraft

COUNT = 40
MAX_NEW_TOKENS = 384
SECONDS = 10
MEMORY = 1 << 30
END = "all tests passed"
PREAMBLE = "from typing import *\nimport math\n"


def tasks() -> list[dict[str, str]]:
    """The fixed tasks, in their order."""
    whole = human_eval()
    drawn = random.Random(40).sample(range(len(whole)), COUNT)
    return [whole[number] for number in sorted(drawn)]


def code_of(answer: str) -> str:
    """The first block of code, or the whole answer without one."""
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    return block[1] if block else answer


def solves(task: dict[str, str], answer: str) -> bool:
    """Whether the answer's code passes the task's tests."""
    program = "\n".join(
        [
            PREAMBLE,
            task["prompt"],  # for an answer that has the body or its helpers only
            "    pass\n",
            code_of(answer),
            task["test"],
            f"check({task['entry_point']})",
            f"print({END!r})",  # an answer may end the process before
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=2 * SECONDS,
                preexec_fn=_limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout.endswith(END.encode() + b"\n")


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))


Writer = Callable[[list[int]], str]
"""Answers a prompt of token ids."""


def bundle_writer(bundle: Path) -> Writer:
    """Answers with a bundle; drafting changes no text."""
    model = jetdraft.load(bundle)

    def write(prompt: list[int]) -> str:
        result = model.generate(
            token_ids=prompt, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0
        )
        return result.text

    return write


def gguf_writer(file: Path, threads: int = 2) -> Writer:
    """Answers with llama.cpp's server."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel = 2048, 1
    params.cache_ram_mib, params.verbosity = 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def write(prompt: list[int]) -> str:
        answer = server.handle_completions(
            {"prompt": prompt, "n_predict": MAX_NEW_TOKENS, "temperature": 0.0}
        )
        return str(answer["choices"][0]["text"])

    return write


def prompts(bundle: Path) -> list[list[int]]:
    """The tasks as token ids, through the chat template."""
    model = jetdraft.load(bundle)
    return [
        model.chat_prompt([{"role": "user", "content": TASK.format(task["prompt"])}])
        for task in tasks()
    ]


def measure(name: str, write: Writer, asked: list[list[int]]) -> dict[str, object]:
    """The tasks that are solved."""
    solved = []
    for number, (task, prompt) in enumerate(zip(tasks(), asked, strict=True), 1):
        if solves(task, write(prompt)):
            solved.append(task["task_id"])
        print(f"{name}: {len(solved)} of {number}", file=sys.stderr, flush=True)
    return {"bundle": name, "solved": len(solved), "tasks": solved}


@click.command()
@click.argument("bundles", nargs=-1, type=click.Path(path_type=Path), required=True)
@click.option("--gguf", "ggufs", multiple=True, type=click.Path(path_type=Path))
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundles: tuple[Path, ...], ggufs: tuple[Path, ...], output: Path | None
) -> None:
    """Count the solved tasks of all BUNDLES and GGUF files."""
    assert all(solves(t, t["prompt"] + t["canonical_solution"]) for t in tasks())
    asked = prompts(bundles[0])
    rows = []
    for path in (*bundles, *ggufs):
        writer = gguf_writer if path in ggufs else bundle_writer
        row = measure(path.name, writer(path), asked)
        rows.append(row)
        print(f"{row['bundle']:32} {row['solved']} of {COUNT}", flush=True)
        if output is not None:
            output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
