"""Measure the trained pair: losses, agreement and repetition."""

import json
from pathlib import Path

import click
import corpus
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

NEW = 96
TEMPERATURE = 0.8
TOP = (1, 2, 4)
CONTEXT = 256


def choose(logits: Tensor, temperature: float) -> Tensor:
    """Return one next token a row, the likeliest where temperature is zero."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1)


@torch.no_grad()
def extend(
    model: LlamaForCausalLM, tokens: Tensor, count: int, temperature: float
) -> Tensor:
    """Return the rows with some tokens more, past an end of text too."""
    latest, cache = tokens, None
    for _ in range(count):
        output = model(
            input_ids=latest, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = output.past_key_values
        latest = choose(output.logits[:, -1].float(), temperature)
        tokens = torch.cat([tokens, latest], dim=1)
    return tokens


@torch.no_grad()
def logits_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the logits behind each of the new tokens."""
    logits: Tensor = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return logits[:, -NEW:]


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, stream: Tensor) -> float:
    """Return nats per token over rows of 256 held-out tokens."""
    rows = stream.unfold(0, CONTEXT + 1, CONTEXT)
    total = 0.0
    for row in torch.split(rows, 16):
        logits = model(input_ids=row[:, :-1], use_cache=False).logits
        labels = row[:, 1:].flatten()
        total += F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum").item()
    return total / (len(rows) * CONTEXT)


def coverage(target: Tensor, drafter: Tensor) -> dict[str, float]:
    """Return how often the target's likeliest token is in the drafter's top k."""
    best = target.argmax(-1, keepdim=True)
    ranked = drafter.topk(max(TOP), dim=-1).indices
    return {
        f"top_{k}": (ranked[..., :k] == best).any(-1).float().mean().item() for k in TOP
    }


def acceptance(target: Tensor, drafter: Tensor) -> float:
    """Return the expected share of sampled drafts that the target accepts."""
    wanted = (target / TEMPERATURE).softmax(-1)
    drafted = (drafter / TEMPERATURE).softmax(-1)
    return torch.minimum(wanted, drafted).sum(-1).mean().item()


def repetition(tokens: Tensor) -> float:
    """Return the share of new 4-grams that their row's new text already held."""
    grams = [
        [tuple(gram) for gram in row.unfold(0, 4, 1).tolist()]
        for row in tokens[:, -NEW:]
    ]
    distinct = sum(len(set(row)) for row in grams)
    return 1 - distinct / sum(len(row) for row in grams)


def along(
    target: LlamaForCausalLM,
    drafter: LlamaForCausalLM,
    prompts: Tensor,
    temperature: float,
) -> dict[str, float]:
    """Return the pair's figures along text that the target writes."""
    tokens = extend(target, prompts, NEW, temperature)
    wanted, drafted = logits_of(target, tokens), logits_of(drafter, tokens)
    return {
        **coverage(wanted, drafted),
        "sampled_acceptance": acceptance(wanted, drafted),
        "repetition": repetition(tokens),
    }


def read_prompts(path: Path, tokenizer: Tokenizer) -> Tensor:
    """Return the prompts' tokens, cut to the shortest of them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    length = min(map(len, rows))
    return torch.tensor([row[:length] for row in rows])


def load(folder: Path) -> LlamaForCausalLM:
    """Return a saved model, computing in float32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def figures(folder: Path, held_out: list[str]) -> dict[str, object]:
    """Return every figure of the checkpoints as they were saved."""
    torch.manual_seed(0)
    target, drafter = load(folder / "target"), load(folder / "drafter")
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    stream = corpus.encode(tokenizer, held_out)
    prompts = read_prompts(folder / "prompts.jsonl", tokenizer)
    return {
        "parameters": [model.num_parameters() for model in (target, drafter)],
        "validation_loss": [
            validation_loss(model, stream) for model in (target, drafter)
        ],
        "greedy": along(target, drafter, prompts, 0.0),
        "sampled": along(target, drafter, prompts, TEMPERATURE),
    }


@click.command()
@click.argument(
    "folder", type=click.Path(path_type=Path), default=Path(__file__).parent
)
def main(folder: Path) -> None:
    """Print the figures of the checkpoints in a folder."""
    held_out = list(corpus.read()[1].values())
    click.echo(json.dumps(figures(folder, held_out), indent=2))


if __name__ == "__main__":
    main()
