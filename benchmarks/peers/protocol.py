"""The one protocol that every peer is measured by.

Greedy or sampled decoding of exactly `max_new_tokens` tokens, end-of-text banned,
methods interleaved per prompt. Decode time runs from the first generated token to the
last, so a round counts `max_new_tokens - 1` tokens per prompt. A peer that hands over
its first round in one burst gains up to K tokens per prompt, about 1% of 96.
"""

import hashlib
import json
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click
from tokenizers import Tokenizer

WIDTHS = (1, 2, 3, 4, 5, 8)
PASS_REPEATS = 15
HERE = Path(__file__).parent
Command = Callable[..., None]


@dataclass(frozen=True)
class Options:
    """What the command line asks for; the same for every peer."""

    target: Path
    drafter: Path | None
    prompts: Path
    max_new_tokens: int
    threads: int
    num_draft_tokens: tuple[int, ...]
    repeats: int
    json: Path
    cache: Path
    temperature: float = 0.0
    methods: str = "plain,draft,lookup,adaptive"

    def capacity(self) -> int:
        """Tokens that the longest prompt and its continuation need, with slack."""
        longest = max(len(prompt) for prompt in read_prompts(self))
        return longest + self.max_new_tokens + 32


@dataclass(frozen=True)
class Method:
    """A way to decode: "plain", "draft" or "lookup", with K drafted tokens."""

    name: str
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class Decoding:
    """One continuation of `count` tokens; `output` is compared with plain decoding's.

    `passes` counts target passes after the first token. `first_seconds` is the time
    from the request to the first token.
    """

    output: object
    count: int
    seconds: float
    first_seconds: float
    passes: int | None = None


class Peer(Protocol):
    """A tool under test."""

    tool: str
    version: str

    def methods(self) -> list[Method]:
        """Every way to decode that was asked for, plain first."""

    def decode(self, method: Method, prompt: list[int]) -> Decoding:
        """Continue `prompt` greedily by exactly `max_new_tokens` tokens."""

    def pass_ms(self, prompt: list[int]) -> dict[int, float]:
        """Median time of a target pass after `prompt` by width; empty if unknown."""


class Clock:
    """Remembers the tokens of one continuation and when they came."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._started = time.perf_counter()
        self._times: list[float] = []

    def add(self, token_ids: Sequence[int]) -> None:
        """Note tokens that have just become available."""
        self._times.append(time.perf_counter())
        self.token_ids.extend(token_ids)

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self._times[-1] - self._times[0]

    def decoding(self, passes: int | None) -> Decoding:
        """What was remembered."""
        ids, first = self.token_ids, self._times[0] - self._started
        return Decoding(ids, len(ids), self.seconds, first, passes)


def options(function: Command) -> Command:
    """Add the command line that all peers share."""
    folder = click.Path(exists=True, file_okay=False, path_type=Path)
    file = click.Path(dir_okay=False, path_type=Path)
    for option in reversed(
        [
            click.option("--target", type=folder, required=True),
            click.option("--drafter", type=folder),
            click.option("--prompts", type=file, required=True),
            click.option("--max-new-tokens", default=96, show_default=True),
            click.option("--threads", default=2, show_default=True),
            click.option("--num-draft-tokens", default="1,2,3,4", show_default=True),
            click.option("--repeats", default=3, show_default=True),
            click.option("--temperature", default=0.0, show_default=True),
            click.option("--methods", default=Options.methods, show_default=True),
            click.option("--json", type=file, required=True),
            click.option(
                "--cache",
                type=click.Path(path_type=Path),
                default=HERE.parent / "cache",
            ),
        ]
    ):
        function = option(function)
    return function


def methods(options: Options, *more: Method) -> list[Method]:
    """Plain, both proposers at each K, and `more`, as far as they are asked for."""
    names, widths = options.methods.split(","), options.num_draft_tokens
    proposers = ["draft", "lookup"] if options.drafter is not None else ["lookup"]
    drafting = [Method(name, width) for name in proposers for width in widths]
    return [m for m in (Method("plain"), *drafting, *more) if m.name in names]


def parse(num_draft_tokens: str, cache: Path, **values: Any) -> Options:
    """Turn the shared command line into Options."""
    widths = tuple(int(width) for width in num_draft_tokens.split(","))
    return Options(num_draft_tokens=widths, cache=cache.absolute(), **values)


def not_installed(peer: str) -> click.ClickException:
    """The error that says how to install a peer."""
    file = f"benchmarks/peers/requirements-{peer}.txt"
    return click.ClickException(f"{peer} is not installed: pip install -r {file}")


def read_prompts(options: Options) -> list[list[int]]:
    """Token ids of every prompt; text goes through the target's tokenizer."""
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    lines = options.prompts.read_text().splitlines()
    prompts = [json.loads(line) for line in lines if line.strip()]
    return [
        prompt.get("token_ids") or tokenizer.encode(prompt["prompt"]).ids
        for prompt in prompts
    ]


