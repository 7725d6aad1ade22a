"""Every processor gives the bits of the portable code: `agreement.cpp` compares them.

Code for Arm and for older processors runs under qemu-user. SIMDe emulates the newest
instructions of x86-64, which qemu lacks.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ended

SETUP = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))
FLAGS, FOLDER, SOURCES = (SETUP[name] for name in ("FLAGS", "FOLDER", "SOURCES"))
PROGRAM, LOADER, EMULATOR = (
    Path(__file__).with_name(n) for n in ("agreement.cpp", "load.c", "emulated.h")
)
QEMUS = {
    machine: shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    for machine in SOURCES
}


def compiled(folder, architecture, **changed):
    """The program with all sources of an architecture but the operators, static.

    `changed` has other flags for some sources.
    """
    target = ["-target", f"{architecture}-linux-musl"]
    flags = SOURCES[architecture] | changed
    sources = {FOLDER / f"{name}.cpp": own for name, own in flags.items()}
    del sources[FOLDER / "library.cpp"]
    objects = []
    for source, flags in {**sources, PROGRAM: ()}.items():
        objects.append(str(folder / f"{source.stem}.o"))
        speed = "-O0" if changed else "-O1"
        names = [speed, *flags, "-c", str(source), "-o", objects[-1]]
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


on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")


@pytest.fixture(scope="module")
def own_program(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("own"), platform.machine())


def test_this_processor_agrees_with_the_portable_code(own_program):
    assert "portable" in agreeing(own_program)


@on_x86
def test_newer_processors_agree_with_the_portable_code(tmp_path):
    """With AVX2 in place of their instructions."""
    headers = importlib.metadata.distribution("cmeel-simde").locate_file(
        "cmeel.prefix/include"
    )
    flags = ("-include", EMULATOR, "-isystem", headers, *SOURCES["x86_64"]["avx2"])
    newer = {name: [*map(str, flags)] for name in ("avx512vnni", "avxvnni")}
    program = compiled(tmp_path, "x86_64", **newer)
    assert {*newer, "portable"} < agreeing(program, "emulated")


@on_x86
@pytest.mark.parametrize("source", ["cpu", "library", "portable"])
def test_code_for_all_processors_has_no_newer_instructions(tmp_path, source):
    """None of AVX, whose mnemonics begin with v."""
    assembly = tmp_path / "source.s"
    target = ["-target", f"x86_64-linux-gnu.{SETUP['GLIBC']}"]
    names = ["-S", str(FOLDER / f"{source}.cpp"), "-o", str(assembly)]
    zig("c++", *FLAGS, *SOURCES["x86_64"][source], *target, *names)
    found = set(re.findall(r"^\t([a-z]\w*)", assembly.read_text(), re.MULTILINE))
    assert {"ret", "retq"} & found
    assert not [name for name in found if name.startswith(("v", "tzcnt"))]


needs_qemu = pytest.mark.skipif(
    "JETDRAFT_NEEDS_QEMU" not in os.environ
    and (None in QEMUS.values() or "QEMU_LD_PREFIX" not in os.environ),
    reason="no qemu-user, see scripts/qemu",
)

LOADS = {
    "x86_64": {"Haswell": "avx2", "SandyBridge": "portable", "Conroe": "portable"},
    "aarch64": {"max": "i8mm", "cortex-a57": "portable"},
}
"""The instructions that qemu's processors must choose; SandyBridge has only AVX."""


@needs_qemu
@pytest.mark.parametrize("machine", LOADS)
def test_other_processors_load_the_library(machine, tmp_path):
    """With their C library; a program for the oldest that the library runs on."""
    library, loader = SETUP["build"](tmp_path, machine), tmp_path / "load"
    zig("cc", "-target", f"{machine}-linux-gnu.2.28", str(LOADER), "-o", str(loader))
    for processor, isa in LOADS[machine].items():
        done = ended(QEMUS[machine], "-cpu", processor, loader, library)
        assert done.stdout == f"{isa}\n", done.stderr


@needs_qemu
def test_arm_agrees_with_the_portable_code(tmp_path):
    program, qemu = compiled(tmp_path, "aarch64"), QEMUS["aarch64"]
    assert agreeing(qemu, "-cpu", "max", program) == {"i8mm", "dotprod", "portable"}
    assert agreeing(qemu, "-cpu", "cortex-a57", program) == {"portable"}


@needs_qemu
@on_x86
def test_older_processors_agree_with_the_portable_code(own_program):
    qemu = QEMUS["x86_64"], "-cpu"
    assert agreeing(*qemu, "Haswell", own_program) == {"avx2", "portable"}
    assert agreeing(*qemu, "Conroe", own_program) == {"portable"}
