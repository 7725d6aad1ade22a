"""jetdraft inspect: what is in a bundle."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from jetdraft.bundle import Bundle, GraphEntry
from jetdraft.cli.options import bundle_argument
from jetdraft.recipe import Recipe


@click.command("inspect")
@bundle_argument
@click.option("--json", "as_json", is_flag=True, help="The manifest as JSON.")
def command(bundle: Path, as_json: bool) -> None:
    """Show graphs, shapes, quantization and bytes of BUNDLE."""
    opened = Bundle.open(bundle)
    if as_json:
        click.echo(json.dumps(opened.to_json(), indent=2))
        return
    contract = opened.target.contract
    click.echo(f"bundle      {bundle} (sha256 {opened.sha256[:12]})")
    click.echo(f"methods     {', '.join(opened.methods)}")
    click.echo(f"provider    {opened.provider}")
    if opened.drafter_provider:
        click.echo(f"drafter on  {opened.drafter_provider}")
    click.echo(f"flavour     {opened.flavour}")
    click.echo(f"vocabulary  {contract.vocab_size}, end of text {_ids(opened)}")
    click.echo(f"capacity    {contract.capacity} tokens, {contract.max_width} rows")
    for name, entry in opened.graphs.items():
        _show_graph(name, entry)
    click.echo("\nfiles")
    for name, file in opened.files.items():
        click.echo(f"  {name:22} {file['bytes']:>13,}  {file['sha256'][:12]}")
    versions = ", ".join(f"{tool} {version}" for tool, version in opened.tools.items())
    click.echo(f"\nmade with {versions}")


def _ids(bundle: Bundle) -> str:
    return ", ".join(map(str, bundle.eos_token_ids)) or "none"


def _show_graph(name: str, entry: GraphEntry) -> None:
    contract, recipe = entry.contract, entry.quantization
    scheme = Recipe.from_json(recipe).name
    if "packed" in recipe:
        scheme = f"as {recipe['packed']} left it, the rest {scheme}"
    size = sum(
        int(np.prod(spec.sized())) * np.dtype(spec.dtype).itemsize
        for spec in contract.buffers("past")
    )
    shapes = sorted(set(contract.kv_shapes))
    heads = " or ".join(f"{heads} x {size}" for heads, size in shapes)
    click.echo(f"\n{name}  {entry.file} from {entry.source}")
    if entry.tree_file is not None:
        click.echo(
            f"  trees         {entry.tree_file}, over the same {entry.file}.data"
        )
    else:
        click.echo("  trees         none: it attends in sliding windows")
    if entry.streams is not None:
        made = entry.streams
        click.echo(
            f"  streams       {made['gamma']} in the top {made['layers']} layers, "
            f"{made['mode']}"
        )
    click.echo(f"  parameters    {entry.parameters:,}")
    click.echo(f"  quantization  {scheme}; activations {contract.dtype}")
    click.echo(f"  layers        {len(contract.kv_shapes)}, KV heads {heads}")
    click.echo(f"  KV buffers    {size / 1e6:.1f} MB")
    for side, specs in (("inputs", contract.inputs), ("outputs", contract.outputs)):
        click.echo(f"  {side}")
        for spec in specs:
            if spec.name.endswith(".0") or "." not in spec.name:
                axes = " x ".join(map(str, spec.shape))
                click.echo(f"    {spec.name:22} {spec.dtype:8} {axes}")
