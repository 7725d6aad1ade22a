"""Imports that may be missing, and silence; `ort` raises `ProviderError` if so."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jetdraft.errors import ProviderError, refusing


class _MissingPackage:
    """Stands for onnxruntime where it is not installed; all attributes raise."""

    def __getattr__(self, name: str) -> Any:
        fix = "pip install 'jetdraft[cpu]', or 'jetdraft[gpu]' on a machine with CUDA"
        raise ProviderError(f"onnxruntime is not installed; {fix}")


# From 1.29 on its wheels tell Microsoft of each session, unless the variable is 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
try:
    import onnxruntime

    ort: Any = onnxruntime
except ImportError:
    ort = _MissingPackage()


def import_onnx() -> Any:
    """Import the package onnx; raises `ProviderError` if it is missing."""
    fix = "pip install 'jetdraft[gpu]', or 'jetdraft[webgpu]'"
    with refusing(ProviderError(f"to read a graph needs onnx; {fix}"), ImportError):
        import onnx
    return onnx


@contextmanager
def silenced(level: int) -> Iterator[None]:
    """Drop log records up to `level` from all loggers while the block runs."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def quiet_loaders() -> Iterator[None]:
    """Hide the loaders' progress bars and warnings while the block runs."""
    import transformers  # which the command line does not wait for

    shown = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None
    transformers.utils.logging.disable_progress_bar()
    try:
        with silenced(logging.WARNING):
            yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
