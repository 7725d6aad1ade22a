"""The resident memory of a process that has loaded a bundle.

    python -m tools.recipes.resident BUNDLE

A process of its own is measured, since its parent holds other models too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jetdraft.errors import JetdraftError


def resident_mb(bundle: Path) -> float:
    """The 10^6 bytes that a process holds after it has generated a few tokens.

    Raises `JetdraftError` if the process fails.

        resident_mb(Path("bundle"))
    """
    command = [sys.executable, "-m", "tools.recipes.resident", str(bundle)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise JetdraftError(
            f"a process that loads {bundle.name} ended with {run.returncode}; free "
            "some memory"
        )
    return float(run.stdout)


def main(bundle: str) -> None:
    """Load a bundle, generate, and print this process's resident memory."""
    import jetdraft

    model = jetdraft.load(bundle)
    model.generate(token_ids=[1], method="none", max_new_tokens=4)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    print(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)


if __name__ == "__main__":
    main(sys.argv[1])
