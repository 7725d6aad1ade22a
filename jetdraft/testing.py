"""A small trained bundle for tests, ready in milliseconds and without a download.

Usage, in a test of a program that embeds jetdraft:

    with jetdraft.load(toy_bundle(), threads=1) as model:
        assert model.chat([{"role": "user", "content": "Hello"}]).text
"""

import atexit
import os
import shutil
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from zipfile import ZipFile

from jetdraft.errors import OutputError, as_error, printable
from jetdraft.files import check_name
from jetdraft.manifest import writing

TOY_ZIP = Path(__file__).with_name("toy.zip")
"""The zip with the toy bundle, which tools/toy.py makes."""


def toy_bundle(folder: str | Path | None = None) -> Path:
    """Unpack a toy bundle into `folder`, always the same bytes, and return its path.

    Without `folder` it is a new temporary one, removed when the process ends. A target
    of two layers and a drafter of one, float32, 384 tokens, 512 rows of KV buffers and
    a chat template. It talks about a robot's sensors, calls `read_sensor` if the tool
    is offered, and continues "The robot sees" and '{"name": "'. Its passes are so
    short that `auto` and adaptive lengths seldom draft; `num_draft_tokens` always does.
    Raises `OutputError` if `folder` is not empty or cannot be written.

        model = jetdraft.load(toy_bundle(), threads=1)
        model.generate("The robot sees", num_draft_tokens=4).text
    """
    path = _temporary_path() if folder is None else Path(folder)
    fact = f"cannot unpack a toy bundle to {printable(path)}"
    with as_error(OutputError, OSError, fact, "choose a new or an empty folder"):
        check_name(path)
        with suppress(FileNotFoundError):
            path.rmdir()  # refuses a folder that is not empty
    with writing(path) as staging, ZipFile(TOY_ZIP) as packed:
        packed.extractall(staging)
    return path


def _temporary_path() -> Path:
    """Return a path in a new folder, which is removed when this process ends."""
    folder, owner = mkdtemp(prefix="jetdraft-toy-"), os.getpid()

    def remove() -> None:
        # A forked process runs this too, but does not own the folder.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder) / "bundle"
