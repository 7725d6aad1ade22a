"""Advice to Linux about this process's memory; on other systems it does nothing."""

import ctypes
import mmap
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jetdraft.devices.detection import read_text

_read_text = partial(read_text, errors="surrogateescape")  # It may have any path.
_DONTNEED, _HUGE, _COLLAPSE = 4, 14, 25  # Linux's numbers of MADV_DONTNEED and so on.
HUGE_PAGE = 1 << 21  # The bytes of a huge page.
_STEP_BYTES = 16 * HUGE_PAGE  # One call; meanwhile no thread can map memory.
_ENTRY_BYTES = 8  # A page's entry in pagemap; its highest bit means resident.
_MIN_MAPPING_BYTES = 2 * HUGE_PAGE  # A smaller mapping is not gathered.
# A mapping in /proc/self/smaps.
_MAPPING = re.compile(
    r"^(?P<first>[0-9a-f]+)-(?P<end>[0-9a-f]+) \S+ \S+ \S+ (?P<file>\d+)"
    r" *(?P<path>.*)$"
    r"(?:\n(?!Rss)[A-Z].*)*\nRss: +(?P<resident>\d+) kB"
    r"(?:\n(?!Anonymous)[A-Z].*)*\nAnonymous: +(?P<written>\d+) kB"
    r"(?:\n(?!AnonHuge)[A-Z].*)*\nAnonHugePages: +(?P<huge>\d+) kB",
    re.MULTILINE,
)


class _Mapping(NamedTuple):
    """A range of addresses; bytes in memory, changed since mapping, in huge pages."""

    first: int
    end: int
    path: str
    resident: int
    written: int
    huge: int


def _mappings() -> Iterator[_Mapping]:
    for found in _MAPPING.finditer(_read_text("/proc/self/smaps")):
        sizes = (1024 * int(found[key]) for key in ("resident", "written", "huge"))
        path = found["path"] if int(found["file"]) else ""
        yield _Mapping(int(found["first"], 16), int(found["end"], 16), path, *sizes)


def _advise(first: int, end: int, advice: int) -> bool:
    size = ctypes.c_size_t(end - first)
    return int(ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, advice)) == 0


def release_files(folder: Path) -> int:
    """Drop a folder's mapped files from resident memory; return how many bytes."""
    released, place = 0, f"{folder.resolve()}/"
    # The sizes of all mappings take ten times as long to read, at each load.
    if place not in _read_text("/proc/self/maps"):
        return 0
    for mapping in _mappings():
        first, end, path = mapping[:3]
        is_clean = mapping.resident and not mapping.written
        if not (is_clean and path.startswith(place)):
            continue
        # Another thread may have closed a session since, and mapped other memory.
        line = f"^{first:08x}-{end:08x} .* {re.escape(path)}$"
        is_there = re.search(line, _read_text("/proc/self/maps"), re.MULTILINE)
        if is_there and _advise(first, end, _DONTNEED):
            released += mapping.resident
    return released


def use_huge_pages() -> int:
    """Move large, filled mappings to huge pages (Linux 6.1 on); return the bytes."""
    gathered = 0
    for mapping in _mappings():
        size = mapping.end - mapping.first
        if mapping.path or size < _MIN_MAPPING_BYTES or 2 * mapping.huge > size:
            continue
        first = -(-mapping.first // HUGE_PAGE) * HUGE_PAGE
        end = mapping.end // HUGE_PAGE * HUGE_PAGE
        for start in range(first, end, _STEP_BYTES):
            stop = min(start + _STEP_BYTES, end)
            # Parts that were never touched must not grow; Linux joins neighbours.
            if _resident_share(start, stop) >= 0.75:
                _advise(start, stop, _HUGE)
                gathered += (stop - start) * _advise(start, stop, _COLLAPSE)
    return gathered


def _resident_share(first: int, end: int) -> float:
    """The share of pages between two addresses that are in memory; 0.0 if unknown."""
    try:
        with Path("/proc/self/pagemap").open("rb") as file:
            file.seek(first // mmap.PAGESIZE * _ENTRY_BYTES)
            entries = file.read((end - first) // mmap.PAGESIZE * _ENTRY_BYTES)
    except OSError:
        return 0.0
    pages = memoryview(entries).cast("Q")  # the highest bit: present in memory
    return sum(page >> 63 for page in pages) / max(len(pages), 1)
