"""Every processor gives the bits of the portable code: `agreement.cpp` compares them.

Code for Arm and for older processors runs under qemu-user. SIMDe emulates the newest
instructions of x86-64, which qemu lacks.
"""

import os
import platform
import re
import runpy
import subprocess
import sys
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from shutil import which

import pytest

from tests.programs import printed

SETUP = runpy.run_path(str(Path(__file__).parents[2] / "setup.py"))
FLAGS, FOLDER, SOURCES = (SETUP[name] for name in ("FLAGS", "FOLDER", "SOURCES"))
PROGRAM, LOADER, EMULATOR = (
    Path(__file__).with_name(n) for n in ("agreement.cpp", "load.c", "emulated.h")
)
QEMUS = {m: which(f"qemu-{m}-static") or which(f"qemu-{m}") for m in SOURCES}


def compiled(folder, architecture, **changed):
    """The program with all sources of an architecture but the operators, static."""
    target = ["-target", f"{architecture}-linux-musl"]
    sources = {FOLDER / f"{n}.cpp": f for n, f in SOURCES[architecture].items()}
    sources |= {FOLDER / f"{n}.cpp": f for n, f in changed.items()} | {PROGRAM: ()}
    del sources[FOLDER / "library.cpp"]
    objects, speed = [], "-O0" if changed else "-O1"
    for source, flags in sources.items():
        objects.append(str(folder / f"{source.stem}.o"))
        names = [speed, *flags, "-c", str(source), "-o", objects[-1]]
        zig("c++", *target, *FLAGS, *names)
    zig("cc", *target, "-static", *objects, "-o", str(folder / "agreement"))
    return folder / "agreement"


def zig(*arguments):
    subprocess.run([sys.executable, "-m", "ziglang", *arguments], check=True)


def agreeing(*command):
    lines = printed(*command).splitlines()
    whole = r"(\w+): 400 products, 40 attentions, 80 states, 0 differ"
    return {match[1] for match in [re.fullmatch(whole, line) for line in lines]}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return cache(lambda name: compiled(tmp_path_factory.mktemp(name), name))


def test_this_processor_agrees_with_the_portable_code(programs):
    assert "portable" in agreeing(programs(platform.machine()))


on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")


@on_x86
def test_newer_processors_agree_with_the_portable_code(tmp_path):
    """With AVX2 in place of their instructions."""
    headers = distribution("cmeel-simde").locate_file("cmeel.prefix/include")
    flags = ["-include", str(EMULATOR), "-isystem", str(headers)]
    flags += SOURCES["x86_64"]["avx2"]
    program = compiled(tmp_path, "x86_64", avx512vnni=flags, avxvnni=flags)
    assert {"avx512vnni", "avxvnni", "portable"} < agreeing(program, "emulated")


@on_x86
@pytest.mark.parametrize("source", ["cpu", "library", "portable"])
def test_code_for_all_processors_has_no_newer_instructions(tmp_path, source):
    """None of AVX, whose mnemonics begin with v."""
    assembly = tmp_path / "source.s"
    target = ["-target", f"x86_64-linux-gnu.{SETUP['GLIBC']}"]
    names = ["-S", "-g0", str(FOLDER / f"{source}.cpp"), "-o", str(assembly)]
    zig("c++", *FLAGS, *SOURCES["x86_64"][source], *target, *names)
    found = set(re.findall(r"^\t([a-z]\w*)", assembly.read_text(), re.MULTILINE))
    assert {"ret", "retq"} & found
    assert not [name for name in found if name.startswith("v")]


@pytest.mark.skipif(
    "JETDRAFT_NEEDS_QEMU" not in os.environ
    and (None in QEMUS.values() or "QEMU_LD_PREFIX" not in os.environ),
    reason="no qemu-user, see scripts/qemu",
)
@pytest.mark.parametrize(
    ("machine", "processor", "found"),
    [
        ("x86_64", "Haswell", ["avx2", "portable"]),
        ("x86_64", "SandyBridge", ["portable"]),  # has only AVX
        ("x86_64", "Conroe", ["portable"]),
        ("aarch64", "max", ["i8mm", "dotprod", "portable"]),
        ("aarch64", "cortex-a57", ["portable"]),
    ],
)
def test_another_processor(programs, libraries, machine, processor, found):
    """It agrees, and loads the library with its C library and takes its best code."""
    qemu = QEMUS[machine], "-cpu", processor
    assert agreeing(*qemu, programs(machine)) == set(found)
    assert printed(*qemu, *libraries(machine)) == f"{found[0]}\n"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """A program for the oldest C library that the library runs on, and the library."""

    def built(machine):
        folder = tmp_path_factory.mktemp(machine)
        library, loader = SETUP["build"](folder, machine), folder / "load"
        target = f"{machine}-linux-gnu.{SETUP['GLIBC']}"
        zig("cc", "-target", target, str(LOADER), "-o", str(loader))
        return loader, library

    return cache(built)
