"""What the processor of this machine is, and how its kernels round."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path


def processor_name() -> str:
    """The name of the processor; the architecture where the system hides it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def processor_features() -> str:
    """A hash of the instruction sets, since they decide how kernels round."""
    used_names = ("flags", "Features", "cpu family", "model", "stepping", "CPU part")
    used_lines: set[str] = set()
    for file in ("/proc/cpuinfo", "/proc/device-tree/model"):
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            continue
        names = {line: line.partition(":")[0].strip() for line in lines}
        is_board = file.endswith("model")
        used_lines |= {line for line in lines if is_board or names[line] in used_names}
    return hashlib.sha256("\n".join(sorted(used_lines)).encode()).hexdigest()[:12]
