"""A training that is stopped, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from jetdraft.errors import OutputError
from jetdraft.train.run_folder import STATE
from tests.train.periodic import nothing

Weights = dict[str, Tensor]


def read(folder: Path) -> Weights:
    """The weights of a training's folder."""
    return load_file(folder / "model.safetensors")


def whole_and_cut(
    train: Callable[..., Any],
    folder: Path,
    settings: Any,
    other: tuple[Any, str],
    written: Callable[[Path], Weights] = read,
) -> Weights:
    """Stop a training at its second step, let it go on, and compare with a whole one.

    `train(output, settings, report=)` runs one; a run that goes on with `other`
    settings is refused with a line that names what differs. Gives the weights.
    """
    train(folder / "whole", settings, report=nothing)

    def stop(progress: Any) -> None:
        if progress.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(folder / "cut", settings, report=stop)
    assert (folder / "cut" / STATE).is_file()
    differing, name = other
    with pytest.raises(OutputError, match=rf"other settings.*{name}"):
        train(folder / "cut", differing, report=nothing)
    train(folder / "cut", settings, report=nothing)
    whole, cut = written(folder / "whole"), written(folder / "cut")
    assert whole.keys() == cut.keys()
    for key, tensor in whole.items():
        torch.testing.assert_close(cut[key], tensor)
    with pytest.raises(OutputError, match="holds a finished training"):
        train(folder / "cut", settings, report=nothing)
    return whole
