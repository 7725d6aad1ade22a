"""Refuses configs that describe more than a checkpoint can hold.

A few letters of a config.json ask for a million layers or for matrices of terabytes,
which would be built before their weights are found missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.initialization import no_init_weights

from jetdraft.errors import CheckpointError, printable
from jetdraft.parsing import JsonError, read_json_file

LAYERS = {
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
    *("decoder_num_hidden_layers", "num_encoder_blocks", "num_stages"),
    *("num_mtp_layers", "num_nextn_predict_layers", "num_residual_layers"),
}
"""The fields in which configs of transformers count layers."""

MOST_LAYERS = 10_000
"""Of any kind; the deepest published models have some hundreds."""

MOST_TENSORS, MOST_WEIGHTS = 100_000, 10**13
"""Of a model whose files do not say how many they hold."""

SPARE = 4
"""How many times more tensors a model may have than its files. It registers a tied
matrix up to four times, and the parts of a fused matrix each."""

WEIGHTS_PER_BYTE = 8
"""At most, in the files: packed integers have two bits or more."""


@dataclass(frozen=True)
class Bounds:
    """The most tensors, and weights in them, that a checkpoint's model may have.

    Bounds.of("checkpoint/")
    """

    tensors: int = MOST_TENSORS
    weights: int = MOST_WEIGHTS

    @classmethod
    def of(cls, source: str) -> Bounds:
        """The bounds by the files of a folder; wide bounds for other sources."""
        files = list(Path(source).glob("*.safetensors")) if source else []
        try:
            names = sum(_tensors(file) for file in files)
            size = sum(file.stat().st_size for file in files)
        except (OSError, SafetensorError):
            return cls()  # loading it says what is wrong
        if not names:
            return cls()
        return cls(100 + SPARE * names, WEIGHTS_PER_BYTE * size)


def _tensors(file: Path) -> int:
    with safe_open(file, "pt") as opened:
        return len(opened.keys())


def check_layers(source: str) -> None:
    """Raise `CheckpointError` for a folder whose config.json has absurdly many layers.

    Some configs write a list with an entry for each layer when they are read.
    """
    file = Path(source) / "config.json"
    if not os.path.isfile(file):
        return
    try:
        config = read_json_file(file)
    except (OSError, JsonError):
        return  # transformers says what is wrong
    for name, value in _numbers(config):
        if name in LAYERS and value > MOST_LAYERS:
            raise CheckpointError(
                f"{printable(file)} has {printable(name, 60)} {value}, and at most "
                f"{MOST_LAYERS} layers are built; fetch it again"
            )


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, int | float]]:
    """The numbers in a JSON value, each with the name of its field."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, (int, float)):
        yield name, value


def skeleton(source: str, model_class: Any, config: Any, bounds: Bounds) -> Any:
    """The model of a config without weights; raises `CheckpointError` beyond `bounds`.

    skeleton(source, AutoModelForCausalLM, config, Bounds.of(source)).num_parameters()
    """
    with _bounded(source, bounds), no_init_weights(), torch.device("meta"):
        return model_class.from_config(config, trust_remote_code=False)


@contextmanager
def _bounded(source: str, bounds: Bounds) -> Iterator[None]:
    """Refuse models beyond the bounds while they are built, tensor by tensor."""
    tensors = weights = 0

    def count(module: object, name: str, parameter: torch.Tensor | None) -> None:
        nonlocal tensors, weights
        tensors += 1
        weights += 0 if parameter is None else parameter.numel()
        if tensors > bounds.tensors or weights > bounds.weights:
            raise CheckpointError(
                f"the config.json of {printable(source)} describes a larger model than "
                "its files hold; fetch it again"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
