"""Every processor gives the bits of the portable code: `agreement.cpp` compares them.

Arm code is built here and runs under qemu-user.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))
FLAGS, FOLDER, SOURCES = (SETUP[name] for name in ("FLAGS", "FOLDER", "SOURCES"))
PROGRAM, LOADER = (Path(__file__).with_name(n) for n in ("agreement.cpp", "load.c"))
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def compiled(folder, architecture):
    """The program with all sources of an architecture but the operators, static."""
    target = ["-target", f"{architecture}-linux-musl"]
    sources = {FOLDER / f"{n}.cpp": flags for n, flags in SOURCES[architecture].items()}
    del sources[FOLDER / "library.cpp"]
    objects = []
    for source, flags in {**sources, PROGRAM: ()}.items():
        objects.append(str(folder / f"{source.stem}.o"))
        names = ["-O1", *flags, "-c", str(source), "-o", objects[-1]]
        zig("c++", *target, *FLAGS, *names)
    zig("cc", *target, "-static", *objects, "-o", str(folder / "agreement"))
    return folder / "agreement"


def zig(*arguments):
    subprocess.run([sys.executable, "-m", "ziglang", *arguments], check=True)


def agreeing(*command):
    """The processors whose products had the portable bits."""
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(\w+): (\d+) products, 0 differ$", lines, re.MULTILINE)
    assert len(found) == len(lines.splitlines())
    assert all(int(products) == 400 for _, products in found)
    return {name for name, _ in found}


def test_this_processor_agrees_with_the_portable_code(tmp_path):
    assert "portable" in agreeing(compiled(tmp_path, platform.machine()))


needs_qemu = pytest.mark.skipif(
    "JETDRAFT_NEEDS_QEMU" not in os.environ
    and (QEMU is None or "QEMU_LD_PREFIX" not in os.environ),
    reason="no qemu-user for aarch64, see scripts/qemu",
)


@needs_qemu
def test_arm_loads_the_library(tmp_path):
    """With its C library; a program for the oldest that the library runs on."""
    library, loader = SETUP["build"](tmp_path, "aarch64"), tmp_path / "load"
    zig("cc", "-target", "aarch64-linux-gnu.2.28", str(LOADER), "-o", str(loader))
    for processor, isa in (("max", "i8mm"), ("cortex-a57", "portable")):
        command = [QEMU, "-cpu", processor, loader, library]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == f"{isa}\n", done.stderr


@needs_qemu
def test_arm_agrees_with_the_portable_code(tmp_path):
    program = compiled(tmp_path, "aarch64")
    assert agreeing(QEMU, "-cpu", "max", program) == {"i8mm", "dotprod", "portable"}
    assert agreeing(QEMU, "-cpu", "cortex-a57", program) == {"portable"}
