"""Enlarge a head with its target, without changing what it computes.

    python benchmarks/inflate.py examples/pycode/target -o /tmp/target-400m
    python benchmarks/inflate_head.py examples/pycode/head examples/pycode/target \
        /tmp/target-400m -o /tmp/head-400m

A head as wide as the small target becomes one as wide as the large target, so a draft
step has the compute of a head of that size and is right as often as the small one.
Every width of the small model is replaced by the large model's; trained numbers keep
their place at the start of each part (a matrix that reads an embedding beside a state
has two parts), and the rest is noise too small to matter. Norms are scaled as in
inflate.py. Heads of EAGLE-1, EAGLE-3 and Medusa can be enlarged, and the drafters of
Kangaroo, GliDe, Chimera and Falcon.

A Kangaroo adapter reads the state below some layer of the target. In a target of 16
layers `train kangaroo` takes layer 2, so enlarge its target with `--lowest 2`; else
the exit lies above the extra layers, and a draft runs them too.
"""

import json
from pathlib import Path

import click
import torch
from inflate import Depth
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

NOISE = 1e-6
MAX_PARTS = 4
"""EAGLE-3 joins three taps, Chimera three tokens; Falcon's LSTM has four gates."""

LAYERS = "eagle_aux_hidden_state_layer_ids"
EXIT = "exit_layer"


def widths(small: LlamaConfig, large: LlamaConfig, inner: int) -> dict[int, int]:
    """From each width of the small head to the large head's; `inner` is its MLP's."""
    wide = {
        parts * small.hidden_size: parts * large.hidden_size
        for parts in range(1, MAX_PARTS + 1)
    }
    others = [(inner, large.intermediate_size)] + [
        (getattr(small, name) * small.head_dim, getattr(large, name) * large.head_dim)
        for name in ("num_attention_heads", "num_key_value_heads")
    ]
    for width, larger in others:
        if wide.setdefault(width, larger) != larger:
            raise click.UsageError(f"Two widths of {width} become unlike ones.")
    return wide


def places(size: int, larger: int, small: LlamaConfig, large: LlamaConfig) -> Tensor:
    """Where `size` trained numbers lie among `larger`: each part at its start."""
    parts, rest = divmod(size, small.hidden_size)
    if rest or larger != parts * large.hidden_size:
        return torch.arange(size)
    starts = torch.arange(parts) * large.hidden_size
    return (starts[:, None] + torch.arange(small.hidden_size)).flatten()


def enlarge(
    name: str, weight: Tensor, small: LlamaConfig, large: LlamaConfig, inner: int
) -> Tensor:
    """The large head's tensor."""
    sizes = widths(small, large, inner)
    shape = [sizes.get(size, size) for size in weight.shape]
    if not weight.is_floating_point() or shape == list(weight.shape):
        return weight
    at = [places(*pair, small, large) for pair in zip(weight.shape, shape, strict=True)]
    is_norm = weight.ndim == 1 and "norm" in name
    level = float(weight.float().mean()) if is_norm else 0.0
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    wider = level + NOISE * noise
    wider[torch.meshgrid(*at, indexing="ij")] = weight.float()
    scale = (small.hidden_size / large.hidden_size) ** 0.5 if is_norm else 1.0
    return (wider * scale).to(weight.dtype)


def enlarged_config(
    config: dict[str, object], small: LlamaConfig, large: LlamaConfig
) -> dict[str, object]:
    """The large head's config.json; Medusa's has no sizes."""
    if "hidden_size" not in config:
        return config
    sizes = {
        name: getattr(large, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "rms_norm_eps",
        )
    }
    depth = Depth.between(small, large)
    eagle = config.get("eagle_config")
    if isinstance(eagle, dict):
        moved = [depth.place(layer) for layer in eagle[LAYERS]]
        sizes["eagle_config"] = {**eagle, LAYERS: moved}
    if EXIT in config:
        sizes[EXIT] = depth.place(config[EXIT] - 1) + 1
    return {**config, **sizes}


@click.command()
@click.argument("head", type=click.Path(exists=True, path_type=Path))
@click.argument("target", type=click.Path(exists=True, path_type=Path))
@click.argument("large_target", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
def main(head: Path, target: Path, large_target: Path, output: Path) -> None:
    """Enlarge HEAD of TARGET for LARGE_TARGET."""
    small = AutoConfig.from_pretrained(target)
    large = AutoConfig.from_pretrained(large_target)
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    inner = config.get("intermediate_size", small.intermediate_size)
    tensors = {
        name: enlarge(name, weight, small, large, inner).contiguous()
        for name, weight in load_file(head / "model.safetensors").items()
    }
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors")
    new = enlarged_config(config, small, large)
    (output / "config.json").write_text(json.dumps(new, indent=2) + "\n")
    count = sum(weight.numel() for weight in tensors.values())
    click.echo(f"{count / 1e6:.1f} M numbers in {output}")


if __name__ == "__main__":
    main()
