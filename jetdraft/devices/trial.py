"""A trial run of an execution provider, in a process of its own.

    python -m jetdraft.devices.trial CUDAExecutionProvider

A broken driver may end the process, and onnxruntime names a missing library on stderr
only, so `providers.presence` starts this module and reads what it writes. The last line
on stdout says that the graph ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from jetdraft.devices import webgpu
from jetdraft.errors import ProviderError

GRAPH = Path(__file__).with_name("trial.onnx")
RAN = "ran"
SOFTWARE = "on a software adapter"
REASON = "reason: "
"""Begins a line on stderr that says why the provider cannot run here."""
CPU = "CPUExecutionProvider"


def main(provider: str) -> None:
    """Run one small product on `provider` alone and compare the numbers."""
    import onnxruntime  # the parent imports this module, even without onnxruntime

    options = onnxruntime.SessionOptions()
    if provider != CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    providers: list[str] | None = [provider]
    if provider == webgpu.FULL:
        webgpu.add_to(options, {})
        providers = None
    session = onnxruntime.InferenceSession(str(GRAPH), options, providers=providers)
    if session.get_providers()[0] != provider:
        sys.exit(f"{provider} could not be created")
    [product] = session.run(None, {"x": np.array([[1.0, 2.0]], np.float32)})
    if not np.array_equal(product, [[7.0, 10.0]]):
        sys.exit(f"{provider} computed {product.tolist()} instead of [[7, 10]]")
    if provider == webgpu.FULL and webgpu.adapter().software:
        print(SOFTWARE)
    print(RAN)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ProviderError as error:
        sys.exit(f"{REASON}{error}")
