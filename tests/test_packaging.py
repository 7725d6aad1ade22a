"""What pip would install on a board."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())


@pytest.mark.parametrize("version", ["3.12", "3.14"])
def test_the_webgpu_extra_has_wheels_for_arm64(tmp_path, version):
    """PyPI has no CUDA build for a Jetson; this is its way to a GPU."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(tmp_path)]
    for tag in ("manylinux_2_28_aarch64", "manylinux_2_34_aarch64"):
        command += ["--platform", tag]
    command += ["--python-version", version, "--only-binary", ":all:"]
    extra = PROJECT["project"]["optional-dependencies"]["webgpu"]
    done = subprocess.run(
        [*command, *extra], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    wheels = sorted(file.name.partition("-")[0] for file in tmp_path.glob("*.whl"))
    assert wheels == ["onnx", "onnxruntime", "onnxruntime_ep_webgpu"]
    assert all("aarch64" in file.name for file in tmp_path.glob("*.whl"))
