"""Runs a graph of one product on a provider, in a process of its own.

    python -m jetdraft.devices.probe CUDAExecutionProvider

The parent reads what happens here: a broken driver may end the process, and onnxruntime
names a missing library on stderr only. The last line on stdout says that it ran.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

GRAPH = Path(__file__).with_name("probe.onnx")
RAN = "ran"
CPU = "CPUExecutionProvider"


def main(provider: str) -> None:
    """Multiply on `provider`, on nothing else, and look at the numbers."""
    import onnxruntime  # the parent imports this module, with or without it

    options = onnxruntime.SessionOptions()
    if provider != CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = onnxruntime.InferenceSession(str(GRAPH), options, providers=[provider])
    if session.get_providers()[0] != provider:
        sys.exit(f"{provider} could not be made")
    [found] = session.run(None, {"x": np.array([[1.0, 2.0]], np.float32)})
    if not np.array_equal(found, [[7.0, 10.0]]):
        sys.exit(f"{provider} computed {found.tolist()} instead of [[7, 10]]")
    print(RAN)


if __name__ == "__main__":
    main(sys.argv[1])
