"""Enlarge a trained Llama checkpoint without changing what it computes.

A small trained pair has honest acceptance but a pass too short to time. The
enlarged target runs the compute of a real model of its size and still writes the
small model's text, so the acceptance measured with its drafter is the trained one.

    python benchmarks/inflate.py examples/pycode/target -o /tmp/target-400m

The default shape has 400 M parameters. How it stays the same function:

- the hidden state is padded with zeros; RMSNorm weights are scaled by
  sqrt(old / new) and eps by old / new, which undoes the longer mean;
- extra heads, neurons and layers have realistic random weights but write through
  output projections of 1e-6 noise; grouping of query heads is kept;
- extra layers lie below the trained ones, so that streams stay in the top layers; with
  `--lowest 2` they lie above the lowest two, where an early exit behind layer 2 stays
  as early as it would be in a trained model of that depth;
- streams, prompt tokens and forecasts of a checkpoint are padded with zeros;
- the checkpoint keeps its dtype, so trained weights are copied bit for bit. In
  float16 the noise is subnormal (steps of 6e-8) but not zero. The norm scale is
  exact when new / old is a power of four; if not, `--dtype float32` avoids rounding.

Keep the old sizes multiples of the quantization block, then no block mixes trained
and random weights. Keep the intermediate size different from the vocabulary size:
the onnxruntime-genai builder confuses the two.
"""

import json
import re
import shutil
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from jetdraft.checkpoints.checkpoint import read_settings
from jetdraft.checkpoints.folder import weights_sha256
from jetdraft.checkpoints.streams import SETTINGS, WEIGHTS

NOISE = 1e-6
SPREAD = 0.02  # as Llama is initialised
TOLERANCE = 2e-2  # the extra layers' noise passes through the trained ones
QUIET = ("o_proj", "down_proj", "embed_tokens", "lm_head")
LOWEST = "lowest_trained_layers"  # in the large config.json; 0 where it is missing
PREFIX = ("prompts.keys", "prompts.values")
COMPANIONS = ["*token*.json", "*.jinja", "vocab*", "merges.txt", "generation*.json"]


@dataclass(frozen=True)
class Depth:
    """Where trained layers lie among `extra` others: `lowest` below, the rest above."""

    layers: int
    extra: int
    lowest: int

    @classmethod
    def between(cls, small: LlamaConfig, large: LlamaConfig) -> "Depth":
        """The depth of an enlarged checkpoint."""
        layers = small.num_hidden_layers
        extra = large.num_hidden_layers - layers
        return cls(layers, extra, getattr(large, LOWEST, 0))

    def place(self, layer: int) -> int:
        """Where a trained layer lies."""
        return layer if layer < self.lowest else layer + self.extra

    def origin(self, place: int) -> tuple[int, bool]:
        """The trained layer like the layer in a place, and whether it lies there."""
        if place < self.lowest:
            return place, True
        return (place - self.extra) % self.layers, place >= self.lowest + self.extra


@dataclass(frozen=True)
class Inflation:
    """Maps the tensors of a small checkpoint to a larger checkpoint's."""

    source: dict[str, Tensor]
    depth: Depth
    norm_scale: float
    generator: torch.Generator

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """The large model's tensor: the trained corner, then noise or random."""
        origin, trained = self._origin(name)
        weight = self.source[origin]
        is_norm = len(shape) == 1
        large = self._level(weight, shape) if is_norm else self._noise(name, shape)
        if trained:
            paste(weight, large)
        return (large * self.norm_scale if is_norm else large).to(weight.dtype)

    def _origin(self, name: str) -> tuple[str, bool]:
        """The source tensor like this one, and whether this layer is a trained one."""
        if not name.startswith("model.layers."):
            return name, True
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        origin, trained = self.depth.origin(int(layer))
        return f"model.layers.{origin}.{rest}", trained

    def _level(self, weight: Tensor, shape: torch.Size) -> Tensor:
        return torch.full(shape, float(weight.float().mean()))

    def _noise(self, name: str, shape: torch.Size) -> Tensor:
        """Noise where zeros belong (zeros upset quantizers), else random weights."""
        quiet = any(part in QUIET for part in name.split("."))
        std = NOISE if quiet else SPREAD
        return torch.randn(shape, generator=self.generator) * std


def paste(small: Tensor, large: Tensor) -> Tensor:
    """Copy `small` into the first corner of `large`, in place."""
    large[tuple(slice(size) for size in small.shape)] = small
    return large


def enlarged_config(old: LlamaConfig, sizes: dict[str, int]) -> LlamaConfig:
    """The large model's config, or a UsageError where the function would change."""
    new = deepcopy(old)
    new.update(sizes)
    new.head_dim = old.head_dim
    new.rms_norm_eps = old.rms_norm_eps * old.hidden_size / new.hidden_size
    if old.model_type != "llama" or old.attention_bias or old.mlp_bias:
        raise click.UsageError("Only Llama checkpoints without biases can be enlarged.")
    for name in sizes:
        if getattr(new, name) < getattr(old, name):
            raise click.UsageError(f"{name} must be at least {getattr(old, name)}.")
    group = old.num_attention_heads // old.num_key_value_heads
    if new.num_attention_heads != group * new.num_key_value_heads:
        raise click.UsageError(f"Keep {group} query heads per KV head.")
    if new.intermediate_size == new.vocab_size:
        raise click.UsageError("Keep the intermediate size unlike the vocabulary size.")
    return new


