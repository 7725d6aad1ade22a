"""Where and how a bundle runs."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from jetdraft.devices.providers import AUTO, PROVIDERS
from jetdraft.errors import OptionError, ProviderError

OFF = "off"
"""The name in place of the drafter's provider to run without the drafter."""


class LoadOptions(TypedDict, total=False):
    """Where and how a bundle runs: the keyword arguments of `jetdraft.load`.

    provider          "cpu", "cuda", "tensorrt" or "auto", the fastest of them that runs
                      here; default: the provider that the bundle was exported for
    threads           threads of the target; default: the cores of this process
    streams           a `streams.npz` of the same base; default: the bundle's own
    store             a file that keeps requests and responses to draft from; default:
                      nothing is kept
    drafter_provider  another provider for the drafter, or "off" to run without it
    learn             a folder that keeps what the target said where drafts were wrong,
                      and the weights that a drafter learned of it; default: nothing is
                      kept
    """

    provider: str | None
    threads: int | None
    streams: str | Path | None
    store: str | Path | None
    drafter_provider: str | None
    learn: str | Path | None


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
