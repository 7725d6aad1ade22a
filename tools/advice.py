"""Says which drafter pays on a device: its size, and the tokens that it should see.

    python tools/advice.py TARGET --device orin-nx-16gb --acceptance 0.7

The law of over-training (2403.08540) for a model of N weights that saw D tokens:

    loss(N, D) = E + A N^-e + B D^-e

The paper writes it with C = 6 N D, M = D / N and an exponent e / 2. At the usual M = 20
more weights and more tokens gain alike, so B = 20^e A. Two things are assumed and not
taken from the paper: the exponent, and that the chance of a wrong draft is proportional
to loss - E.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from jetdraft.cli import StandaloneCommand
from jetdraft.cli.command import keyword_flags, option
from jetdraft.cli.flags import PATH, json_option
from jetdraft.contracts.tensors import WIDEST
from jetdraft.devices.cost_model import (
    FITTED,
    MAX_READ_SHARE,
    TOKENS_PER_WEIGHT,
    Dimensions,
    LoadedDecoder,
)
from jetdraft.devices.plan import DRAFTER, Board, Choice, MethodCost, Question
from jetdraft.recipe import Recipe

EXPONENT = 0.3
"""The exponent e of the law; an assumption."""

USUAL_TOKENS_PER_WEIGHT = 20
"""Tokens per weight at which more weights and more tokens gain alike."""

OTHER_BUDGETS = (20, 2000)
"""Training tokens per weight that are shown beside `TOKENS_PER_WEIGHT`."""

LAYERS = (1, 2, 3, 4)
WIDTH_STEPS = 16
"""The layers and the number of widths that are compared; widths are sixteenths of the
target's, in heads of 64."""

HEAD_SIZE = 64
"""The head size of compared drafters; their widths are multiples of it."""

_CHAINS = (MethodCost("drafter", DRAFTER, trees=False),)


@dataclass(frozen=True)
class Drafter:
    """What a drafter that was not trained yet is predicted to give.

    `weights` counts all weights, `tokens` those to train on; `draft_ms` is the time of
    a draft step. `acceptance` is of the first drafted token.
    """

    layers: int
    hidden_size: int
    weights: int
    tokens: int
    draft_ms: float
    acceptance: float
    choice: Choice

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as a JSON object, rounded."""
        return {
            "layers": self.layers,
            "hidden_size": self.hidden_size,
            "weights": self.weights,
            "tokens": self.tokens,
            "draft_ms": round(self.draft_ms, 3),
            "acceptance": round(self.acceptance, 4),
            "width": self.choice.width,
            "tokens_per_second": round(self.choice.tokens_per_second, 3),
            "speedup": round(self.choice.speedup, 3),
        }


def excess_loss(weights: float, tokens: float) -> float:
    """Return (loss - E) / A of a model with `weights` after training on `tokens`."""
    return float(weights**-EXPONENT + (tokens / USUAL_TOKENS_PER_WEIGHT) ** -EXPONENT)


@dataclass(frozen=True)
class Advisor:
    """Compares drafters for the target of a question, on its device.

    The acceptance in the question is for the question's drafter or, without a drafter,
    for the largest drafter whose step reads `MAX_READ_SHARE` of a pass. This drafter is
    taken to have seen `TOKENS_PER_WEIGHT` tokens for each weight. All drafters can
    draft `draft_vocab` tokens, which are the share `coverage` of the text's tokens.
    """

    question: Question
    draft_vocab: int | None = None
    coverage: float = 1.0

    def best(self) -> Drafter:
        """Return the fastest drafter if all see `TOKENS_PER_WEIGHT` tokens a weight."""
        drafters = (self.predict(*shape) for shape in self.shapes())
        return max(drafters, key=lambda drafter: drafter.choice.tokens_per_second)

    @cached_property
    def _target(self) -> Dimensions:
        """The dimensions of the target."""
        return Dimensions.read(self.question.target)

    def shapes(self) -> list[tuple[int, int]]:
        """The number of layers and the hidden size of each drafter to compare."""
        heads = max(1, self._target.hidden_size // HEAD_SIZE)
        widths = {
            HEAD_SIZE * max(1, heads * n // WIDTH_STEPS)
            for n in range(1, WIDTH_STEPS + 1)
        }
        return list(itertools.product(LAYERS, sorted(widths)))

    def _dimensions(self, layers: int, width: int) -> Dimensions:
        """The dimensions of a drafter that `jetdraft train draft` makes, a Llama."""
        target = self._target
        return Dimensions.of(
            {
                "hidden_size": width,
                "intermediate_size": width * 8 // 3,
                "num_hidden_layers": layers,
                "num_attention_heads": width // HEAD_SIZE,
                "vocab_size": target.head // target.hidden_size,
                "tie_word_embeddings": True,
            }
        )

    @cached_property
    def _reference_weights(self) -> int:
        """The number of weights of the drafter with the question's acceptance."""
        if self.question.drafter is not None:
            return Dimensions.read(Path(self.question.drafter)).weights
        context = self.question.context
        most = MAX_READ_SHARE * LoadedDecoder(
            self._target, self.question.recipe
        ).pass_bytes(context)
        shapes = [self._dimensions(*shape) for shape in self.shapes()]
        recipe = Recipe.for_drafter(self.question.recipe)
        cheap = [
            s for s in shapes if LoadedDecoder(s, recipe).pass_bytes(context) <= most
        ]
        return max((s.weights for s in cheap), default=min(s.weights for s in shapes))

    def predict(
        self, layers: int, width: int, tokens_per_weight: int = TOKENS_PER_WEIGHT
    ) -> Drafter:
        """Predict a drafter after training on `tokens_per_weight` tokens a weight."""
        question, sizes = self.question, self._dimensions(layers, width)
        weights, cut = sizes.weights, sizes
        if self.draft_vocab is not None:  # its LM head is cut
            head = min(sizes.head, sizes.hidden_size * self.draft_vocab)
            cut = replace(sizes, head=head)
        drafter = LoadedDecoder(cut, Recipe.for_drafter(question.recipe))
        reference = self._reference_weights
        usual_excess = excess_loss(reference, TOKENS_PER_WEIGHT * reference)
        own_excess = excess_loss(weights, tokens_per_weight * weights)
        missed = (1.0 - question.acceptance) * own_excess / usual_excess
        acceptance = max(0.0, 1.0 - missed) * self.coverage
        target = LoadedDecoder(self._target, question.recipe)
        device, context = question.profile, question.context
        mode = device.power_mode(question.power_mode)
        fitted = FITTED[device.compute_capability]
        board = Board(mode, context, target, drafter, fitted)
        chains = board.choices(_CHAINS, acceptance)
        choices = (choice for choice in chains if choice.width <= WIDEST)
        return Drafter(
            layers=layers,
            hidden_size=width,
            weights=weights,
            tokens=tokens_per_weight * weights,
            draft_ms=drafter.pass_ms(1, context, mode, fitted),
            acceptance=acceptance,
            choice=max(choices, key=lambda choice: choice.tokens_per_second),
        )


