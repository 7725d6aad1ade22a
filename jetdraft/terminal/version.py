"""What `jetdraft --version` prints."""

from __future__ import annotations

from jetdraft.devices.providers import installed
from jetdraft.errors import ProviderError
from jetdraft.ort import ort


def version_text(version: str) -> str:
    """jetdraft's `version`, onnxruntime's, and the providers installed with it.

    version_text("0.1.0").splitlines()[0]    # "jetdraft 0.1.0"
    """
    first = f"jetdraft {version}"
    try:
        providers = ", ".join(installed())
    except ProviderError:
        return f"{first}\nonnxruntime is not installed"
    return f"{first}\nonnxruntime {ort.__version__}\nproviders {providers}"
