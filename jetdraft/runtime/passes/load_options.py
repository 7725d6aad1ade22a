"""Where and how a bundle runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypedDict

from jetdraft.devices.providers import AUTO, PROVIDERS
from jetdraft.errors import OptionError, ProviderError
from jetdraft.options import Flag

OFF = "off"
"""The name in place of the drafter's provider to run without the drafter."""


class LoadOptions(TypedDict, total=False):
    """Where and how a bundle runs: the keyword arguments of `jetdraft.load`."""

    threads: Annotated[
        int | None,
        Flag(
            "runtime",
            "Threads of the target; default: all cores.",
            names=("-t", "--threads"),
        ),
    ]
    provider: Annotated[
        str | None,
        Flag(
            "runtime",
            f"What runs the target: {', '.join(PROVIDERS)} or auto; default: the "
            "provider of the export.",
        ),
    ]
    drafter_provider: Annotated[
        str | None,
        Flag(
            "runtime",
            "What runs the drafter: a provider, or off for no drafter; default: the "
            "provider of the export, or --provider.",
        ),
    ]
    streams: Annotated[
        str | Path | None,
        Flag(
            "runtime",
            "A streams.npz of the same base; default: the streams in the bundle.",
        ),
    ]
    store: Annotated[
        str | Path | None,
        Flag(
            "drafting",
            "Keep requests and responses in this file, and draft from them; default: "
            "keep nothing.",
        ),
    ]
    learn: Annotated[
        str | Path | None,
        Flag(
            "drafting",
            "Keep what the target said where drafts were wrong in this folder, and "
            "take the drafter's weights that train drafter --from-use learns of it; "
            "default: keep nothing.",
            metavar="DIR",
        ),
    ]


def check_load_options(options: LoadOptions) -> None:
    """Refuse wrong values; only the command line has checked its options before."""
    choices = LoadOptions.__annotations__
    for name in options:
        if name not in choices:
            words = ", ".join(choices)
            raise OptionError(f"unknown option {name!r} of load; choose {words}", name)
    for field in ("streams", "store", "learn"):
        value = options.get(field)
        if not isinstance(value, (str, Path, type(None))):
            raise OptionError(f"{field} {value!r} is not a path; give a path", field)
    drafter = options.get("drafter_provider")
    if drafter not in (None, OFF, AUTO, *PROVIDERS):
        names = ", ".join((*PROVIDERS, AUTO, OFF))
        raise ProviderError(
            f"unknown provider {drafter!r} for the drafter; choose {names}"
        )
