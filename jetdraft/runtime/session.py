"""Making onnxruntime sessions that do not fight for cores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jetdraft.errors import ContractError, OptionError, ProviderError
from jetdraft.runtime.ort import ort

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
"""onnxruntime's names of the providers, by the name the user gives."""

SUPPORTED = ("cpu",)
"""Those that this version runs on."""


def resolve_provider(name: str) -> str:
    """onnxruntime's name of a provider; raise `ProviderError` if it cannot run."""
    if name not in PROVIDERS:
        raise ProviderError(f"unknown provider {name!r}; choose {', '.join(SUPPORTED)}")
    if PROVIDERS[name] not in ort.get_available_providers():
        raise ProviderError(
            f"this onnxruntime was built without {PROVIDERS[name]}; choose "
            f"{', '.join(SUPPORTED)}, or install a build that has it"
        )
    if name not in SUPPORTED:
        raise ProviderError(
            f"this jetdraft does not run on {name!r} yet; choose {', '.join(SUPPORTED)}"
        )
    return PROVIDERS[name]


MOST_THREADS_PER_CORE = 8
"""More only wait for each other, for minutes where they are many."""


def default_threads() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0))


def open_session(
    file: Path,
    provider: str,
    threads: int = 1,
    spinning: bool = False,
    weights: Mapping[str, npt.NDArray[np.generic]] | None = None,
) -> ort.InferenceSession:
    """A session on `file`; one without `spinning` threads leaves idle cores alone.

    `weights` take the place of the graph's own of those names.
    """
    most = MOST_THREADS_PER_CORE * (os.cpu_count() or 1)
    if not isinstance(threads, int) or not 1 <= threads <= most:
        raise OptionError(
            f"threads {threads!r} is out of range; give 1 to {most} on this machine"
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry(
        "session.intra_op.allow_spinning", "1" if spinning else "0"
    )
    # Of integers that a DequantizeLinear gives to a MatMul, as `Recipe` has it too.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "4")
    weights = weights or {}
    try:
        options.add_external_initializers(
            list(weights),
            [ort.OrtValue.ortvalue_from_numpy(w) for w in weights.values()],
        )
        return ort.InferenceSession(
            str(file), options, providers=[resolve_provider(provider)]
        )
    except ProviderError:
        raise
    except Exception as error:  # onnxruntime raises its own, underived exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ContractError(
            f"onnxruntime cannot load {file} ({reason}); export the bundle again with "
            "this version"
        ) from error
