"""Builds the library of operators with the package; all else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "jetdraft" / "native"))
from build import SOURCES, build


class BuildPackage(build_py):
    """Copies the modules, and compiles `jetdraft/native` beside them."""

    def run(self) -> None:
        super().run()
        root = Path(".") if self.editable_mode else Path(self.build_lib)
        for architecture in SOURCES:
            build(root / "jetdraft" / "native", architecture)


setup(cmdclass={"build_py": BuildPackage})
