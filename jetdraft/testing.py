"""A small trained bundle for tests, ready in milliseconds and without a download.

Usage, in a test of a program that embeds jetdraft:

    with jetdraft.load(toy_bundle(), threads=1) as model:
        assert model.chat([{"role": "user", "content": "Hello"}]).text
"""

from __future__ import annotations

import atexit
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from zipfile import ZipFile

from jetdraft.bundle import writing
from jetdraft.errors import OutputError

PACKED = Path(__file__).with_name("toy.zip")
"""What scripts/toy made."""


def toy_bundle(folder: str | Path | None = None) -> Path:
    """Unpack a toy bundle into `folder`, always the same bytes, and return its path.

    Without `folder` it is a new temporary one, removed when the process ends. A target
    of two layers and a drafter of one, float32, 384 tokens, 512 rows of KV buffers and
    a chat template. It talks about a robot's sensors, calls `read_sensor` where tools
    are given, and goes on with "The robot sees" and '{"name": "'. Passes are so
    short that `auto` and adaptive lengths seldom draft; `num_draft_tokens` always does.
    It needs an onnxruntime and no torch. Raises `OutputError` where `folder` is not
    empty or cannot be written.

        model = jetdraft.load(toy_bundle(), threads=1)
        model.generate("The robot sees", method="draft", num_draft_tokens=4).text
    """
    path = _temporary() if folder is None else Path(folder)
    _check_free(path)
    with writing(path) as staging, ZipFile(PACKED) as packed:
        packed.extractall(staging)
    return path


def _temporary() -> Path:
    """A place for one bundle that goes with this process."""
    folder, owner = mkdtemp(prefix="jetdraft-toy-"), os.getpid()

    def remove() -> None:
        # A forked process ends too, and has not made it.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder) / "bundle"


def _check_free(path: Path) -> None:
    """Raise `OutputError` unless there is nothing, or an empty folder, which goes."""
    try:
        path.rmdir()  # refuses whatever is not empty
    except FileNotFoundError:
        pass
    except OSError as error:
        raise OutputError(
            f"cannot unpack a toy bundle to {path} ({error.strerror}); choose a new or "
            "an empty folder"
        ) from error
