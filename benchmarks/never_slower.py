"""Measures whether drafting is ever slower than plain decoding.

    python benchmarks/never_slower.py BUNDLE --prompts p.jsonl --json OUT

Also whether the controller finds the best method and length. Three workloads run in
turns in one process; the figures are ratios inside the run:

- random: prompts of random tokens, where no guess can be right, also with a drafter
  that is never right;
- code: the given prompts at T = 0 and 0.8, every fixed (method, K) against the
  adaptive ones;
- repeated: 20 requests that differ in a slot, with a store; the same 20 again; and
  once more with other words in the slot.

`plain` is exact plain decoding, whose text all exact methods write; `width 1` is the
fastest plain decoding, which only generations that are not exact may compare with.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

import jetdraft
from jetdraft.methods import Method, MethodOptions, Rows, registered
from jetdraft.runtime.proposers.draft import DraftProposer

PLAIN = {"method": "none"}
WIDTH_1 = {"method": "none", "exact": False}
AUTO = {"method": "auto"}
LENGTHS = (1, 2, 3, 4, 6, 8)

SLOTS = (
    ("parser", "reader"), ("name", "title"), ("path", "folder"), ("value", "amount"),
    ("index", "offset"), ("buffer", "stream"), ("header", "footer"), ("key", "field"),
    ("node", "leaf"), ("line", "row"), ("size", "width"), ("count", "total"),
    ("error", "warning"), ("message", "reply"), ("socket", "channel"),
    ("user", "group"), ("date", "time"), ("token", "symbol"), ("result", "answer"),
    ("mode", "state"),
)  # fmt: skip
"""A request's one slot, the first and the second time."""

REQUEST = '''class {0}Manager:
    """Keep the {0} of an object."""

    def __init__(self, {0}=None):
        self.{0} = {0}

    def get_{0}(self):
        """Return the {0}."""
'''


@dataclass
class Way:
    """Options of `generate`, and their results on each prompt."""

    name: str
    options: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)

    def run(self, model: jetdraft.Model, prompt: Any, **more: Any) -> None:
        """Decode one prompt; the first round does not count.

        The model forgets first: the way before has taught it this text.
        """
        model.forget()
        started = time.perf_counter()
        result = model.generate(token_ids=prompt, **self.options, **more)
        self.requests.append(time.perf_counter() - started)
        self.seconds.append(result.stats.decode_seconds)
        self.tokens.append(result.stats.new_tokens - result.stats.first_tokens)
        self.outputs.append(result.token_ids)

    @property
    def speed(self) -> float:
        """Tokens per second over all prompts."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def request_seconds(self) -> float:
        """The mean time of a request, from its prompt to its entry in the store."""
        return sum(self.requests) / len(self.requests)


WRONG = "wrong"


class Wrong(DraftProposer):
    """A drafter that takes its time and is never right."""

    def propose(
        self, context: Sequence[int], budget: int, parents: Sequence[int] | None = None
    ) -> Rows:
        """The drafter's tokens plus 1."""
        rows = super().propose(context, budget, parents)
        size = self.graph.contract.vocab_size
        return Rows.chain([context[-1], *((t + 1) % size for t in rows.tokens[1:])])


@contextmanager
def never_right(model: jetdraft.Model) -> Iterator[list[Way]]:
    """Ways to decode with a useless drafter, which "auto" may pick for a while too.

    None where the bundle has no drafter to spoil.
    """
    follower, curve = model.parts.follower, model.parts.curve
    if follower is None:
        yield []
        return
    ms = curve.drafts["draft"]
    method: Method[MethodOptions] = Method(
        WRONG,
        "the drafter, each token wrong",
        lambda parts, options: Wrong(follower, ms, name=WRONG),
        cost="drafter",
    )
    model.planner.acceptance.pop(WRONG, None)
    curve.drafts.pop(WRONG, None)
    with registered(method):
        yield [
            Way("never right", {"method": WRONG}),
            Way("never right, not exact", {"method": WRONG, "exact": False}),
        ]


def alternate(
    model: jetdraft.Model,
    ways: Sequence[Way],
    prompts: Sequence[Any],
    repeats: int,
    **more: Any,
) -> None:
    """Run all ways on a prompt before the next prompt, so that noise hits all alike."""
    for way in ways:
        model.generate(token_ids=prompts[0], max_new_tokens=8, **way.options)
    for _ in range(repeats):
        for prompt in prompts:
            for way in ways:
                way.run(model, prompt, ignore_eos=True, **more)


