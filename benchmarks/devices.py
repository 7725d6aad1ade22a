"""What a pass costs beside its arithmetic: copies, dispatches, kernels, bytes.

    python benchmarks/devices.py TARGET DRAFTER --provider webgpu --provider cpu \
        --json devices.json

exports the pair for each provider and runs passes of several widths. The parts of a
pass are medians in ms; a download waits for the device. `bytes` are those that cross
between host and device. Kernels are counted by onnxruntime's profile. Over SwiftShader
the times show the structure only: it computes on the CPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import jetdraft
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.ort import ort
from jetdraft.recipe import Recipe
from jetdraft.runtime.passes import session as sessions
from jetdraft.runtime.passes.binding import Bound
from jetdraft.runtime.passes.graph import Graph

WIDTHS = (1, 2, 4, 8)
TURNS = 15


@contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Let new sessions write a profile into the folder."""
    plain = sessions._options

    def options(*args: Any) -> ort.SessionOptions:
        made = plain(*args)
        made.enable_profiling = True
        made.profile_file_prefix = str(folder / "profile")
        return made

    sessions._options = options
    try:
        yield
    finally:
        sessions._options = plain


def kernels(bundle: Path, provider: str) -> dict[str, int]:
    """How many kernels a pass of two rows starts, by the provider that runs them."""
    with tempfile.TemporaryDirectory() as name, profiled(Path(name)):
        graph = jetdraft.load(bundle, provider=provider, threads=1).parts.target
        graph.run([1, 2])
        graph.run([1, 2])
        file = graph.sessions.chain.session.end_profiling()
        events = json.loads(Path(file).read_text())
    starts = (
        e["args"]["provider"] for e in events if e["name"].endswith("kernel_time")
    )
    return {name: count // 2 for name, count in Counter(starts).items()}


def costs(graph: Graph, width: int) -> dict[str, float]:
    """Median ms of the parts of a pass, and the bytes that cross."""
    graph.cache.rewind(0)
    graph.run([1] * width)
    [bound] = [b for size, b in graph._bindings.items() if size.width == width]
    copies, parts = bound._copies, []
    for _ in range(TURNS):
        start = time.perf_counter()
        if copies is not None:
            copies.upload()
        uploaded = time.perf_counter()
        bound.session.run_with_iobinding(bound.io)
        ran = time.perf_counter()
        if copies is not None:
            copies.download()
        parts.append((uploaded - start, ran - uploaded, time.perf_counter() - ran))
    upload, run, download = (
        1e3 * statistics.median(p) for p in zip(*parts, strict=True)
    )
    up, down = crossing(bound)
    return {
        "upload_ms": round(upload, 3),
        "run_ms": round(run, 3),
        "download_ms": round(download, 3),
        "bytes_up": up,
        "bytes_down": down,
    }


def crossing(bound: Bound) -> tuple[int, int]:
    """The bytes that a pass copies to the device and back."""
    copies = bound._copies
    if copies is None:
        return 0, 0
    sides = copies._uploads, copies._downloads
    up, down = (sum(tensor.array.nbytes for tensor in side) for side in sides)
    return up, down


@click.command()
@click.argument("target", type=click.Path(exists=True, path_type=Path))
@click.argument("drafter", type=click.Path(exists=True, path_type=Path))
@click.option("--provider", "providers", multiple=True, default=("webgpu", "cpu"))
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(
    target: Path, drafter: Path, providers: tuple[str, ...], file: Path | None
) -> None:
    """Measure passes of TARGET, with DRAFTER beside it, on each provider."""
    report: dict[str, Any] = {}
    for provider in providers:
        with tempfile.TemporaryDirectory() as folder:
            bundle = Path(folder) / "bundle"
            options = ExportOptions(Recipe.parse("int4-b32"), provider=provider)
            export(str(target), bundle, str(drafter), options)
            graph = jetdraft.load(bundle, provider=provider, threads=1).parts.target
            rows = {width: costs(graph, width) for width in WIDTHS}
            report[provider] = {"widths": rows, "kernels": kernels(bundle, provider)}
        print(provider, "kernels of a pass:", report[provider]["kernels"])
        for width, row in rows.items():
            print(f"  {width} rows:", ", ".join(f"{k} {v}" for k, v in row.items()))
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
