"""Measures the memory of one and of two sessions over a bundle's target.

    python benchmarks/sharing.py BUNDLE [--provider cpu]

The second session is opened over the same weights file, and then once more with the
weights of the first session (`SessionOptions.add_initializer`). Each case runs in a
process of its own, with one pass, since kernels pack weights then. On a GPU, it is the
memory of the device.
"""

import json
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnxruntime

from jetdraft.bundle import Bundle
from jetdraft.devices.providers import PROVIDERS, try_provider
from jetdraft.errors import ProviderError
from jetdraft.native import LIBRARY
from jetdraft.runtime.passes.opener import shared_weights

CASES = ("none", "one", "two over a file", "two over shared weights")


def used_mb(provider: str) -> float:
    """The 10^6 bytes that this process holds, or all processes on the GPU."""
    if PROVIDERS[provider].memory != "cpu":
        query = [
            "nvidia-smi",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ]
        run = subprocess.run(query, capture_output=True, text=True, check=True)
        return float(run.stdout.split()[0]) * 1.048576
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def session(
    file: Path, provider: str, shared: dict[str, onnxruntime.OrtValue]
) -> onnxruntime.InferenceSession:
    """Open a session and run it once."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if provider == "cpu":
        options.register_custom_ops_library(str(LIBRARY))
    for name, value in shared.items():
        options.add_initializer(name, value)
    opened = onnxruntime.InferenceSession(
        str(file), options, providers=[PROVIDERS[provider].full]
    )
    kinds = {f"tensor({n})": getattr(np, n) for n in ("int64", "int32", "uint8")}
    feeds = {}
    for value in opened.get_inputs():
        # One row, and one probe where there are streams: a mask has both.
        varying = 2 if value.name == "draft_mask" else 1
        shape = [axis if isinstance(axis, int) else varying for axis in value.shape]
        half = np.float16 if "16" in value.type else np.float32
        feeds[value.name] = np.zeros(shape, kinds.get(value.type, half))
    slots = feeds["past_key.0"].shape[2]
    feeds["total_length"][:] = slots if "draft_mask" in feeds else 1
    opened.run(None, feeds)
    return opened


def measure(file: Path, provider: str, case: str) -> float:
    """The memory while the sessions of a case are alive."""
    memory = PROVIDERS[provider].memory
    is_shared = case == CASES[3]
    views, owners = shared_weights(file, memory) if is_shared else ({}, {})
    count = {CASES[0]: 0, CASES[1]: 1}.get(case, 2)
    alive = [session(file, provider, views) for _ in range(count)]
    mb = used_mb(provider)
    del alive, owners
    return mb


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--provider", default="cpu", show_default=True)
@click.option("--case", type=click.Choice(CASES), hidden=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(bundle: Path, provider: str, case: str | None, output: Path | None) -> None:
    """Measure all cases on BUNDLE's target."""
    file = bundle / Bundle.open(bundle).target.file
    if case is not None:
        click.echo(json.dumps(measure(file, provider, case)))
        return
    state = try_provider(provider)
    if not state.runs:
        raise ProviderError(f"{provider} does not run here: {state.reason}")
    report = {}
    for name in CASES:
        command = [sys.executable, __file__, str(bundle), "--provider", provider]
        run = subprocess.run(
            [*command, "--case", name], capture_output=True, text=True, check=True
        )
        report[name] = float(run.stdout)
        click.echo(f"{name:26} {report[name] - report[CASES[0]]:8.0f} MB")
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