def ratios(ways: Sequence[Way]) -> list[dict[str, Any]]:
    """Each way over exact plain decoding and over width 1."""
    plain, narrow = ways[0], ways[1]
    return [
        {
            "way": way.name,
            "tokens_per_second": way.speed,
            "over_plain": way.speed / plain.speed,
            "over_width_1": way.speed / narrow.speed,
            "same_text": sum(
                a == b for a, b in zip(way.outputs, plain.outputs, strict=True)
            ),
            "texts": len(way.outputs),
            "request_seconds": way.request_seconds,
            "request_over_plain": plain.request_seconds / way.request_seconds,
        }
        for way in ways
    ]


def baselines() -> list[Way]:
    """Plain decoding both ways, and the controller both ways."""
    return [
        Way("plain", PLAIN),
        Way("width 1", WIDTH_1),
        Way("auto", AUTO),
        Way("auto, not exact", {**AUTO, "exact": False}),
    ]


def random_prompts(model: jetdraft.Model, count: int) -> list[list[int]]:
    """Prompts of random tokens."""
    random = np.random.default_rng(0)
    vocabulary = model.bundle.target.contract.vocab_size
    return [random.integers(0, vocabulary, 32).tolist() for _ in range(count)]


def measure_random(model: jetdraft.Model, repeats: int) -> dict[str, Any]:
    """The cost of drafting where no guess can be right.

    Sampled too, so that texts do not repeat themselves as a drafter could follow.
    """
    tables = {}
    for temperature in (0.0, 1.0):
        prompts = random_prompts(model, 4)
        how = {"temperature": temperature, "max_new_tokens": 96}
        with never_right(model) as useless:
            ways = [*baselines(), *useless]
            alternate(model, ways, prompts, repeats, **how)
        tables[f"T={temperature}"] = ratios(ways)
    return tables


def measure_code(
    model: jetdraft.Model, prompts: Sequence[Any], methods: Sequence[str], repeats: int
) -> dict[str, Any]:
    """The controller against every fixed method and length."""
    tables = {}
    for temperature in (0.0, 0.8):
        ways = baselines()
        ways.append(Way(",".join(methods), {"method": ",".join(methods)}))
        for method in methods:
            for length in LENGTHS:
                if method != "stream" or length <= model.parts.target.contract.streams:
                    options = {"method": method, "num_draft_tokens": length}
                    ways.append(Way(f"{method} {length}", options))
        settings = {"temperature": temperature, "max_new_tokens": 96}
        alternate(model, ways, prompts, repeats, **settings)
        tables[f"T={temperature}"] = ratios(ways)
    return tables


def measure_repeated(bundle: Path) -> dict[str, Any]:
    """Requests that come again with one slot changed; the store is new."""
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        model = jetdraft.load(bundle, store=Path(folder) / "store.sqlite")
        for number, when in ((0, "first pass"), (0, "again"), (1, "slot changed")):
            ways = [Way("plain", PLAIN), Way("width 1", WIDTH_1)]
            ways += [Way(m, {"method": m}) for m in ("lookup", "auto", "recall")]
            for way in ways:
                model.generate(token_ids=[1, 2, 3], max_new_tokens=8, **way.options)
            prompts = [model.prompt(REQUEST.format(slot[number])) for slot in SLOTS]
            # What one way was answered must not help the next: only the last one's
            # responses are kept.
            parts = model.parts
            keep = parts.remember
            for prompt in prompts:
                for way in ways:
                    parts.remember = keep if way is ways[-1] else lambda *entry: None
                    way.run(model, prompt, ignore_eos=True, max_new_tokens=96)
            parts.remember = keep
            tables[when] = ratios(ways)
    return tables


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    click.echo(f"\n{title}\n")
    click.echo("| way | tokens/s | over plain | over width 1 | whole request | same |")
    click.echo("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        click.echo(
            f"| {row['way']} | {row['tokens_per_second']:.1f} "
            f"| {row['over_plain']:.3f} | {row['over_width_1']:.3f} "
            f"| {row['request_over_plain']:.3f} "
            f"| {row['same_text']} of {row['texts']} |"
        )


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
@click.option("--methods", default="draft,lookup,trigram", show_default=True)
@click.option("--repeats", default=2, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundle: Path, prompts: Path, methods: str, repeats: int, output: Path | None
) -> None:
    """Measure all three workloads on BUNDLE."""
    model = jetdraft.load(bundle)
    lines = prompts.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    ids = [model.prompt(text) for text in texts]
    report = {
        "machine": model.parts.profiles.machine,
        "random": measure_random(model, repeats),
        "code": measure_code(model, ids, methods.split(","), repeats),
        "repeated": measure_repeated(bundle),
    }
    for workload in ("random", "code", "repeated"):
        for setting, rows in report[workload].items():
            show(f"{workload}, {setting}", rows)
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
