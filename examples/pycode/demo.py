"""The same completion, decoded plainly and speculatively.

python examples/pycode/demo.py bundles/pycode
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import click

import jetdraft

PROMPT = '''class Stack:
    """A last-in, first-out container."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
        self._items.append(item)

    def pop(self):
'''
REPEATS = 5


def decode(model: jetdraft.Model, **options: Any) -> tuple[jetdraft.Result, float]:
    """The text, and the median of its decoding speeds in tokens per second."""
    runs = [
        model.generate(PROMPT, max_new_tokens=96, ignore_eos=True, **options)
        for _ in range(REPEATS)
    ]
    speeds = [run.stats.tokens_per_second or 0.0 for run in runs]
    return runs[-1], statistics.median(speeds)


@click.command()
@click.argument("bundle")
def main(bundle: str) -> None:
    """Compare plain and speculative decoding of one prompt over BUNDLE.

    Exits with 1 if an exact way gives another text.
    """
    model = jetdraft.load(bundle)
    ways: dict[str, dict[str, Any]] = {
        "plain (width 1, not exact)": {"method": "none", "exact": False},
        "plain": {"method": "none"},
        "draft, 2 tokens": {"method": "draft", "num_draft_tokens": 2},
        "draft, 4 tokens": {"method": "draft", "num_draft_tokens": 4},
        "lookup, 4 tokens": {"method": "lookup", "num_draft_tokens": 4},
        "auto": {"method": "auto"},
    }
    results = {name: decode(model, **options) for name, options in ways.items()}
    plain, _ = results["plain"]
    _, fastest = results["plain (width 1, not exact)"]
    click.echo(click.style(PROMPT, dim=True) + plain.text + "\n")
    click.echo(f"{'':28}{'tokens/s':>9}{'speed-up':>9}{'tokens/pass':>12}  same text")
    for name, (result, speed) in results.items():
        same = "yes" if result.token_ids == plain.token_ids else "NO"
        click.echo(
            f"{name:28}{speed:9.1f}{speed / fastest:8.2f}x"
            f"{result.stats.tokens_per_pass:12.2f}  {same}"
        )
    click.echo(
        "\nA pass of this small target takes about as long as a few drafter passes, so "
        "the drafter\ngains little or loses here; docs/heads.md has figures with a "
        "target of 400 M."
    )
    exact = [results[name][0] for name, way in ways.items() if way.get("exact", True)]
    if any(result.token_ids != plain.token_ids for result in exact):
        sys.exit("error: the texts differ")


if __name__ == "__main__":
    main()
