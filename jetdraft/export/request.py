"""An export as the command line and Python ask for it; torch loads when it starts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jetdraft.bundle import DRAFTER, TARGET, Bundle
from jetdraft.contracts.constants import CAPACITY, MAX_WIDTH
from jetdraft.devices.device import Device
from jetdraft.devices.planning.plan import Question, plan, refusal
from jetdraft.devices.providers import AUTO, fastest
from jetdraft.errors import JetdraftError, OptionError
from jetdraft.recipe import CALIBRATED_DEFAULT, DEFAULT_BLOCK_SIZE, FAST_DEFAULT, Recipe
from jetdraft.staging import check_output

_DRAFTER_BLOCK_SIZE = 32


def export(
    target: str | Path,
    output: str | Path,
    drafter: str | Path | None = None,
    *,
    head: str | Path | None = None,
    quantize: str | None = None,
    quantize_drafter: str | None = None,
    block_size: int | None = None,
    calibration: str | Path | None = None,
    max_bytes: int | None = None,
    max_kl: float | None = None,
    dtype: str | None = None,
    capacity: int = CAPACITY,
    max_width: int = MAX_WIDTH,
    provider: str = "cpu",
    drafter_provider: str | None = None,
    flavour: str | None = None,
    device: str | None = None,
    adapter_scale: float = 1.0,
    fast: bool = False,
    draft_vocab: int | None = None,
    exit_layer: int | None = None,
    select_kv: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Bundle:
    """Export checkpoints, folders, GGUF files or hub ids, to a bundle folder.

    A `head` reads the states of its target; it takes the place of a `drafter`.

    `quantize` and `quantize_drafter` are recipes, for example "int4-gptq-b64-head8"; by
    default the export measures which keep the target's text, or, if it must be `fast`,
    takes a recipe that is safe for large models, and refuses options that need a
    measure. `block_size` counts the weights that share a scale. `calibration` is the
    text to measure on; by default the target writes one, and a drafter can draft the
    `draft_vocab` tokens that are most frequent in it. At most one of `max_bytes`, and
    `max_kl` in nats per token, gives layers of the target more bits. `capacity` is the
    tokens of prompt and output together, `max_width` the rows of the widest pass.
    `provider` will run the target; "auto" is the fastest on this machine. A `device`
    refuses what would not fit it.
    With `select_kv` the target can also read only that many of the committed rows,
    as a drafter of itself or, lossy, as the target.
    `progress` is called with the name of a stage, the steps done and the number of
    steps. `jetdraft export --help` describes the other options and all defaults.

    Raises a `JetdraftError` before it writes; a failure leaves `output` as it was.

        jetdraft.export("target/", "bundle", "drafter/", quantize="int8-rtn-b32")
    """
    check_output(Path(output))
    provider = fastest() if provider == AUTO else provider
    limited = max_bytes is not None or max_kl is not None
    recipe = _recipe(quantize, block_size, limited, device, fast)
    if device is not None:
        scheme = (recipe or Recipe()).scheme
        _check_fits(device, target, drafter, scheme, capacity, provider)
    exporter = _exporter()
    options = exporter.ExportOptions(
        recipe=recipe,
        drafter_recipe=None
        if quantize_drafter is None
        else Recipe.parse(quantize_drafter, _DRAFTER_BLOCK_SIZE),
        calibration=None if calibration is None else Path(calibration),
        limit=exporter.Limit(max_bytes, max_kl) if limited else None,
        dtype=dtype,
        capacity=capacity,
        max_width=min(max_width, capacity),
        provider=provider,
        flavour=flavour,
        adapter_scale=adapter_scale,
        drafter_provider=drafter_provider,
        fast=fast,
        draft_vocab=draft_vocab,
        exit_layer=exit_layer,
        select_kv=select_kv,
    )
    if fast:
        _check_fast(options)
    bundle: Bundle = exporter.export(
        str(target),
        output,
        None if drafter is None else str(drafter),
        options,
        progress,
        None if head is None else str(head),
    )
    return bundle


def _recipe(
    quantize: str | None,
    block_size: int | None,
    limited: bool,
    device: str | None,
    fast: bool,
) -> Recipe | None:
    """The target's recipe; None if the export is to choose it."""
    if quantize is not None:
        return Recipe.parse(quantize, block_size or DEFAULT_BLOCK_SIZE)
    if limited:
        recipe = Recipe.parse(CALIBRATED_DEFAULT)
    elif device is not None and not fast:
        recipe = Recipe.parse(Device.named(device).recipe)
    elif fast or block_size is not None:
        recipe = Recipe.parse(FAST_DEFAULT)
    else:
        return None
    return replace(recipe, block_size=block_size or recipe.block_size)


def _check_fast(options: Any) -> None:
    """Raise `OptionError` for `ExportOptions` that ask a fast export to measure."""
    recipes = [options.recipe_of(name) for name in (TARGET, DRAFTER)]
    measured = {
        "a limit of bytes or KL": options.limit is not None,
        **{f"the recipe {r.name}": r.needs_calibration for r in recipes},
        "a draft vocabulary without --calibration": options.draft_vocab is not None
        and options.calibration is None,
    }
    for what, is_measured in measured.items():
        if is_measured:
            raise OptionError(
                f"a fast export measures nothing, and {what} takes measures; leave one "
                "of the two out"
            )


def _exporter() -> Any:
    """The module that exports, or an error that names the missing extra."""
    try:
        return importlib.import_module("jetdraft.export.exporter")
    except ImportError as error:
        raise JetdraftError(
            f"exporting needs {error.name}; pip install 'jetdraft[cpu,export]'"
        ) from error


def _check_fits(
    device: str,
    target: str | Path,
    drafter: str | Path | None,
    scheme: str,
    capacity: int,
    provider: str,
) -> None:
    """Raise `DeviceError` for a pair that does not fit the device."""
    folders = [Path(source) for source in (target, drafter) if source]
    for folder in folders:
        if not folder.is_dir():
            fix = "leave --device out" if folder.is_file() else "download it first"
            raise OptionError(
                f"--device reads the config in a folder, and {folder} is not a folder; "
                f"{fix}"
            )
    question = Question(
        folders[0],
        Device.named(device),
        folders[1] if drafter else None,
        scheme,
        capacity,
        provider=provider,
    )
    answer = plan(question)
    if not answer.fits:
        raise refusal(question, answer)
