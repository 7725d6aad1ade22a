"""Refuses weights of layers that a config does not describe.

transformers leaves them out without a word, and the rest is another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from jetdraft.errors import CheckpointError, printable

_LAYER = re.compile(r"((?:.*?\.)?(?:layers?|blocks?|h))\.(\d+)\.(.*)")
"""A stack of layers, a layer's number, and a weight in it."""

_MTP = "eh_proj."
"""DeepSeek, GLM and their kin number an MTP module as a layer behind the last, and this
weight of it tells; only --head reads the module."""


def check_unread(source: str, read: Iterable[str], unread: Iterable[str]) -> None:
    """Raise `CheckpointError` for unread weights of layers behind a stack's last.

    `read` names the weights of the model, `unread` those of the files that it lacks.

        check_unread(source, ["h.0.w"], ["h.1.w"])    # layer 1 is behind the last
    """
    last: dict[str, int] = {}
    for stack, number, _ in _layers(read):
        last[stack] = max(number, last.get(stack, 0))
    behind = [
        layer for layer in _layers(unread) if layer[1] > last.get(layer[0], layer[1])
    ]
    modules = {layer[:2] for layer in behind if layer[2].startswith(_MTP)}
    for stack, number, weight in sorted(behind):
        if (stack, number) not in modules:
            name = printable(f"{stack}.{number}.{weight}", 100)
            raise CheckpointError(
                f"{source} has the weight {name}, and its config.json describes "
                f"{last[stack] + 1} such layers; fetch config.json again"
            )


def _layers(names: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    for name in names:
        match = _LAYER.match(name)
        if match:
            yield match[1], int(match[2]), match[3]
