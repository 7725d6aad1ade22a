"""Imports onnxruntime; if it is missing, any use of `ort` says how to install it."""

from __future__ import annotations

import os
from typing import Any

from jetdraft.errors import ProviderError


class _Missing:
    def __getattr__(self, name: str) -> Any:
        raise ProviderError(
            "onnxruntime is not installed; pip install 'jetdraft[cpu]', or "
            "'jetdraft[gpu]' on a machine with CUDA"
        )


def _import() -> Any:
    # From 1.29 on its wheels tell Microsoft of each session, and warn on the terminal
    # where the home cannot be written. Who wants that sets the variable to 0.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        return _Missing()
    return onnxruntime


ort = _import()


def import_onnx() -> Any:
    """The package onnx; raises `ProviderError` if it is missing."""
    try:
        import onnx
    except ImportError as error:
        raise ProviderError(
            "to read a graph needs onnx; pip install 'jetdraft[gpu]', or "
            "'jetdraft[webgpu]'"
        ) from error
    return onnx
