"""Which execution providers really run here.

onnxruntime's own list is of what was compiled in. A provider counts as present once a
graph has run on it; if it does not, the reason is worth more than the fact: a missing
library, or a GPU that the build holds no code for.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from dataclasses import dataclass

from jetdraft.devices.probe import RAN
from jetdraft.runtime.ort import ort
from jetdraft.runtime.session import PROVIDERS

PATIENCE = 120.0
"""Seconds: TensorRT builds an engine for the graph."""


@dataclass(frozen=True)
class Presence:
    """Whether a provider runs; `reason` says why not, in one line."""

    name: str
    compiled: bool
    runs: bool
    reason: str = ""


@functools.cache
def presence(name: str) -> Presence:
    """Run a small graph on a provider of `PROVIDERS`, once per process.

    presence("cuda").reason
    """
    full = PROVIDERS[name]
    if full not in ort.get_available_providers():
        return Presence(
            name, False, False, f"this onnxruntime was built without {full}"
        )
    command = [sys.executable, "-m", "jetdraft.devices.probe", full]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Presence(name, True, False, f"a small graph did not run ({error})")
    if done.returncode == 0 and done.stdout.split()[-1:] == [RAN]:
        return Presence(name, True, True)
    return Presence(name, True, False, reason_of(done.returncode, done.stderr))


def reason_of(code: int, said: str) -> str:
    """What is wrong, out of what a failed run left on stderr."""
    library = re.search(r"error: (\S+): cannot open shared object file", said)
    if library:
        return f"it needs {library[1]}, which the loader does not find"
    if "no kernel image" in said or "NoKernelImageForDevice" in said:
        return "this build of onnxruntime holds no code for this GPU"
    if "no CUDA-capable device" in said or "CUDA failure 100" in said:
        return "there is no CUDA device, or its driver is not loaded"
    if "driver version is insufficient" in said or "CUDA failure 35" in said:
        return "the GPU's driver is older than this build's CUDA"
    if code < 0:
        return f"a small graph ended the process with signal {-code}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"a small graph failed: {(lines or ['no message'])[-1][:200]}"
