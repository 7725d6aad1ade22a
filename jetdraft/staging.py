"""Writing a bundle: it appears whole or not at all."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from jetdraft.errors import OutputError
from jetdraft.files import check_writable, locked
from jetdraft.manifest import MANIFEST


def check_output(output: Path) -> None:
    """Raise `OutputError` unless nothing, or an earlier bundle, is at `output`."""
    check_writable(output)
    if output.exists() and not (output / MANIFEST).is_file():
        fact = f"{output} exists and is not a bundle; choose another output folder"
        raise OutputError(fact)


@contextmanager
def writing(output: str | Path) -> Iterator[Path]:
    """Yield a hidden folder to fill, renamed to `output` when the block succeeds.

    A failure or a kill at any point leaves `output` as it was. Raises `OutputError`.

        with writing("bundle") as folder:
            (folder / "file").write_text("...")
    """
    final = Path(output).resolve()
    check_output(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(final)
        staging = Path(mkdtemp(prefix=f".{final.name}.partial-", dir=final.parent))
    except OSError as error:
        fact = f"cannot write beside {final} ({error.strerror}); choose another folder"
        raise OutputError(fact) from error
    try:
        with locked(staging):
            mask = os.umask(0)  # which can only be read by setting it
            os.umask(mask)
            staging.chmod(0o777 & ~mask)
            yield staging
            for file in staging.iterdir():  # to the disk before the rename
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            _move_into_place(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _clean_up(final: Path) -> None:
    """Restore or remove what killed exports to `final` have left beside it."""
    aside = _old_folder(final)
    if aside.exists() and not final.exists():
        aside.rename(final)
    shutil.rmtree(aside, ignore_errors=True)
    for leftover in final.parent.glob(f".{final.name}.partial-*"):
        with locked(leftover) as owner_is_dead:
            if owner_is_dead:
                shutil.rmtree(leftover, ignore_errors=True)


def _old_folder(final: Path) -> Path:
    """Return the path beside `final` of an earlier bundle between two renames."""
    return final.with_name(f".{final.name}.old")


def _move_into_place(staging: Path, final: Path) -> None:
    """Rename `staging` to `final`; an earlier bundle there is moved and removed."""
    if not final.exists():
        staging.rename(final)
    elif not _exchange_folders(staging, final):
        # No atomic exchange: after a kill here the next export restores the old bundle.
        aside = _old_folder(final)
        final.rename(aside)
        staging.rename(final)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange_folders(one: Path, other: Path) -> bool:
    """Exchange two folders in one atomic step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    at_cwd, exchange = -100, 2
    paths = os.fsencode(one), os.fsencode(other)
    return bool(rename(at_cwd, paths[0], at_cwd, paths[1], exchange) == 0)
