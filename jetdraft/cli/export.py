"""jetdraft export: checkpoints to a bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from jetdraft.bundle import FLAVOURS
from jetdraft.contract import CAPACITY, MAX_WIDTH
from jetdraft.devices.providers import AUTO, PROVIDERS
from jetdraft.export import request
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
    help=f"A recipe: {', '.join(SCHEMES)}, followed by overrides, for example "
    f"int4-gptq-b64-head8. Algorithms: {', '.join(ALGORITHMS)}. Default: int4; with "
    f"--calibration the recipe of the --device, or {CALIBRATED_DEFAULT}.",
)
@click.option(
    "--block-size",
    type=click.Choice([str(size) for size in BLOCK_SIZES]),
    help=f"Weights that share a scale, unless the recipe gives a size; default: "
    f"{DEFAULT_BLOCK_SIZE}.",
)
@click.option(
    "--quantize-drafter",
    help="A recipe; default: int8-rtn-b32, or none with --quantize none.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="A text like the ones to be generated, for recipes with gptq, awq or kv8 and "
    "for limits.",
)
@click.option(
    "--max-bytes",
    type=int,
    help="Give layers of the target more bits, the most sensitive first, while its "
    "matrices take at most this many bytes.",
)
@click.option(
    "--max-kl",
    type=float,
    help="Give more bits to as few layers as keep the mean KL to the float target "
    "below this, in nats per token.",
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp16"]),
    help="Default: fp32 on the CPU, fp16 on other providers.",
)
@click.option(
    "--capacity",
    type=int,
    default=CAPACITY,
    show_default=True,
    help="Tokens of prompt and output together.",
)
@click.option(
    "--max-width",
    type=int,
    default=MAX_WIDTH,
    show_default=True,
    help="The most rows of one pass.",
)
@click.option(
    "--provider",
    type=click.Choice([*PROVIDERS, AUTO]),
    default="cpu",
    show_default=True,
    help="The provider that will run it; auto: the fastest on this machine.",
)
@click.option(
    "--drafter-provider",
    type=click.Choice(list(PROVIDERS)),
    help="The provider that will run the drafter; default: the same.",
)
@click.option("--device", help="Refuse a pair that does not fit this device.")
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
    stages = Stages()
    try:
        bundle = request.export(
            target,
            output,
            drafter,
            quantize=quantize,
            quantize_drafter=quantize_drafter,
            block_size=int(block_size) if block_size else None,
            calibration=calibration,
            max_bytes=max_bytes,
            max_kl=max_kl,
            dtype=dtype,
            capacity=capacity,
            max_width=max_width,
            provider=provider,
            drafter_provider=drafter_provider,
            flavour=flavour,
            device=device,
            adapter_scale=adapter_scale,
            progress=stages,
        )
    finally:
        stages.close()
    size = sum(file["bytes"] for file in bundle.files.values())
    click.echo(f"{output}: {size / 1e6:.1f} MB", err=True)
    for name, entry in bundle.graphs.items():
        kl = entry.quantization.get("kl")
        shown = f", KL {kl:.2g}" if kl is not None else ""
        recipe = Recipe.from_json(entry.quantization).name
        click.echo(f"{name}: {recipe}{shown}", err=True)
