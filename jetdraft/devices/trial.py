"""A trial run of an execution provider, in a process of its own.

    python -m jetdraft.devices.trial CUDAExecutionProvider

A broken driver may end the process, and onnxruntime names a missing library on stderr
only. The last line on stdout says that the graph ran.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.devices import webgpu
from jetdraft.errors import ProviderError

GRAPH = Path(__file__).with_name("trial.onnx")  # The graph of a small product, float32.
HALF_GRAPH = Path(__file__).with_name("trial-half.onnx")
RAN = "ran"  # The last line on stdout after a trial that succeeded.
# Lines on stdout about the adapter.
SOFTWARE = "on a software adapter"
NO_HALF = "without half precision"
REASON = "reason: "  # Begins the line on stderr that says why not.
CPU_PROVIDER = "CPUExecutionProvider"


def main(provider: str) -> None:
    """Multiply two small matrices on `provider` alone; print `RAN` if it is right."""
    _check_product(provider, GRAPH, np.float32)
    if provider == webgpu.EP_NAME:
        if webgpu.find_adapter().software:
            print(SOFTWARE)
        try:
            _check_product(provider, HALF_GRAPH, np.float16)
        except Exception:  # onnxruntime's exceptions have no common base
            print(NO_HALF)
    print(RAN)


def _check_product(provider: str, graph: Path, dtype: type[np.floating[Any]]) -> None:
    import onnxruntime  # the parent imports this module, even without onnxruntime

    options = onnxruntime.SessionOptions()
    if provider != CPU_PROVIDER:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    providers: list[str] | None = [provider]
    if provider == webgpu.EP_NAME:
        webgpu.add_adapter(options, {})
        providers = None
    session = onnxruntime.InferenceSession(str(graph), options, providers=providers)
    if session.get_providers()[0] != provider:
        sys.exit(f"{provider} could not be created")
    [product] = session.run(None, {"x": np.array([[1.0, 2.0]], dtype)})
    if not np.array_equal(product, [[7.0, 10.0]]):
        sys.exit(f"{provider} computed {product.tolist()} instead of [[7, 10]]")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ProviderError as error:
        sys.exit(f"{REASON}{error}")