def show(drafters: list[Drafter]) -> None:
    """Print which drafter to train, and what fewer or more tokens would change."""
    best = drafters[0]
    if best.choice.speedup <= 1.0:
        click.echo("no drafter: plain decoding is as fast")
        return
    click.echo(
        f"a drafter of width {best.hidden_size}, layers: {best.layers}: "
        f"{best.weights / 1e6:.1f} M weights, a draft step {best.draft_ms:.1f} ms"
    )
    for drafter in sorted(drafters, key=lambda drafter: drafter.tokens):
        click.echo(
            f"  {drafter.tokens / 1e9:7.2f} billion tokens "
            f"({drafter.tokens // best.weights} a weight) "
            f"acceptance {drafter.acceptance:.2f} "
            f"{drafter.choice.width:3} rows {drafter.choice.tokens_per_second:7.1f} "
            f"tokens/s {drafter.choice.speedup:5.2f}x"
        )


@click.command("advice", cls=StandaloneCommand)
@click.argument("target", type=PATH)
@keyword_flags(
    Question,
    only=("device", "drafter", "quantization", "context", "acceptance", "power_mode"),
)
@option(
    "drafting --draft-vocab",
    "Tokens that the drafter can draft; default: all.",
    type=click.IntRange(1),
)
@option(
    "drafting --coverage",
    "The share of a text's tokens among them, which tools/texts.py counts.",
    type=click.FloatRange(0.0, 1.0),
    default=1.0,
)
@json_option
def main(
    target: Path,
    draft_vocab: int | None,
    coverage: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Say which drafter pays for TARGET, a config.json or its folder, on a GPU."""
    question = Question(target, **options, provider="cuda")
    advisor = Advisor(question, draft_vocab, coverage)
    best = advisor.best()
    shape = best.layers, best.hidden_size
    drafters = [best, *(advisor.predict(*shape, budget) for budget in OTHER_BUDGETS)]
    if as_json:
        click.echo(json.dumps([drafter.to_json() for drafter in drafters]))
    else:
        show(drafters)


if __name__ == "__main__":
    main()
