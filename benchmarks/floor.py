"""Where a pass goes, against the time that its bytes take to be read.

    python benchmarks/floor.py BUNDLE --json floor.json
    python benchmarks/floor.py BUNDLE --edge 512 --edge 1024    # of square pictures too

It measures how fast two threads read memory, runs passes at several widths, and adds up
onnxruntime's profile by operator. The floor is the bytes of the weights and of the
filled KV rows over the measured bandwidth. Run nothing beside it.
"""

import json
import statistics
import tempfile
import time
import timeit
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.ort import ort
from jetdraft.runtime.passes import session as sessions

WIDTHS, TURNS, LOADS = (1, 2, 4, 8), 12, 3
SETTLING = 8.0  # Seconds in which an idle model moves its weights into huge pages.
FILLED = 256  # The committed rows that the passes attend to.


@contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Let new sessions write a profile into the folder."""
    plain = sessions._session_options

    def options(*args: Any) -> ort.SessionOptions:
        made = plain(*args)
        made.enable_profiling = True
        made.profile_file_prefix = str(folder / "profile")
        return made

    sessions._session_options = options
    try:
        yield
    finally:
        sessions._session_options = plain


def bandwidth(threads: int, mb: int = 1024) -> float:
    """The GB/s at which threads read memory; the best of five turns."""
    parts = np.array_split(np.ones(mb << 17), threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = timeit.repeat(lambda: [*pool.map(np.max, parts)], number=1, repeat=5)
    return float(sum(part.nbytes for part in parts)) / min(seconds) / 1e9


def weight_bytes(file: Path) -> dict[str, int]:
    """The bytes of constants by operator, but for tables that few rows are read of."""
    graph = onnx.load(file, load_external_data=False).graph
    sizes = {
        constant.name: int(np.prod(constant.dims))
        * onnx.helper.tensor_dtype_to_np_dtype(constant.data_type).itemsize
        for constant in graph.initializer
    }
    read: Counter[str] = Counter()
    for node in graph.node:
        if not any(name in node.op_type for name in ("Gather", "Attention")):
            read[node.op_type] += sum(sizes.get(name, 0) for name in node.input)
    return {name: size for name, size in read.most_common() if size > 1e6}


def account(bundle: Path, width: int, threads: int) -> dict[str, Any]:
    """Milliseconds of a pass, and of its operators."""
    with tempfile.TemporaryDirectory() as name, profiled(Path(name)):
        model = jetdraft.load(bundle, threads=threads)
        graph = model.parts.target
        time.sleep(SETTLING)
        model.parts._idle.paused().__enter__()  # nothing else runs from here on
        graph.run([1] * 64)
        graph.cache.rewind(0)
        graph.cache.advance(FILLED)
        turn = timeit.Timer(lambda: graph.run([1] * width, width=width))
        seconds = turn.repeat(TURNS, number=1)
        file = graph.sessions.chain.session.end_profiling()
        events = json.loads(Path(file).read_text())
    kernels = [e for e in events if e["name"].endswith("kernel_time")]
    per_pass = len(kernels) // (TURNS + 1)
    by_operator: Counter[str] = Counter()
    for event in kernels[per_pass:]:  # without the pass that warms up
        by_operator[event["args"]["op_name"]] += event["dur"]
    operators = {k: v / TURNS / 1e3 for k, v in by_operator.most_common(8)}
    return {"pass_ms": 1e3 * statistics.median(seconds), "operators_ms": operators}


def quietest(bundle: Path, width: int, threads: int, loads: int) -> dict[str, Any]:
    """The account of the fastest of a few loads: pages lie otherwise in each."""
    accounts = [account(bundle, width, threads) for _ in range(loads)]
    return min(accounts, key=lambda one: float(one["pass_ms"]))


def first_token(bundle: Path, edge: int, threads: int) -> dict[str, Any]:
    """Seconds of the encoder and of the first token about a square picture."""
    with jetdraft.load(bundle, threads=threads) as model:
        model.generate("a", max_new_tokens=2, method="none")
        time.sleep(SETTLING)
        random, rows = np.random.default_rng(0), model.parts.target.pictures
        other, image = random.integers(0, 256, (2, edge, edge, 3), np.uint8)
        model.encode_image(other)  # This opens the encoder's session.
        opened = rows.seconds
        parts = {"type": "image", "image": image}, {"type": "text", "text": "What?"}
        asked, start = [{"role": "user", "content": [*parts]}], time.perf_counter()
        stats = model.chat(asked, max_new_tokens=1, method="none").stats
        seconds, encoder = time.perf_counter() - start, rows.seconds - opened
        names = "edge", "rows", "prompt_tokens", "encoder_s", "first_token_s"
        counts = edge, stats.picture_tokens, stats.prompt_tokens
        return dict(zip(names, (*counts, encoder, seconds), strict=True))


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--threads", default=2, show_default=True)
@click.option("--loads", default=LOADS, show_default=True, help="The best of them.")
@click.option("--edge", "edges", type=int, multiple=True, help="Of a picture.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundle: Path, threads: int, loads: int, edges: tuple[int, ...], output: Path | None
) -> None:
    """Measure the target of BUNDLE on the CPU."""
    contract = Bundle.open(bundle).target.contract
    weights = weight_bytes(bundle / Bundle.open(bundle).target.file)
    buffers = [spec.shape_for() for spec in contract.buffers("past")]
    kv_bytes = sum(heads * FILLED * size * 4 for _, heads, _, size in buffers)
    speed = bandwidth(threads)
    floor_ms = (sum(weights.values()) + kv_bytes) / speed / 1e6
    report: dict[str, Any] = {
        "bandwidth_gb_s": speed,
        "weight_bytes": weights,
        "kv_bytes": kv_bytes,
        "floor_ms": floor_ms,
        "widths": {w: quietest(bundle, w, threads, loads) for w in WIDTHS},
        "pictures": [first_token(bundle, edge, threads) for edge in edges],
    }
    print(f"{speed:.1f} GB/s, weights {weights}, KV {kv_bytes}: {floor_ms:.1f} ms")
    for width, row in report["widths"].items():
        shown = ", ".join(f"{k} {v:.1f}" for k, v in row["operators_ms"].items())
        print(f"{width} rows: {row['pass_ms']:.1f} ms; {shown}")
    for row in report["pictures"]:
        print(", ".join(f"{name} {value:.5g}" for name, value in row.items()))
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
