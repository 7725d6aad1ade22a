"""Measures a GPU in one run: equality of texts, kernels, passes, speed-ups.

    python benchmarks/gpu.py TARGET DRAFTER --prompts examples/pycode/prompts.jsonl \
        --provider cuda --json gpu.json

TARGET is a checkpoint large enough to time (benchmarks/inflate.py), DRAFTER its trained
drafter. Each part is written to the JSON file as soon as it is done; a part that fails
is noted with its reason and the others go on. `--provider cpu` runs all parts without a
GPU, which shows only that the script works.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from kernels import Bench, Shape, table

import jetdraft
from jetdraft.bench import benchmark
from jetdraft.devices.detection import detect_machine
from jetdraft.devices.providers import PROVIDERS, try_provider
from jetdraft.ort import ort
from jetdraft.recipe import Recipe
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.session import Captures

WIDTHS = (1, 2, 3, 4, 5, 8, 16, 32, 64)
TURNS = 15
GAP_TOKENS = 96
TEMPERATURES = (0.0, 0.8)


class Eager(Captures):
    """Captures nothing, so every run is eager."""

    def run_options(self, key: Any) -> ort.RunOptions:
        """The options of a pass that never repeats."""
        return super().run_options(None)


@dataclass(frozen=True)
class Run:
    """The settings that all parts share."""

    target: Path
    drafter: Path
    prompts: list[str]
    prompts_file: Path
    provider: str
    max_new_tokens: int
    context: int
    work: Path
    recipe: Recipe

    @property
    def dtype(self) -> str:
        """The dtype of the provider's bundles."""
        return PROVIDERS[self.provider].dtype

    def bundle(self, name: str, **options: Any) -> Path:
        """A bundle of the pair, exported when first asked for."""
        from jetdraft.export.exporter import ExportOptions, export

        output = self.work / name
        if not output.exists():
            click.echo(f"exporting {name}", err=True)
            capacity = 2 * (self.context + self.max_new_tokens)
            made = ExportOptions(capacity=max(capacity, 512), max_width=128, **options)
            export(str(self.target), output, str(self.drafter), made)
        return output

    @property
    def own(self) -> Path:
        """The bundle for the provider."""
        return self.bundle("own", recipe=self.recipe, provider=self.provider)


def machine(run: Run) -> dict[str, Any]:
    """The machine, versions and target of the figures."""
    state = try_provider(run.provider)
    return {
        **asdict(replace(detect_machine(), device=None, jetpack=None)),
        "onnxruntime": ort.__version__,
        "providers": ort.get_available_providers(),
        "provider": asdict(state),
        "target": str(run.target),
        "recipe": run.recipe.name,
        "dtype": run.dtype,
        "prompts": len(run.prompts),
        "max_new_tokens": run.max_new_tokens,
        "context": run.context,
    }


def text(run: Run) -> dict[str, Any]:
    """Texts and logits of the provider against the CPU provider, on the same bundle."""
    report = {}
    whole = {"recipe": Recipe("none"), "flavour": "standard", "dtype": "fp32"}
    for name, path in {
        "fp32 standard": run.bundle("fp32-standard", **whole),
        run.dtype: run.own,
    }.items():
        one = jetdraft.load(path, provider=run.provider)
        other = jetdraft.load(path, provider="cpu")
        report[name] = {
            "largest logit gap": gap(one, other, run.prompts[0]),
            "first difference by prompt": [
                difference(one, other, prompt, run.max_new_tokens)
                for prompt in run.prompts[:4]
            ],
            "methods that differ from plain": differing(one, run),
            "exact widths": one.parts.widths.exact,
            "trees agree": one.parts.widths.trees_agree,
        }
    return report


def gap(one: jetdraft.Model, other: jetdraft.Model, prompt: str) -> float:
    """The largest difference of a logit over the same tokens."""
    tokens = one.prompt(prompt).tolist()[:GAP_TOKENS]
    logits = []
    for model in (one, other):
        model.parts.target.cache.rewind(0)
        logits.append(model.parts.target.run(tokens).logits.copy())
    return float(np.abs(logits[0] - logits[1]).max())


