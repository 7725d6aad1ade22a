"""How often each verifier accepts, on the trained pair, and how much is left to gain.

For contexts out of held-out prompts it takes the target's p and the drafter's q after
the same temperature. Where a closed form exists it is used; otherwise drafts are drawn,
and each counts with its exact chance of acceptance.

    python benchmarks/verifiers.py bundles/pycode
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import jetdraft
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.sampling import rejection

Doubles = npt.NDArray[np.float64]
MOST = 8
HERE = Path(__file__).parent


def logits_of(graph: Graph, ids: list[int]) -> Doubles:
    """Logits float64 [length, vocab] of all rows of a text."""
    graph.cache.rewind(0)
    rows = [graph.run(ids[:64]).logits.copy()]
    graph.cache.advance(64)
    rows.append(graph.run(ids[64:128]).logits.copy())
    graph.cache.rewind(0)
    return np.concatenate(rows).astype(np.float64)


def softmax(logits: Doubles, temperature: float) -> Doubles:
    """Probabilities at a temperature."""
    scaled = logits / temperature
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def bound_replaced(p: Doubles, q: Doubles, k: int) -> float:
    """The optimum for k independent drafts (2502.18779): prefixes by q / p."""
    order = np.argsort(-q / np.maximum(p, 1e-300))
    return 1.0 + min(0.0, float((p[order].cumsum() - q[order].cumsum() ** k).min()))


def bound_distinct(p: Doubles, q: Doubles, draws: npt.NDArray[np.int64]) -> float:
    """The optimum for drafts without replacement, whose law `draws` [n, k] sample."""
    if draws.shape[1] == 1:
        return bound_replaced(p, q, 1)
    order = np.argsort(-q / np.maximum(p, 1e-300))
    rank = np.empty(len(p), np.int64)
    rank[order] = np.arange(len(p))
    worst = np.bincount(rank[draws].max(axis=1), minlength=len(p)) / len(draws)
    return 1.0 + min(0.0, float((p[order].cumsum() - worst.cumsum()).min()))


def accepted(pi: Doubles, children: list[int]) -> float:
    """The chance that the chosen token is among the children."""
    return float(pi[sorted(set(children))].sum())


def rates(
    p: Doubles, q: Doubles, random: np.random.Generator, draws: int
) -> dict[str, list[float]]:
    """Acceptance for k = 1..MOST children, by verifier."""
    noise = random.gumbel(size=(draws, len(p)))
    with np.errstate(divide="ignore"):
        scores = np.log(q) + noise
        chosen = (np.log(p) + noise).argmax(axis=1)
    distinct = np.argsort(-scores, axis=1)[:, :MOST]
    replaced = random.choice(len(q), size=(draws, MOST), p=q)
    best = np.argsort(-q)
    found: dict[str, list[float]] = {}
    for k in range(1, MOST + 1):
        alone = np.isin(distinct[:, :k] - chosen[:, None], 0).any(axis=1)
        fixed = best[: k - 1]
        rest = q.copy()
        rest[fixed] = 0.0
        rest /= rest.sum()
        few = range(min(draws, 24))
        values = {
            "coupled, walk": alone.mean(),
            "drafter's top k, walk": p[best[:k]].sum(),
            "independent, walk": _some(p, replaced[:, :k]),
            "recursive, replaced": np.mean(
                [
                    accepted(rejection.recursive(p, q, x, True), x)
                    for x in (replaced[i, :k].tolist() for i in few)
                ]
            ),
            "recursive, distinct": np.mean(
                [
                    accepted(rejection.recursive(p, q, x, False), x)
                    for x in (distinct[i, :k].tolist() for i in few)
                ]
            ),
            "k-seq": _sequential(p, q, k),
            "greedy-plus-one": p[fixed].sum() + np.minimum(p, rest).sum(),
            "bound, replaced": bound_replaced(p, q, k),
            "bound, distinct": bound_distinct(p, q, distinct[:, :k]),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(float(value))
    return found


def _some(p: Doubles, drafts: npt.NDArray[np.int64]) -> float:
    return float(np.mean([p[np.unique(row)].sum() for row in drafts[:200]]))


def _sequential(p: Doubles, q: Doubles, k: int) -> float:
    rho = rejection._threshold(p, q, k)
    return float(1.0 - (1.0 - np.minimum(p / rho, q).sum()) ** k)


@click.command()
@click.argument("bundle")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    default=HERE.parent / "examples/pycode/prompts.jsonl",
)
@click.option("--temperatures", default="0.5,0.7,1.0,1.2", show_default=True)
@click.option("--every", default=24, show_default=True, help="Take each n-th row.")
@click.option("--draws", default=400, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundle: str,
    prompts: Path,
    temperatures: str,
    every: int,
    draws: int,
    output: Path | None,
) -> None:
    """Print a table per temperature."""
    model = jetdraft.load(bundle)
    target, drafter = model.parts.target, model.parts.drafter
    if drafter is None:
        raise click.UsageError(f"{bundle} has no drafter")
    contexts: list[tuple[Doubles, Doubles]] = []
    for line in prompts.read_text().splitlines():
        ids = model.prompt(json.loads(line)["prompt"])[:128].tolist()
        both = [logits_of(graph, ids) for graph in (target, drafter)]
        contexts += [(both[0][i], both[1][i]) for i in range(32, len(ids), every)]
    report: dict[str, Any] = {"contexts": len(contexts), "draws": draws}
    for temperature in map(float, temperatures.split(",")):
        random = np.random.default_rng(0)
        all_rates = [
            rates(softmax(t, temperature), softmax(d, temperature), random, draws)
            for t, d in contexts
        ]
        names = all_rates[0]
        table = {name: np.mean([r[name] for r in all_rates], 0) for name in names}
        report[str(temperature)] = {n: v.tolist() for n, v in table.items()}
        click.echo(f"\nT = {temperature}, {len(contexts)} contexts\n")
        click.echo("| verifier | " + " | ".join(map(str, range(1, MOST + 1))) + " |")
        click.echo("| --- " * (MOST + 1) + "|")
        for name, values in table.items():
            cells = " | ".join(f"{value:.3f}" for value in values)
            click.echo(f"| {name} | {cells} |")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
