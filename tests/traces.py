"""Traced graphs in a folder, which all processes of a run of the tests share."""

from __future__ import annotations

import os
from pathlib import Path

from jetdraft.export.tracing.kept_traces import KeptTraces


class SharedTraces(KeptTraces):
    """Keeps every trace of a run in a folder, each as a file named by its fingerprint.

    Most tests export one of a few tiny models, and the trace is most of the work.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def read(self, key: str) -> bytes | None:
        file = self.folder / key
        return file.read_bytes() if file.exists() else None

    def write(self, key: str, file: bytes) -> None:
        """Write it whole, since another process may look for it."""
        part = self.folder / f"{key}.{os.getpid()}"
        part.write_bytes(file)
        part.replace(self.folder / key)
