"""An HTTP server with OpenAI's API, which `jetdraft serve` runs, and its limits."""

from dataclasses import dataclass
from functools import partial

from jetdraft.options import check_bounds, declared

_limits = partial(declared, "limits")


@dataclass(frozen=True)
class Limits:
    """Limits of requests, and of sound files in memory; raises `OptionError`."""

    max_new_tokens: int = declared(
        "ending",
        1024,
        "The most tokens of a text.",
        names=("-n", "--max-new-tokens"),
        least=1,
    )
    max_body_bytes: int = _limits(
        1_000_000, "The most bytes of a request's body.", least=1
    )
    max_sound_bytes: int = _limits(
        25_000_000, "The most bytes of a request with a sound.", least=1
    )
    max_waiting: int = _limits(
        64, "The most requests that may wait for a model.", least=0
    )
    max_wait: float = _limits(
        120.0, "The most seconds that a request may wait.", above=0
    )
    max_seconds: float = _limits(
        300.0, "The most seconds that a text may take.", above=0
    )
    max_sounds: int = 8

    def __post_init__(self) -> None:
        check_bounds(self)
