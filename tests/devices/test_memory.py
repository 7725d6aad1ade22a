"""What Linux does with memory changes no byte of it."""

from __future__ import annotations

import mmap
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from jetdraft.devices import memory
from jetdraft.devices.memory import HUGE_PAGE, release_files, use_huge_pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_mapped_files_leave_memory_and_come_back(tmp_path):
    """Only the files of the folder, and not what was written."""
    size = 1 << 20
    arrays = {}
    for folder, mode in (("own", "r"), ("written", "c"), ("other", "r")):
        file = tmp_path / folder / "weights"
        file.parent.mkdir()
        file.write_bytes(bytes(range(256)) * (size // 256))
        arrays[folder] = np.memmap(file, np.uint8, mode)
        assert arrays[folder].sum() == size * 255 // 2
    arrays["written"][5] = 77
    assert release_files(tmp_path / "own") >= size
    assert release_files(tmp_path / "own") == 0
    assert release_files(tmp_path / "written") == 0
    assert arrays["written"][5] == 77
    assert arrays["own"].sum() == size * 255 // 2
    assert release_files(tmp_path / "other") >= size


def test_without_proc_nothing_happens(tmp_path, monkeypatch):
    """A sandbox may hide the files; loading a bundle must not fail for it."""
    monkeypatch.setattr(memory, "_read_text", lambda file: "")
    assert release_files(tmp_path) == use_huge_pages() == 0


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
COLLAPSES = (
    HUGE_PAGES.is_file()
    and "[never]" not in HUGE_PAGES.read_text()
    and tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 1)
)


@pytest.mark.skipif(not COLLAPSES, reason="Linux 6.1 can move memory to huge pages")
def test_filled_memory_goes_to_huge_pages_and_keeps_its_bytes():
    size = 16 * HUGE_PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    filled, empty = (mmap.mmap(-1, size, flags=private) for _ in range(2))
    filled[:] = bytes(range(256)) * (size // 256)
    empty[:10] = b"0123456789"
    resident = _resident()
    assert use_huge_pages() >= size - 2 * HUGE_PAGE
    assert _resident() - resident < size // 2  # the empty one stays empty
    assert filled[:] == bytes(range(256)) * (size // 256)
    assert empty[:12] == b"0123456789\0\0"
    assert use_huge_pages() < size // 2


def _resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])
