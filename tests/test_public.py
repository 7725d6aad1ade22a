from __future__ import annotations

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import jetdraft
from jetdraft import errors
from tests.programs import python

ROOT = Path(__file__).parents[1]


def error_classes() -> set[type[Exception]]:
    return {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }


def test_all_is_what_is_public():
    """The lazy names are those that type checkers see, and each can be had."""
    tree = ast.parse(Path(jetdraft.__file__).read_text())
    typed = [
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    ]
    assert sorted(typed) == jetdraft.__all__ == dir(jetdraft)
    assert all(callable(getattr(jetdraft, name)) for name in jetdraft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Modell'"):
        _ = jetdraft.Modell


def test_import_loads_nothing_but_the_names():
    loaded = python("import sys, jetdraft; print(*sys.modules)").split()
    assert not {"numpy", "onnxruntime", "tokenizers", "asyncio"} & set(loaded)
    assert [name for name in loaded if name.startswith("jetdraft")] == ["jetdraft"]


def test_all_has_every_error():
    assert {error.__name__ for error in error_classes()} <= set(jetdraft.__all__)


def test_everything_public_is_documented():
    # Generated docstrings of dataclasses repeat the signature.
    assert not [
        name
        for name in jetdraft.__all__
        if (getattr(jetdraft, name).__doc__ or f"{name}(").startswith(f"{name}(")
    ]


def test_exception_tree_is_the_documented_one():
    parents, last_at_depth = {}, {}
    for line in errors.__doc__.splitlines():
        if found := re.match(r" {4}([ │├└─]*)(\w+Error)\b", line):
            depth, name = len(found[1]) // 4, found[2]
            parents[name] = last_at_depth.get(depth - 1, "Exception")
            last_at_depth[depth] = name
    actual = {error.__name__: error.__base__.__name__ for error in error_classes()}
    assert parents == actual


def test_generating_loads_nothing_heavy(bundle):
    heavy = python(
        """
import sys
import jetdraft
model = jetdraft.load(sys.argv[1], threads=1)
for method in (*model.methods, "auto"):
    assert model.generate(" the self", max_new_tokens=8, method=method).token_ids
import jetdraft.cli.generate, jetdraft.cli.bench, jetdraft.cli.export
wanted = {"torch", "transformers", "optimum", "onnx", "onnx_ir", "onnxscript"}
print(*sorted(wanted & {name.partition(".")[0] for name in sys.modules}))
""",
        str(bundle),
    )
    assert heavy.split() == []


def test_without_onnxruntime_import_works_and_load_names_the_extra(bundle):
    message = python(
        """
import sys
sys.modules["onnxruntime"] = None
import jetdraft
try:
    jetdraft.load(sys.argv[1])
except jetdraft.ProviderError as error:
    print(error)
""",
        str(bundle),
    )
    assert "onnxruntime is not installed" in message
    assert "jetdraft[cpu]" in message


def test_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## v?(\d+\.\d+\.\d+)", changes, re.MULTILINE)
    assert "version" in project["dynamic"]  # test_packaging looks into the wheel
    assert newest is not None
    assert newest[1] == jetdraft.__version__


def test_a_normal_install_has_every_file():
    """Editable ones have them anyway."""
    root = Path(jetdraft.__file__).parent
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["jetdraft"]
    packed = {file for pattern in patterns for file in root.glob(pattern)}
    files = {file for file in root.rglob("*") if file.is_file()}
    assert packed == {f for f in files if f.suffix not in (".py", ".pyc")}
