"""onnxruntime, or a clear error where neither of its packages is installed.

`import jetdraft` must work without it, so that the error comes when a session is
wanted and names the extra to install.
"""

from __future__ import annotations

from typing import Any

from jetdraft.errors import ProviderError


class _Missing:
    def __getattr__(self, name: str) -> Any:
        raise ProviderError(
            "onnxruntime is not installed; pip install 'jetdraft[cpu]', or "
            "'jetdraft[gpu]' on a machine with CUDA"
        )


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError:
        return _Missing()
    return onnxruntime


ort = _import()
