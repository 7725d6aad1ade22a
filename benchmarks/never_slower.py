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

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import PLAIN, WIDTH_1, Prompt, Way, alternate, read_prompts, show, write

import jetdraft
from jetdraft.methods import (
    Chooser,
    Method,
    MethodOptions,
    Proposer,
    Rows,
    Seen,
    methods,
    registered,
)

AUTO = {"method": "auto"}
LONG = {"max_new_tokens": 96, "ignore_eos": True}
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

WRONG = "wrong"


class Wrong(Proposer):
    """A drafter that takes its time and is never right: its tokens plus 1."""

    def __init__(self, drafter: Proposer, vocab_size: int) -> None:
        self.drafter, self.vocab_size = drafter, vocab_size
        self.traits = replace(drafter.traits, name=WRONG)

    @property
    def session_seconds(self) -> float:
        """The drafter's."""
        return self.drafter.session_seconds

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """The drafter begins."""
        self.drafter.begin(prompt, chooser)

    def observe(self, seen: Seen) -> None:
        """The drafter observes."""
        self.drafter.observe(seen)

    def catch_up(self, context: Sequence[int]) -> None:
        """The drafter catches up."""
        self.drafter.catch_up(context)

    def propose(
        self, context: Sequence[int], budget: int, parents: Sequence[int] | None = None
    ) -> Rows:
        """What the drafter does not propose."""
        root, *tokens = self.drafter.propose(context, budget).tokens
        return Rows.chain([root, *((token + 1) % self.vocab_size for token in tokens)])


@contextmanager
def never_right(model: jetdraft.Model) -> Iterator[list[Way]]:
    """Ways to decode with a useless drafter, which "auto" may pick for a while too.

    None where the bundle has no drafter to spoil.
    """
    if "draft" not in model.methods:
        yield []
        return
    draft, size = methods()["draft"], model.bundle.target.contract.vocab_size
    method: Method[MethodOptions] = Method(
        WRONG,
        "the drafter, each token wrong",
        lambda bundle, options: Wrong(draft.make(bundle, draft.options()), size),
        cost="drafter",
    )
    model.planner.acceptance.pop(WRONG, None)
    with registered(method):
        yield [
            Way("never right", model, {"method": WRONG}),
            Way("never right, not exact", model, {"method": WRONG, "exact": False}),
        ]


def baselines(model: jetdraft.Model) -> list[Way]:
    """Plain decoding both ways, and the controller both ways."""
    return [
        Way("plain", model, PLAIN),
        Way("width 1", model, WIDTH_1),
        Way("auto", model, AUTO),
        Way("auto, not exact", model, {**AUTO, "exact": False}),
    ]


def figures(ways: Sequence[Way]) -> list[dict[str, Any]]:
    """Each way beside exact plain decoding and width 1."""
    return [way.figures(plain=ways[0], narrow=ways[1]) for way in ways]


def measure_random(model: jetdraft.Model, repeats: int) -> dict[str, Any]:
    """The cost of drafting where no guess can be right.

    Sampled too, so that texts do not repeat themselves as a drafter could follow.
    """
    tables, random = {}, np.random.default_rng(0)
    size = model.bundle.target.contract.vocab_size
    prompts = [{"token_ids": random.integers(0, size, 32).tolist()} for _ in range(4)]
    for temperature in (0.0, 1.0):
        with never_right(model) as useless:
            ways = [*baselines(model), *useless]
            alternate(ways, prompts, repeats, temperature=temperature, **LONG)
        tables[f"T={temperature}"] = figures(ways)
    return tables


def measure_code(
    model: jetdraft.Model, prompts: Sequence[Prompt], names: Sequence[str], repeats: int
) -> dict[str, Any]:
    """The controller against every fixed method and length."""
    tables, together = {}, ",".join(names)
    streams = model.parts.target.contract.streams
    for temperature in (0.0, 0.8):
        ways = [*baselines(model), Way(together, model, {"method": together})]
        for name in names:
            for length in LENGTHS:
                if name != "stream" or length <= streams:
                    options = {"method": name, "num_draft_tokens": length}
                    ways.append(Way(f"{name} {length}", model, options))
        alternate(ways, prompts, repeats, temperature=temperature, **LONG)
        tables[f"T={temperature}"] = figures(ways)
    return tables


def measure_repeated(bundle: Path) -> dict[str, Any]:
    """Requests that come again with one slot changed; the store is new."""
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        model = jetdraft.load(bundle, store=Path(folder) / "store.sqlite")
        parts, keep = model.parts, model.parts.remember
        for number, when in ((0, "first pass"), (0, "again"), (1, "slot changed")):
            ways = [Way("plain", model, PLAIN), Way("width 1", model, WIDTH_1)]
            ways += [Way(m, model, {"method": m}) for m in ("lookup", "auto", "recall")]
            for way in ways:
                model.generate(token_ids=[1, 2, 3], max_new_tokens=8, **way.options)
            # What one way was answered must not help the next: only the last way's
            # responses are kept.
            for slot in SLOTS:
                for way in ways:
                    parts.remember = keep if way is ways[-1] else lambda *entry: None
                    way.run({"prompt": REQUEST.format(slot[number])}, **LONG)
            parts.remember = keep
            tables[when] = figures(ways)
    return tables


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
    model, names = jetdraft.load(bundle), methods.split(",")
    report = {
        "machine": model.parts.profiles.machine,
        "random": measure_random(model, repeats),
        "code": measure_code(model, read_prompts(prompts), names, repeats),
        "repeated": measure_repeated(bundle),
    }
    for workload in ("random", "code", "repeated"):
        for setting, rows in report[workload].items():
            cells = [
                {
                    "way": row["way"],
                    "tokens/s": f"{row['tokens_per_second']:.1f}",
                    "over plain": f"{row['over_plain']:.3f}",
                    "over width 1": f"{row['over_width_1']:.3f}",
                    "whole request": f"{row['request_over_plain']:.3f}",
                    "same text": f"{row['same_text']} of {row['texts']}",
                }
                for row in rows
            ]
            show(f"{workload}, {setting}", cells)
    write(report, output)


if __name__ == "__main__":
    main()
