"""The limits of a server, for `jetdraft serve` and `Service`; imports no package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from jetdraft.options import Flag, check_bounds


@dataclass(frozen=True)
class Limits:
    """Limits of requests, and of sound files in memory; raises `OptionError`."""

    max_new_tokens: Annotated[
        int,
        Flag(
            "ending",
            "The most tokens of a text.",
            names=("-n", "--max-new-tokens"),
            least=1,
        ),
    ] = 1024
    max_body_bytes: Annotated[
        int, Flag("limits", "The most bytes of a request's body.", least=1)
    ] = 1_000_000
    max_sound_bytes: Annotated[
        int, Flag("limits", "The most bytes of a request with a sound.", least=1)
    ] = 25_000_000
    max_waiting: Annotated[
        int, Flag("limits", "The most requests that may wait for a model.", least=0)
    ] = 64
    max_wait: Annotated[
        float, Flag("limits", "The most seconds that a request may wait.", above=0)
    ] = 120.0
    max_seconds: Annotated[
        float, Flag("limits", "The most seconds that a text may take.", above=0)
    ] = 300.0
    max_sounds: int = 8

    def __post_init__(self) -> None:
        check_bounds(self)
