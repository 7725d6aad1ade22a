"""Builds the library of operators with the package; all else is in pyproject.toml.

    python setup.py bdist_wheel --plat-name manylinux_2_28_aarch64

The compiler is the package ziglang from PyPI, so that no machine needs its own, and
each machine builds for every kind of processor: a wheel has the library of its
platform, by default this machine's.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDER = Path(__file__).parent / "jetdraft" / "native"

GLIBC = "2.28"
"""The oldest C library that the library runs on: manylinux_2_28."""

FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions"),
    *("-fno-rtti", "-fno-threadsafe-statics", "-Wall", "-Wextra"),
    # Sums must be the same on every processor: no fused operation that is not written.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    "-Wno-unused-function",
)

INPUTS = (".cpp", ".h")

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")

SOURCES = {
    "x86_64": {
        "library": (),
        "portable": (),
        "cpu": (),
        "avx2": _AVX2,
        "avxvnni": (*_AVX2, "-mavxvnni"),
        "avx512vnni": (*_AVX2, *_AVX512),
    },
    "aarch64": {
        "library": (),
        "portable": (),
        "cpu": (),
        "dotprod": ("-mcpu=generic+dotprod",),
        "i8mm": ("-mcpu=generic+dotprod+i8mm",),
    },
}
"""The flags of each source by architecture: a source is for one kind of processor."""


def build(folder: Path, architecture: str) -> Path:
    """Compile the library for an architecture; the file, which may be up to date.

    Raises `CalledProcessError` if the compiler fails.
    """
    library = folder / f"{architecture}.so"
    changed = max(f.stat().st_mtime for f in FOLDER.iterdir() if f.suffix in INPUTS)
    if library.exists() and library.stat().st_mtime >= changed:
        return library
    target = ("-target", f"{architecture}-linux-gnu.{GLIBC}")
    compiler, sources = [sys.executable, "-m", "ziglang"], SOURCES[architecture]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = {name: f"{scratch}/{name}.o" for name in sources}

        def compile_source(name: str) -> None:
            flags = (*FLAGS, *sources[name], *target)
            names = "-c", str(FOLDER / f"{name}.cpp"), "-o", objects[name]
            subprocess.run([*compiler, "c++", *flags, *names], check=True)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_source, sources))
        # Linked as C, since the library needs nothing of the C++ runtime.
        link, linked = (
            [*compiler, "cc", *target, "-shared", "-s", "-Wl,-z,defs"],
            Path(scratch, "so"),
        )
        subprocess.run([*link, *objects.values(), "-o", str(linked)], check=True)
        linked.replace(library)
    return library


def architectures(platform: str) -> list[str]:
    """The processors of a platform such as "linux-x86_64" that have a library."""
    return [a for a in SOURCES if "linux" in platform and platform.endswith(a)]


class BuildPackage(build_py):
    """Copies the modules, and compiles `jetdraft/native` beside them."""

    def run(self) -> None:
        super().run()
        wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
        root = Path(".") if self.editable_mode else Path(self.build_lib)
        platform = (wheel and wheel.plat_name) or sysconfig.get_platform()
        for architecture in architectures(platform):
            build(root / "jetdraft" / "native", architecture)


class BuildWheel(bdist_wheel):
    """Gives a wheel the tag of its library's platform."""

    def finalize_options(self) -> None:
        if not self.plat_name and architectures(sysconfig.get_platform()):
            self.plat_name = sysconfig.get_platform()
        super().finalize_options()


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel})
