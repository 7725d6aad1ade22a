"""jetdraft export: a bundle from checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from jetdraft.bundle import FLAVOURS
from jetdraft.devices.device import Device
from jetdraft.devices.plan import Question, plan, refusal
from jetdraft.devices.providers import AUTO, PROVIDERS, fastest
from jetdraft.errors import OptionError
from jetdraft.recipe import (
    ALGORITHMS,
    BLOCK_SIZES,
    CALIBRATED_DEFAULT,
    DEFAULT_BLOCK_SIZE,
    SCHEMES,
    Recipe,
)
from jetdraft.terminal.command import Command, extra_module, option
from jetdraft.terminal.flags import PATH, output_option
from jetdraft.terminal.progress import ProgressBars


@click.command("export", cls=Command)
@click.argument("target")
@option("checkpoint", "--drafter", help="A small checkpoint with the same tokenizer.")
@option(
    "checkpoint",
    "--adapter-scale",
    default=1.0,
    show_default=True,
    help="How far streams of the shared mode move the target from its base, 0 to 1.",
)
@option(
    "checkpoint",
    "--capacity",
    type=int,
    default=2048,
    show_default=True,
    help="The most tokens of a prompt and its text together.",
)
@option(
    "checkpoint",
    "--max-width",
    type=int,
    default=128,
    show_default=True,
    help="The most rows of a pass.",
)
@option(
    "checkpoint",
    "--dtype",
    type=click.Choice(["fp32", "fp16"]),
    help="Type of the activations; default: fp32 on the CPU, fp16 elsewhere.",
)
@option(
    "checkpoint",
    "--flavour",
    type=click.Choice(FLAVOURS),
    help="contrib: onnxruntime's own operators; standard: only ai.onnx operators. "
    "Default: standard for TensorRT, contrib elsewhere.",
)
@option(
    "quantization",
    "--quantize",
    help=f"A recipe of weights: {', '.join(SCHEMES)}, followed by overrides, for "
    f"example int4-gptq-b64-head8. Algorithms: {', '.join(ALGORITHMS)}. Default: "
    f"int4; with --calibration the recipe of --device, or {CALIBRATED_DEFAULT}.",
)
@option(
    "quantization",
    "--block-size",
    type=click.Choice([str(size) for size in BLOCK_SIZES]),
    help=f"Weights that share a scale, if the recipe does not say; default: "
    f"{DEFAULT_BLOCK_SIZE}.",
)
@option(
    "quantization",
    "--quantize-drafter",
    help="A recipe for the drafter; default: int8-rtn-b32, or none with --quantize "
    "none.",
)
@option(
    "quantization",
    "--calibration",
    type=PATH,
    help="A text like the texts to come, for recipes with gptq, awq or kv8, and for "
    "--max-bytes and --max-kl.",
)
@option(
    "quantization",
    "--max-bytes",
    type=int,
    help="Give the most sensitive layers of the target more bits, up to this size of "
    "its matrices in bytes.",
)
@option(
    "quantization",
    "--max-kl",
    type=float,
    help="Give layers more bits until the mean KL divergence from the full target is "
    "below this, in nats per token.",
)
@option(
    "device",
    "--device",
    help="Refuse a bundle that does not fit this device; jetdraft doctor --devices "
    "lists the names.",
)
@option(
    "runtime",
    "--provider",
    type=click.Choice([*PROVIDERS, AUTO]),
    default="cpu",
    show_default=True,
    help="What will run the target; auto: the fastest provider on this machine.",
)
@option(
    "runtime",
    "--drafter-provider",
    type=click.Choice(list(PROVIDERS)),
    help="What will run the drafter; default: the target's provider.",
)
@output_option("Write the bundle to this folder.")
def command(
    target: str,
    drafter: str | None,
    output: Path,
    quantize: str | None,
    block_size: str | None,
    quantize_drafter: str | None,
    calibration: Path | None,
    max_bytes: int | None,
    max_kl: float | None,
    dtype: str | None,
    capacity: int,
    max_width: int,
    provider: str,
    drafter_provider: str | None,
    flavour: str | None,
    device: str | None,
    adapter_scale: float,
) -> None:
    """Export TARGET, a checkpoint folder or hub id, to a bundle."""
    recipe = _recipe(quantize, block_size, device, calibrated=calibration is not None)
    if device is not None:
        _check_fits(device, target, drafter, recipe.scheme, capacity)
    exporter = extra_module("jetdraft.export.exporter", "exporting", "export")
    limited = max_bytes is not None or max_kl is not None
    options = exporter.ExportOptions(
        recipe=recipe,
        drafter_recipe=quantize_drafter and Recipe.parse(quantize_drafter, 32),
        calibration=calibration,
        limit=exporter.Limit(max_bytes, max_kl) if limited else None,
        dtype=dtype,
        capacity=capacity,
        max_width=min(max_width, capacity),
        provider=fastest() if provider == AUTO else provider,
        flavour=flavour,
        adapter_scale=adapter_scale,
        drafter_provider=drafter_provider,
    )
    with ProgressBars() as bars:
        bundle = exporter.export(target, output, drafter, options, bars)
    size = sum(file["bytes"] for file in bundle.files.values())
    methods = ", ".join(bundle.methods)
    click.echo(f"{output}: {size / 1e6:.1f} MB, methods {methods}", err=True)
    stored = bundle.target.quantization
    kl = f", KL {stored['kl']:.2g}" if limited else ""
    if quantize is None or limited:
        click.echo(f"target: {Recipe.from_json(stored).name}{kl}", err=True)


def _recipe(
    quantize: str | None, block_size: str | None, device: str | None, calibrated: bool
) -> Recipe:
    """Return the target's recipe; `calibrated` says whether there is a text for it."""
    if quantize is not None or not calibrated:
        size = int(block_size or DEFAULT_BLOCK_SIZE)
        return Recipe.parse(quantize or "int4", size)
    recipe = Recipe.parse(Device.named(device).recipe if device else CALIBRATED_DEFAULT)
    return replace(recipe, block_size=int(block_size or recipe.block_size))


def _check_fits(
    device: str, target: str, drafter: str | None, quantize: str, capacity: int
) -> None:
    """Raise `DeviceError` if the model does not fit; needs folders, not hub ids."""
    folders = [Path(name) for name in (target, drafter) if name]
    for folder in folders:
        if not folder.is_dir():
            raise OptionError(
                f"--device reads the config in a folder, and {folder} is not a folder; "
                "download it first"
            )
    question = Question(
        folders[0],
        Device.named(device),
        folders[1] if drafter else None,
        quantize,
        capacity,
    )
    prediction = plan(question)
    if not prediction.fits:
        raise refusal(question, prediction)