def built(
    options: Options, checkpoint: Path, variant: str, build: Callable[[Path], None]
) -> Path:
    """The cached conversion of `checkpoint`, made by `build` if it is not there."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for file in sorted(checkpoint.glob("*.safetensors")):
        digest.update(hashlib.file_digest(file.open("rb"), "sha256").digest())
    name = f"{checkpoint.resolve().name}-{digest.hexdigest()[:12]}-{variant}"
    folder = options.cache / name
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        build(partial)
        partial.rename(folder)
    return folder


def call(command: list[str]) -> str:
    """Run a converter, quietly unless it fails; return what it printed."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def median_ms(run: Callable[[], None], reset: Callable[[], None]) -> float:
    """Median milliseconds of `run` over a few calls, with `reset` untimed before."""
    times = []
    for _ in range(PASS_REPEATS):
        reset()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e3


def run(load: Callable[[], Peer], options: Options) -> None:
    """Measure every method of a peer, print the table and write the JSON file."""
    prompts = read_prompts(options)
    started = time.perf_counter()
    peer = load()
    load_seconds = time.perf_counter() - started
    for method in peer.methods():
        peer.decode(method, prompts[0])
    rounds: dict[Method, list[list[Decoding]]] = {m: [] for m in peer.methods()}
    for _ in range(options.repeats):
        for decodings in rounds.values():
            decodings.append([])
        for prompt in prompts:
            for method, decodings in rounds.items():
                decodings[-1].append(_decode(peer, method, prompt, options))
    plain = next(iter(rounds.values()))[0]
    rows = [_row(peer, method, d, plain, options) for method, d in rounds.items()]
    report = {
        "tool": peer.tool,
        "version": peer.version,
        "threads": options.threads,
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "load_seconds": load_seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "pass_ms": peer.pass_ms(prompts[0]),
        "rows": rows,
    }
    options.json.write_text(json.dumps(report) + "\n")
    _print(report)


def _decode(
    peer: Peer, method: Method, prompt: list[int], options: Options
) -> Decoding:
    decoding = peer.decode(method, prompt)
    if decoding.count != options.max_new_tokens:
        raise click.ClickException(
            f"{method} wrote {decoding.count} tokens: not comparable."
        )
    return decoding


def _row(
    peer: Peer,
    method: Method,
    rounds: list[list[Decoding]],
    plain: list[Decoding],
    options: Options,
) -> dict[str, Any]:
    first = rounds[0]
    counted = len(first) * (options.max_new_tokens - 1)
    speeds = [counted / sum(d.seconds for d in decodings) for decodings in rounds]
    same = [a.output == b.output for a, b in zip(first, plain, strict=True)]
    row = {"tool": peer.tool, "version": peer.version, "method": method.name}
    passes = [d.passes for d in first if d.passes]
    return row | {
        "num_draft_tokens": method.num_draft_tokens,
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_by_repeat": speeds,
        "by_prompt": [(d.count - 1) / d.seconds for d in first],
        "tokens_per_pass": counted / sum(passes) if len(passes) == len(first) else None,
        "same_text_as_plain": sum(same),
        "of_prompts": len(same),
        "time_to_first_token": statistics.median(d.first_seconds for d in first),
        "outputs": [d.output for d in first],
    }


def _print(report: dict[str, Any]) -> None:
    click.echo(f"{report['tool']} {report['version']}, {report['threads']} threads")
    click.echo("method     K   tokens/s  tokens/pass  same text")
    for row in report["rows"]:
        per_pass = f"{row['tokens_per_pass']:.2f}" if row["tokens_per_pass"] else "-"
        click.echo(
            f"{row['method']:9}{row['num_draft_tokens']:3}"
            f"{row['tokens_per_second']:11.1f}{per_pass:>13}"
            f"{row['same_text_as_plain']:7} of {row['of_prompts']}"
        )
    passes = (f"{width}: {ms:.1f}" for width, ms in report["pass_ms"].items())
    click.echo("pass ms by width  " + ", ".join(passes))