def difference(
    one: jetdraft.Model, other: jetdraft.Model, prompt: str, count: int
) -> int | None:
    """The first token at which two plain texts differ; None if they are equal."""
    texts = [m.generate(prompt, method="none", max_new_tokens=count).token_ids
             for m in (one, other)]  # fmt: skip
    pairs = zip(*texts, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def differing(model: jetdraft.Model, run: Run) -> list[str]:
    """Methods whose text differs from plain decoding on the same provider."""
    wrong = []
    for temperature in TEMPERATURES:
        settings: dict[str, Any] = {
            "max_new_tokens": run.max_new_tokens,
            "temperature": temperature,
            "seed": 0,
        }
        for prompt in run.prompts[:2]:
            plain = model.generate(prompt, method="none", **settings).token_ids
            for method in ("draft", "lookup", "auto"):
                if model.generate(prompt, method=method, **settings).token_ids != plain:
                    wrong.append(f"{method} at {temperature}")
    return wrong


def passes(run: Run) -> dict[str, Any]:
    """Milliseconds by width: chain and tree graphs, CUDA graphs on and off."""
    model = jetdraft.load(run.own, provider=run.provider)
    graph, captures = model.parts.target, model.parts.target.captures
    times: dict[str, Any] = {}
    for name, mode in {"captured": captures, "eager": captures and Eager()}.items():
        if captures is None and name == "captured":
            continue
        graph.captures = mode
        for branching in (False, True):
            kind = "tree" if branching else "chain"
            times[f"{kind}, {name}"] = curve(graph, run.context, branching)
    graph.captures = captures
    times["drafter"] = curve(model.parts.drafter, run.context, False)
    times["host ms beside a pass"] = host_ms(graph, run.context)
    return times


def curve(graph: Graph | None, context: int, branching: bool) -> dict[int, float]:
    """The median pass time in ms at each width, after `context` rows."""
    if graph is None:
        return {}
    fill(graph, context)
    found = {}
    for width in WIDTHS:
        tokens = list(range(1, width + 1))
        depths, seen = [0] + [1] * (width - 1), [[], *[[0]] * (width - 1)]
        times = []
        for _ in range(TURNS + 3):
            before = graph.seconds
            if branching:
                graph.run_branches(tokens, depths, seen)
            else:
                graph.run(tokens)
            times.append(graph.seconds - before)
        found[width] = round(1e3 * statistics.median(times[3:]), 4)
    graph.cache.rewind(0)
    return found


def fill(graph: Graph, context: int) -> None:
    """Commit `context` rows."""
    graph.cache.rewind(0)
    while graph.cache.length < context:
        rows = min(graph.contract.max_width, context - graph.cache.length)
        graph.run([1] * rows, last_only=True)
        graph.cache.advance(rows)


def host_ms(graph: Graph, context: int) -> float:
    """The time of `Graph.run` outside of the session, in ms at width 4."""
    fill(graph, context)
    times = []
    for _ in range(TURNS):
        start, before = time.perf_counter(), graph.seconds
        graph.run([1, 2, 3, 4])
        times.append(time.perf_counter() - start - (graph.seconds - before))
    graph.cache.rewind(0)
    return round(1e3 * statistics.median(times), 4)


def kernels(run: Run) -> dict[str, Any]:
    """Single kernels by width, at the sizes of an 8 B model's layer."""
    dtype = {"fp16": "float16", "fp32": "float32"}[run.dtype]
    shape = Shape() if run.provider != "cpu" else Shape(hidden=1024, intermediate=2048)
    bench = Bench(run.provider, dtype)
    times = table(bench, [w for w in WIDTHS if w in (1, 2, 4, 8, 16, 64)], shape)
    return {"shape": asdict(shape), "GB/s": bench.bandwidth(), **times}


def placement(run: Run) -> dict[str, Any]:
    """The drafter beside the target, on the CPU, and off: tokens per second."""
    found: dict[str, Any] = {}
    for where in (run.provider, "cpu", "off"):
        model = jetdraft.load(run.own, provider=run.provider, drafter_provider=where)
        methods = ["draft"] if where != "off" else []
        found[where] = rates(model, run, methods, (3, 5))
    return found


def speed(run: Run) -> dict[str, Any]:
    """Methods against the fastest plain decoding, and that against the memory."""
    model = jetdraft.load(run.own, provider=run.provider)
    found: dict[str, Any] = {
        f"T = {temperature:g}": rates(
            model, run, ["draft", "lookup", "auto"], (1, 2, 3, 5, 7), temperature
        )
        for temperature in TEMPERATURES
    }
    # The size includes the embedding, of which a pass reads one row only, so the floor
    # is a little high.
    size = (run.own / "target.onnx.data").stat().st_size
    model.parts.target.prepare(exact=True)
    gbs = Bench(run.provider, "float16" if run.dtype == "fp16" else "float32")
    floor = size / gbs.bandwidth() / 1e6
    width1 = next(iter(curve(model.parts.target, run.context, False).values()))
    return {**found, "weights MB": size / 1e6, "floor ms": floor, "pass ms": width1,
            "pass over floor": width1 / floor}  # fmt: skip


def rates(
    model: jetdraft.Model,
    run: Run,
    methods: list[str],
    lengths: tuple[int, ...],
    temperature: float = 0.0,
) -> dict[str, float]:
    """The median tokens per second of every contender."""
    rows = benchmark.make_contenders(model, methods, lengths)
    prompts = [model.prompt(prompt) for prompt in run.prompts]
    options: dict[str, Any] = {
        "max_new_tokens": run.max_new_tokens,
        "temperature": temperature,
    }
    benchmark.run(model, rows, prompts, 2, lambda: None, **options)
    return {
        f"{row.method} {row.num_draft_tokens or ''}".strip()
        + ("" if row.exact else " not exact"): statistics.median(row.speeds())
        for row in rows
    }


def transformers(run: Run) -> Any:
    """transformers' assisted generation on the same prompts and device."""
    output = run.work / "transformers.json"
    device = "cpu" if run.provider == "cpu" else "cuda"
    script(
        "peers/transformers_peer.py", "--target", str(run.target),
        "--drafter", str(run.drafter), "--prompts", str(run.prompts_file),
        "--max-new-tokens", str(run.max_new_tokens), "--num-draft-tokens", "3,5",
        "--repeats", "2", "--threads", "2", "--device", device, "--json", str(output),
        "--dtype", "bfloat16" if device == "cpu" else "float16",
    )  # fmt: skip
    rows = json.loads(output.read_text())["rows"]
    return [{k: v for k, v in row.items() if k != "token_ids"} for row in rows]


def script(name: str, *arguments: str) -> str:
    """Run another script of this folder; returns what it printed."""
    command = [sys.executable, str(Path(__file__).parent / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout


PARTS: dict[str, Callable[[Run], Any]] = {
    part.__name__: part
    for part in (
        machine, kernels, text, passes, speed, placement, transformers
    )
}  # fmt: skip


@click.command()
@click.argument("target", type=click.Path(path_type=Path, exists=True))
@click.argument("drafter", type=click.Path(path_type=Path, exists=True))
@click.option("--prompts", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--provider", type=click.Choice(list(PROVIDERS)), default="cuda")
@click.option("--parts", default=",".join(PARTS), show_default=True)
@click.option("--max-new-tokens", default=96, show_default=True)
@click.option("--context", default=256, show_default=True)
@click.option("--recipe", default="int4-rtn-b32", show_default=True)
@click.option("--work", type=click.Path(path_type=Path), help="Keeps bundles there.")
@click.option("--json", "output", type=click.Path(path_type=Path), required=True)
def main(
    target: Path,
    drafter: Path,
    prompts: Path,
    provider: str,
    parts: str,
    max_new_tokens: int,
    context: int,
    recipe: str,
    work: Path | None,
    output: Path,
) -> None:
    """Run all parts, or the parts in --parts, on TARGET and DRAFTER."""
    work = work or Path(tempfile.mkdtemp(prefix="jetdraft-gpu-"))
    lines = prompts.read_text(encoding="utf-8").splitlines()
    run = Run(
        target,
        drafter,
        [json.loads(line)["prompt"] for line in lines],
        prompts,
        provider,
        max_new_tokens,
        context,
        work,
        Recipe.parse(recipe),
    )
    report: dict[str, Any] = {}
    names = parts.split(",")
    if unknown := set(names) - PARTS.keys():
        raise click.BadParameter(f"unknown parts {unknown}; choose {', '.join(PARTS)}")
    if not run.prompts or not try_provider(provider).runs:
        reason = try_provider(provider).reason or f"{prompts} has no prompts"
        raise click.ClickException(reason)
    for name in names:
        start = time.perf_counter()
        try:
            report[name] = PARTS[name](run)
        except Exception as error:  # one part must not cost the others
            report[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        took = time.perf_counter() - start
        click.echo(f"{name}: {took:.0f} s\n{json.dumps(report[name], indent=1)}")
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if any("failed" in found for found in report.values() if isinstance(found, dict)):
        sys.exit(1)


if __name__ == "__main__":
    main()
