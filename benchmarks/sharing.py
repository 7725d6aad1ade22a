"""Memory of one and of two sessions over a bundle's target: resident, or a GPU's.

    python benchmarks/sharing.py BUNDLE [--provider cpu]

The second session is opened over the same weights file, and then once more with the
weights of the first given to it (`SessionOptions.add_initializer`). Each case runs in a
process of its own, one pass included, since kernels pack weights as they like.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnxruntime

from jetdraft.bundle import Bundle
from jetdraft.devices.providers import PROVIDERS, presence
from jetdraft.errors import ProviderError
from jetdraft.runtime.passes.opener import shared_weights

CASES = ("none", "one", "two over a file", "two over shared weights")


def used_mb(provider: str) -> float:
    """Of this process, now; on a GPU of its own, of all processes there."""
    if PROVIDERS[provider].memory != "cpu":
        query = [
            "nvidia-smi",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ]
        done = subprocess.run(query, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[0]) * 1.048576
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def session(
    file: Path, provider: str, shared: dict[str, onnxruntime.OrtValue]
) -> onnxruntime.InferenceSession:
    """A session that has run once."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for name, value in shared.items():
        options.add_initializer(name, value)
    made = onnxruntime.InferenceSession(
        str(file), options, providers=[PROVIDERS[provider].full]
    )
    kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    feeds = {}
    for each in made.get_inputs():
        # One row, and one probe where there are streams: a bias has both.
        varying = 2 if each.name == "attention_bias" else 1
        shape = [axis if isinstance(axis, int) else varying for axis in each.shape]
        half = np.float16 if "16" in each.type else np.float32
        feeds[each.name] = np.zeros(shape, kinds.get(each.type, half))
    bias = feeds.get("attention_bias")
    feeds["total_length"][:] = 1 if bias is None else bias.shape[-1]
    made.run(None, feeds)
    return made


def measure(file: Path, provider: str, case: str) -> float:
    """Megabytes with the sessions of a case alive."""
    memory = PROVIDERS[provider].memory
    shared = shared_weights(file, memory) if case == CASES[3] else {}
    count = {CASES[0]: 0, CASES[1]: 1}.get(case, 2)
    alive = [session(file, provider, shared) for _ in range(count)]
    found = used_mb(provider)
    del alive
    return found


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
    found = presence(provider)
    if not found.runs:
        raise ProviderError(f"{provider} does not run here: {found.reason}")
    report = {}
    for each in CASES:
        command = [sys.executable, __file__, str(bundle), "--provider", provider]
        done = subprocess.run(
            [*command, "--case", each], capture_output=True, text=True, check=True
        )
        report[each] = float(done.stdout)
        click.echo(f"{each:26} {report[each] - report[CASES[0]]:8.0f} MB")
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
