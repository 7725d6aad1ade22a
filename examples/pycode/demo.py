"""Two completions, decoded plainly and speculatively.

python examples/pycode/demo.py bundles/pycode
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import click

import jetdraft

PROMPTS = {
    "A text that repeats itself": '''class Circle:
    """A circle with a centre and a radius."""

    @property
    def x(self):
        """Return the x coordinate."""
        return self._x

    @property
    def y(self):
        """Return the y coordinate."""
        return self._y

    @property
    def radius(self):
''',
    "A text that repeats itself less": '''class Stack:
    """A last-in, first-out container."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
        self._items.append(item)

    def pop(self):
''',
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "plain, not exact": {"method": "none", "exact": False},
    "auto": {"method": "auto"},
    "lookup, 4 tokens": {"method": "lookup", "num_draft_tokens": 4},
    "draft, 4 tokens": {"method": "draft", "num_draft_tokens": 4},
}
REPEATS, SHOWN_CHARACTERS = 5, 300


def compare(model: jetdraft.Model, prompt: str) -> bool:
    """Print a text, and the median speed of each way; whether the texts are equal."""
    speeds: dict[str, list[float]] = {name: [] for name in WAYS}
    results: dict[str, jetdraft.Result] = {}
    for _ in range(REPEATS):  # in turns, since other programs come and go
        for name, way in WAYS.items():
            result = model.generate(prompt, max_new_tokens=192, ignore_eos=True, **way)
            results[name] = result
            speeds[name].append(result.stats.tokens_per_second or 0.0)
    plain, medians = (
        results["plain"],
        {n: statistics.median(s) for n, s in speeds.items()},
    )
    click.echo(f"{click.style(prompt, dim=True)}{plain.text[:SHOWN_CHARACTERS]} ...\n")
    click.echo(f"{'':18}{'tokens/s':>9}{'speed-up':>9}{'tokens/pass':>12}  same text")
    fastest = max(medians["plain"], medians["plain, not exact"])
    for name, result in results.items():
        same = "yes" if result.token_ids == plain.token_ids else "NO"
        click.echo(
            f"{name:18}{medians[name]:9.0f}{medians[name] / fastest:8.2f}x"
            f"{result.stats.tokens_per_pass:12.2f}  {same}"
        )
    exact = [results[name] for name, way in WAYS.items() if way.get("exact", True)]
    return all(result.token_ids == plain.token_ids for result in exact)


@click.command()
@click.argument("bundle")
def main(bundle: str) -> None:
    """Compare plain and speculative decoding of two prompts over BUNDLE.

    Exits with 1 if an exact way gives another text.
    """
    model = jetdraft.load(bundle)
    equal = True
    for kind, prompt in PROMPTS.items():
        click.secho(f"\n{kind}\n", bold=True)
        equal &= compare(model, prompt)
    click.echo(
        "\nThe model is a toy of 13 M weights, which says little and repeats much; "
        "README.md and\ndocs/drafting.md have figures of real models, losing ones too."
    )
    if not equal:
        sys.exit("error: the texts differ")


if __name__ == "__main__":
    main()
