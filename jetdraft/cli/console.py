"""Reads prompts and lines for verbs; prints progress, texts and stats."""

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import click
import numpy as np

from jetdraft.contracts.tensors import Int64s
from jetdraft.errors import reason_of, refusing
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.model import Model
from jetdraft.runtime.text.stops import INTERRUPTED

DEFAULT_PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\nclass Config:\n    def __init__(self, path):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "for i in range(10):\n    for j in range(10):\n        if",
)
MAX_INPUT_CHARS = 64_000_000  # A device or a pipe may never end.
SECONDS_BETWEEN_LINES = 10.0  # Lines of progress where there is no terminal.


def read_input(file: Path | None) -> str:
    """Read a UTF-8 file, or standard input for None; raises `UsageError`."""
    if file is None:
        return _read_limited("standard input", sys.stdin.read)

    def read(most: int) -> str:
        with file.open(encoding="utf-8") as handle:
            return handle.read(most)

    return _read_limited(f"{file}", read)


def read_line() -> str | None:
    """Read a line of standard input; None at its end. Raises `UsageError`."""
    line = _read_limited("a line of standard input", sys.stdin.readline)
    return line.removesuffix("\n") if line else None


def _read_limited(name: str, read: Callable[[int], str]) -> str:
    """Call `read` with a limit of characters; raises `UsageError` that names `name`."""
    try:
        text = read(MAX_INPUT_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        fact = f"cannot read {name} ({reason_of(error)}); give a file of UTF-8 text"
        raise click.UsageError(fact) from error
    if len(text) > MAX_INPUT_CHARS:
        fact = f"{name} has more than {MAX_INPUT_CHARS} characters; give less text"
        raise click.UsageError(fact)
    return text


def read_prompts(file: Path | None, model: Model) -> list[Int64s]:
    """The prompts in a file of JSON lines with "prompt" or "token_ids", int64 each.

    Without a file they are `DEFAULT_PROMPTS`, or random ids without a tokenizer.
    """
    if file is not None:
        # Not splitlines: JSON text may contain other line separators unescaped.
        lines = [line for line in read_input(file).split("\n") if line.strip()]
        if not lines:
            raise click.UsageError(f"there are no prompts in {file}; give at least one")
        return [_parse_prompt(line, model) for line in lines]
    if model.bundle.tokenizer is not None:
        return [model.prompt(text) for text in DEFAULT_PROMPTS]
    random = np.random.default_rng(0)
    contract = model.bundle.target.contract
    size = min(32, contract.capacity // 2)
    return [random.integers(0, contract.vocab_size, size) for _ in DEFAULT_PROMPTS]


def _parse_prompt(line: str, model: Model) -> Int64s:
    """The token ids of a line's prompt, int64 [tokens]; raises `UsageError`."""
    fact = f"not a prompt: {line[:60]!r}"
    fix = "each line is a JSON object with prompt or token_ids"
    refusal = click.UsageError(f"{fact}; {fix}")
    with refusing(refusal, ValueError, AttributeError, RecursionError):
        fields = json.loads(line)
        text, ids = fields.get("prompt"), fields.get("token_ids")
    if text is not None and not isinstance(text, str):
        raise click.UsageError(f"{fact}; prompt must be text")
    return model.prompt(text, ids)


class ProgressBars:
    """A bar on standard error for each stage, or a line at times without a terminal."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None
        self._done = 0
        self._line: str | None = None
        self._printed = ""
        """The stage of the last printed line."""
        self._started = time.monotonic()
        self._ended = Event()
        self._printer = Thread(target=self._print_lines, daemon=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            state = "" if total == 1 else f", {done} of {total}"
            self._stage = stage
            self._line = f"{stage}{', done' if done >= total else state}"
            if done >= total and stage == self._printed:
                self._print_line()
                self._printed = ""
            return
        if self._bar is None or stage != self._stage:
            self.close()
            self._stage, self._done = stage, 0
            how: Any = {"label": f"{stage:18}", "file": sys.stderr}
            self._bar = click.progressbar(length=total, **how)
        self._bar.update(done - self._done)
        self._done = done

    def _print_lines(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LINES):
            if self._line is not None:
                self._printed = self._stage
                self._print_line()

    def _print_line(self) -> None:
        seconds = time.monotonic() - self._started
        click.echo(f"after {seconds:.0f} s: {self._line}", err=True)

    def start_stage(self, stage: str, total: int) -> Callable[[], None]:
        """Start a stage; returns a function to call after each of its `total` steps."""
        self(stage, 0, total)
        done = itertools.count(1)
        return lambda: self(stage, next(done), total)

    def close(self) -> None:
        """End the current bar and its line; the next call starts a new one."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None

    def __enter__(self) -> Self:
        self._printer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._printer.join()
        self.close()


Show = Callable[[Any], None]


def announce_first_run(model: Model) -> None:
    """Let the model print a line on standard error before its first measurements."""
    line = "first run on this machine: a few passes are measured before the text; "
    line += "jetdraft tune measures all"
    model.parts.survey.announce = partial(click.echo, line, err=True)


def print_generation(
    source: Any, show: Show, fields: Sequence[str], as_json: bool, explain: bool
) -> int:
    """Print a `Stream` or a `Transcription`, then its stats; return the exit code.

    `show` gets each part, and None at the end. `as_json` prints `fields` of the result
    only. Ctrl-C ends the text.
    """
    code = 0
    try:
        for part in source:
            if not as_json:
                show(part)
    except KeyboardInterrupt:
        code = 130
        source.close(INTERRUPTED)
    result = source.result()
    if as_json:
        values = {name: getattr(result, name) for name in fields}
        values["stats"] = result.stats.to_json()
        # ASCII, since other encodings than UTF-8 are not JSON.
        click.echo(json.dumps(values, default=vars))
    else:
        show(None)
        click.echo(stats_line(result.stats), err=True)
    if explain:
        click.echo(explain_rounds(result.stats), err=True)
    return code


def stats_line(stats: Stats) -> str:
    """Return the line of stats that ends a generation, in brackets."""
    parts = [f"{stats.new_tokens} tokens in {stats.target_passes} passes"]
    for value, form in (
        (stats.tokens_per_pass, "{:.2f} tokens/pass"),
        (stats.acceptance_rate, "acceptance {:.2f}"),
        (stats.tokens_per_second, "{:.1f} tokens/s"),
        (stats.time_to_first_token, "first after {:.3f} s"),
        (stats.seed, "seed {}"),
        (stats.select_kv, "{} KV rows in a pass"),
    ):
        if value is not None:
            parts.append(form.format(value))
    choices = sorted(stats.rounds_by_choice.items(), key=lambda item: -item[1])
    chosen = " ".join(f"{choice} x{rounds}" for choice, rounds in choices)
    ends = [f"{stats.method}: {chosen}", stats.finish_reason]
    if stats.lossy:
        ends.append(f"lossy: {stats.lossy}")
    if stats.unseen_tokens:
        ends.append(f"the drafter saw no images ({stats.unseen_tokens} rows)")
    return f"[{', '.join(parts)}; {'; '.join(ends)}]"


def explain_rounds(stats: Stats) -> str:
    """Return lines that say what each method did, and why rounds had no draft."""
    # A method saves the time of its tokens in plain decoding, less its own time.
    lines = [f"one by one a token takes {stats.plain_ms:.1f} ms"]
    lines += ["method     rounds  drafted  accepted   tokens     saved"]
    for name, share in sorted(stats.by_method.items(), key=lambda i: -i[1].rounds):
        drafts = f"{share.drafted_tokens:8} {share.accepted_tokens:9}"
        gains = f"{share.new_tokens:8} {share.saved_ms:+8.1f} ms"
        lines.append(f"{name:10} {share.rounds:6} {drafts} {gains}")
    lines += [f"off in {rounds} of them: {why}" for why, rounds in stats.off.items()]
    return "\n".join(lines)
