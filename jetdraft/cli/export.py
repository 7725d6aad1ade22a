"""jetdraft export: checkpoints to a bundle."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from jetdraft.bundle import FLAVOURS
from jetdraft.cli.options import optional
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


class Stages:
    """A progress bar per stage of the export, on a terminal's standard error."""

    def __init__(self) -> None:
        self.stage = ""
        self.bar: Any = None
        self.done = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        if stage != self.stage:
            self.close()
            self.stage, self.done = stage, 0
            self.bar = click.progressbar(
                length=total, label=f"{stage:18}", file=sys.stderr
            )
        self.bar.update(done - self.done)
        self.done = done

    def close(self) -> None:
        """End the current bar's line."""
        if self.bar is not None:
            self.bar.render_finish()
            self.bar = None


@click.command("export")
@click.argument("target")
@click.option("--drafter", help="A small checkpoint with the same tokenizer.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The bundle folder to write.",
)
@click.option(
    "--quantize",
    help=f"A recipe: {', '.join(SCHEMES)}, with what differs, as int4-gptq-b64-head8. "
    f"Algorithms: {', '.join(ALGORITHMS)}. Default: int4, or with --calibration the "
    f"--device's, or {CALIBRATED_DEFAULT}.",
)
@click.option(
    "--block-size",
    type=click.Choice([str(size) for size in BLOCK_SIZES]),
    help=f"Weights that share a scale, where the recipe does not say; default: "
    f"{DEFAULT_BLOCK_SIZE}.",
)
@click.option(
    "--quantize-drafter",
    help="A recipe; default: int8-rtn-b32, or none with --quantize none.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="A text like those to be written, for recipes with gptq or kv8 and for "
    "limits.",
)
@click.option(
    "--max-bytes",
    type=int,
    help="Give layers of the target more bits, those first that need them most, while "
    "its matrices take no more than this.",
)
@click.option(
    "--max-kl",
    type=float,
    help="Give as few layers more bits as keep the mean KL to the full target below "
    "this, in nats per token.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp16"]),
    help="Default: fp32 on the CPU, fp16 on other providers.",
)
@click.option(
    "--capacity",
    type=int,
    default=2048,
    show_default=True,
    help="Tokens of prompt and output together.",
)
@click.option(
    "--max-width",
    type=int,
    default=128,
    show_default=True,
    help="The most rows of one pass.",
)
@click.option(
    "--provider",
    type=click.Choice([*PROVIDERS, AUTO]),
    default="cpu",
    show_default=True,
    help="Who will run it; auto: the fastest that runs on this machine.",
)
@click.option(
    "--drafter-provider",
    type=click.Choice(list(PROVIDERS)),
    help="Who will run the drafter; default: the same.",
)
@click.option("--device", help="Refuse what would not fit there; see jetdraft devices.")
@click.option(
    "--flavour",
    type=click.Choice(FLAVOURS),
    help="contrib: onnxruntime's own operators; standard: ai.onnx only, the default "
    "for TensorRT.",
)
@click.option(
    "--adapter-scale",
    default=1.0,
    show_default=True,
    help="How far streams of the shared mode move the target from its base, 0 to 1.",
)
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
    recipe = Recipe.parse(quantize or "int4", int(block_size or DEFAULT_BLOCK_SIZE))
    if quantize is None and calibration is not None:
        found = Device.named(device).recipe if device else CALIBRATED_DEFAULT
        size = int(block_size) if block_size else Recipe.parse(found).block_size
        recipe = replace(Recipe.parse(found), block_size=size)
    if device is not None:
        _check_fits(device, target, drafter, recipe.scheme, capacity)
    exporter = optional("export.exporter", "exporting", "export")
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
    stages = Stages()
    try:
        bundle = exporter.export(target, output, drafter, options, stages)
    finally:
        stages.close()
    size = sum(file["bytes"] for file in bundle.files.values())
    methods = ", ".join(bundle.methods)
    click.echo(f"{output}: {size / 1e6:.1f} MB, methods {methods}", err=True)
    stored = bundle.target.quantization
    kl = f", KL {stored['kl']:.2g}" if limited else ""
    if quantize is None or limited:
        click.echo(f"target: {Recipe.from_json(stored).name}{kl}", err=True)


def _check_fits(
    device: str, target: str, drafter: str | None, quantize: str, capacity: int
) -> None:
    """Raise `DeviceError` for what does not fit; hub ids have no config here yet."""
    folders = [Path(each) for each in (target, drafter) if each]
    if not all(folder.is_dir() for folder in folders):
        raise OptionError(
            f"--device looks at the config in a folder, and {target} is none; download "
            "it first"
        )
    question = Question(
        folders[0],
        Device.named(device),
        folders[1] if drafter else None,
        quantize,
        capacity,
    )
    found = plan(question)
    if not found.fits:
        raise refusal(question, found)