def enlarge(checkpoint: Path, output: Path, new: LlamaConfig, seed: int) -> int:
    """Write the large checkpoint with its tokenizer; return its parameter count."""
    small = LlamaForCausalLM.from_pretrained(checkpoint, dtype=new.dtype)
    with torch.device("meta"):
        large = LlamaForCausalLM(new)
    inflation = Inflation(
        small.state_dict(),
        Depth.between(small.config, new),
        norm_scale=(small.config.hidden_size / new.hidden_size) ** 0.5,
        generator=torch.Generator().manual_seed(seed),
    )
    shapes = {name: empty.shape for name, empty in large.state_dict().items()}
    tensors = {name: inflation.tensor(name, shape) for name, shape in shapes.items()}
    large.load_state_dict(tensors, assign=True)
    large.tie_weights()
    large.save_pretrained(output)
    for pattern in COMPANIONS:
        for file in checkpoint.glob(pattern):
            shutil.copy(file, output / file.name)
    return sum(parameter.numel() for parameter in large.parameters())


def enlarge_probes(checkpoint: Path, output: Path, depth: Depth) -> None:
    """Pad the streams or prompt tokens of a checkpoint for its enlarged model."""
    settings = read_settings(checkpoint)
    if settings is None:
        return
    config = AutoConfig.from_pretrained(output)
    with torch.device("meta"):
        large = LlamaForCausalLM(config)
    tensors = {}
    for name, weight in load_file(checkpoint / WEIGHTS).items():
        if ".lora_" in name:
            tensors |= enlarged_lora(name, weight, large, depth)
        elif name in PREFIX:
            tensors[name] = enlarged_prefix(weight, config, depth)
        else:
            shape = list(weight.shape)
            shape[0 if name == "streams.widen.weight" else 1] = config.hidden_size
            tensors[name] = paste(weight, torch.zeros(shape))
    save_file(tensors, output / WEIGHTS)
    described = asdict(replace(settings, base=weights_sha256(output)))
    (output / SETTINGS).write_text(json.dumps(described, indent=2) + "\n")


def enlarged_lora(
    name: str, weight: Tensor, large: LlamaForCausalLM, depth: Depth
) -> dict[str, Tensor]:
    """A matrix of LoRA in its layer's new place."""
    before, layer, after = re.fullmatch(r"(.*layers\.)(\d+)(\..*)", name).groups()
    moved = f"{before}{depth.place(int(layer))}{after}"
    path = moved.removeprefix("model.").partition(".lora_")[0]
    rows, columns = large.get_submodule(path).weight.shape
    is_first = ".lora_A." in name
    shape = list(weight.shape)
    shape[1 if is_first else 0] = columns if is_first else rows
    tensors = {moved: paste(weight, torch.zeros(shape))}
    if layer == "0":
        # The shared mode has LoRA in every layer; in the extra ones it is idle.
        for extra in range(depth.lowest, depth.lowest + depth.extra):
            tensors[f"{before}{extra}{after}"] = torch.zeros(shape)
    return tensors


def enlarged_prefix(weight: Tensor, config: LlamaConfig, depth: Depth) -> Tensor:
    """Keys or values [layers, kv_heads, rows, head_dim] that forecasts see."""
    heads = config.num_key_value_heads
    large = torch.zeros(config.num_hidden_layers, heads, *weight.shape[2:])
    for layer, rows in enumerate(weight):
        paste(rows, large[depth.place(layer)])
    return large


@torch.inference_mode()
def answer(checkpoint: Path, prompt: Tensor) -> tuple[Tensor, list[int]]:
    """Logits over `prompt` and the 64 greedy tokens that follow it, in float32."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    logits = model(prompt).logits
    ids = model.generate(
        prompt, do_sample=False, min_new_tokens=64, max_new_tokens=64, pad_token_id=0
    )
    return logits, ids[0, prompt.shape[1] :].tolist()


def check(checkpoint: Path, output: Path) -> float:
    """Compare the two models on this file's own text; return the logit gap."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = Path(__file__).read_text()
    prompt = torch.tensor([tokenizer.encode(text).ids[:128]])
    expected, expected_ids = answer(checkpoint, prompt)
    actual, actual_ids = answer(output, prompt)
    gap = float((expected - actual).abs().max())
    if gap > TOLERANCE:
        raise click.ClickException(f"Logits differ by {gap:.1e}: try --dtype float32.")
    if expected_ids != actual_ids:
        raise click.ClickException("The greedy continuations differ: try another seed.")
    return gap


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.option("--hidden-size", default=1536, show_default=True)
@click.option("--layers", "num_hidden_layers", default=16, show_default=True)
@click.option("--heads", "num_attention_heads", default=24, show_default=True)
@click.option("--kv-heads", "num_key_value_heads", default=8, show_default=True)
@click.option("--intermediate-size", default=3968, show_default=True)
@click.option("--lowest", default=0, show_default=True, help="Layers below the extra.")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16", "float32"]))
@click.option("--seed", default=0, show_default=True)
def main(
    checkpoint: Path,
    output: Path,
    lowest: int,
    dtype: str | None,
    seed: int,
    **sizes: int,
) -> None:
    """Enlarge CHECKPOINT without changing what it computes, and check that."""
    logging.disable_progress_bar()
    old = AutoConfig.from_pretrained(checkpoint)
    new = enlarged_config(old, sizes)
    setattr(new, LOWEST, lowest)
    if dtype:
        new.dtype = getattr(torch, dtype)
    count = enlarge(checkpoint, output, new, seed)
    enlarge_probes(checkpoint, output, Depth.between(old, new))
    click.echo(f"{count / 1e6:.1f} M parameters in {output} ({new.dtype})")
    gap = check(checkpoint, output)
    click.echo(f"same greedy text over 64 tokens, logits within {gap:.1e}")


if __name__ == "__main__":
    main()
