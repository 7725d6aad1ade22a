"""jetdraft export: makes a bundle from checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from jetdraft.bundle import DRAFTER, FLAVOURS
from jetdraft.devices.kernels.forecast import Forecast, graph_forecasts
from jetdraft.devices.kernels.kernel_table import TABLES
from jetdraft.devices.providers import AUTO, PROVIDERS
from jetdraft.export import request
from jetdraft.recipe import (
    ALGORITHMS,
    BLOCK_SIZES,
    DEFAULT_BLOCK_SIZE,
    FAST_DEFAULT,
    SCHEMES,
)
from jetdraft.runtime.planning.registry import methods_of
from jetdraft.terminal.command import Command, option
from jetdraft.terminal.description import scheme
from jetdraft.terminal.flags import PATH, output_option
from jetdraft.terminal.progress import ProgressBars


@click.command("export", cls=Command)
@click.argument("target")
@option("checkpoint", "--drafter", help="A small checkpoint with the same tokenizer.")
@option(
    "checkpoint",
    "--head",
    help="A head that reads the target's states, or a drafter that fills blocks, in "
    "place of a drafter: the folder or hub id of EAGLE-1, 2 or 3 (speculators' too), "
    "Medusa, Hydra, DFlash, a diffusion or block drafter, Kangaroo, GliDe, Chimera or "
    "Falcon, or of the target itself for its MTP module.",
)
@option(
    "checkpoint",
    "--exit-after",
    "exit_layer",
    type=int,
    help="Let the text leave the target after this many layers: for generate "
    "--stop-and-exit, with a head that jetdraft train exit trained for them.",
)
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
    "the recipe of --device, or else the cheapest that keeps the target's text, which "
    "is measured.",
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
    help="A recipe for the drafter; default: the fastest for the pair, which is "
    "measured, or none with --quantize none.",
)
@option(
    "quantization",
    "--calibration",
    type=PATH,
    help="A text like the texts to come, for all that is measured; default: the target "
    "writes one.",
)
@option(
    "drafting",
    "--draft-vocab",
    type=int,
    help="Let the drafter or head choose among this many tokens only, the most "
    "frequent in --calibration or in what the target writes; its LM head gets as many "
    "rows, and the text stays the same.",
)
@option(
    "drafting",
    "--select-kv",
    type=int,
    help="Add a graph that can read this many of the KV rows only, which each layer "
    "selects anew: for long contexts, as a drafter of itself (--method select, "
    "lossless), or as the target (--drafting select-kv=true --no-exact, lossy).",
)
@option(
    "quantization",
    "--fast",
    is_flag=True,
    help=f"Measure nothing and take {FAST_DEFAULT}, which suits large models, and "
    "int8-rtn-b32 for the drafter, with --device too; options that need a measure are "
    "refused.",
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
    help="Refuse a bundle that does not fit this device, and take its recipe, which "
    "measures; jetdraft doctor --devices lists the names.",
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
@output_option("Write the bundle to this folder; a bundle there is replaced.")
def command(
    target: str,
    drafter: str | None,
    head: str | None,
    exit_layer: int | None,
    output: Path,
    quantize: str | None,
    block_size: str | None,
    quantize_drafter: str | None,
    calibration: Path | None,
    draft_vocab: int | None,
    select_kv: int | None,
    fast: bool,
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
    """Export TARGET, a checkpoint folder, GGUF file or hub id, to a bundle."""
    with ProgressBars() as bars:
        bundle = request.export(
            target,
            output,
            drafter,
            head=head,
            exit_layer=exit_layer,
            quantize=quantize,
            quantize_drafter=quantize_drafter,
            block_size=int(block_size) if block_size else None,
            calibration=calibration,
            draft_vocab=draft_vocab,
            select_kv=select_kv,
            fast=fast,
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
            progress=bars,
        )
    size = sum(file["bytes"] for file in bundle.files.values())
    names = ", ".join(methods_of(bundle))
    click.echo(f"{output}: {size / 1e6:.1f} MB, methods {names}", err=True)
    for name, entry in bundle.graphs.items():
        kl = entry.quantization.get("kl")
        kl_text = f", KL {kl:.2g}" if kl is not None else ""
        click.echo(f"{name}: {scheme(entry)}{kl_text}", err=True)
        provider = (name == DRAFTER and bundle.drafter_provider) or bundle.provider
        if provider in TABLES:
            _warn(graph_forecasts(bundle.path, entry, provider))


def _warn(graphs: Iterable[Forecast]) -> None:
    """Print a line for each kind of node that its provider cannot run."""
    for graph in graphs:
        for operator, reason in dict.fromkeys(
            (verdict.operator, verdict.reason) for verdict in graph.refused
        ):
            click.echo(
                f"warning: {operator} of {graph.file} cannot run on "
                f"{graph.provider}: {reason}",
                err=True,
            )
