"""Programs of the repository as modules, and processes whose output a test reads."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def module_of(file: str, patch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.syspath_prepend(path.parent)
    # Dataclasses look there for their types.
    patch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def ended(*command: object, **how: Any) -> subprocess.CompletedProcess[str]:
    words = [*map(str, command)]
    return subprocess.run(words, check=False, capture_output=True, text=True, **how)


def printed(*command: object, **how: Any) -> str:
    done = ended(*command, **how)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def python(code: str, *arguments: object, **how: Any) -> str:
    return printed(sys.executable, "-c", code, *arguments, **how)
