"""Which drafter pays on a device: its size, and the tokens that it should see.

The law of over-training (2403.08540) for a model of N weights that saw D tokens:

    loss(N, D) = E + A N^-e + B D^-e

The paper writes it with the compute C = 6 N D, the ratio M = D / N and an exponent
e / 2. At the usual M = 20 more weights and more tokens gain alike, so B = 20^e A. A
draft's time depends on N alone, so a small N with a large M is right for a drafter. How
large depends on the device, whose curve of pass times weighs a draft step against a
pass.

Two things are assumed here, and not taken from the paper: the exponent, and that the
chance of a wrong draft is proportional to loss - E.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetdraft.contracts.constants import WIDEST
from jetdraft.devices.planning.cost_model import Dimensions, Load
from jetdraft.devices.planning.plan import DRAFTER, Board, Choice, MethodCost, Question
from jetdraft.recipe import Recipe

SHARE = 0.05
"""What a draft step should read at most, as a share of what a pass of the target
reads; reading bounds the time of both (docs/devices.md)."""

TOKENS_PER_WEIGHT = 200
"""Tokens to train on for each weight. They leave half of what the usual 20 leave above
the loss of endless training; training costs once, a weight costs time in every draft.
"""

EXPONENT = 0.3
USUAL = 20
"""Tokens per weight at which more weights and more tokens gain alike."""

LAYERS = (1, 2, 3, 4)
STEPS = 16
"""Widths that are compared: parts of the target's width, in heads of 64."""

HEAD_SIZE = 64
_CHAINS = (MethodCost("drafter", DRAFTER, trees=False),)


@dataclass(frozen=True)
class Drafter:
    """A drafter that was not trained yet, and what it is predicted to give.

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
        """A JSON object."""
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


def excess(weights: float, tokens: float) -> float:
    """The part of the loss above E that is left, up to a factor."""
    return float(weights**-EXPONENT + (tokens / USUAL) ** -EXPONENT)


@dataclass(frozen=True)
class Advisor:
    """Compares drafters for the target of a question, on its device.

    The question names the acceptance of one drafter: its own, or, if it has none, the
    largest drafter whose step reads `SHARE` of a pass. That drafter is taken to have
    seen `TOKENS_PER_WEIGHT` tokens for each weight. The number of tokens that a drafter
    can draft is `draft_vocab`, and these make up the share `coverage` of the text.
    """

    question: Question
    draft_vocab: int | None = None
    coverage: float = 1.0

    def best(self, tokens_per_weight: int = TOKENS_PER_WEIGHT) -> Drafter:
        """The fastest drafter, if each sees this many tokens for each weight."""
        drafters = (
            self._predicted(layers, width, sizes, tokens_per_weight)
            for layers, width, sizes in self._shapes()
        )
        return max(drafters, key=lambda one: one.choice.tokens_per_second)

    def with_tokens(self, drafter: Drafter, tokens_per_weight: int) -> Drafter:
        """The same drafter after another number of tokens."""
        sizes = self._sizes(drafter.layers, drafter.hidden_size)
        return self._predicted(
            drafter.layers, drafter.hidden_size, sizes, tokens_per_weight
        )

    @property
    def _target(self) -> Dimensions:
        return Dimensions.read(self.question.target)

    def _shapes(self) -> Iterator[tuple[int, int, Dimensions]]:
        heads = max(1, self._target.hidden_size // HEAD_SIZE)
        widths = {HEAD_SIZE * max(1, heads * n // STEPS) for n in range(1, STEPS + 1)}
        for layers in LAYERS:
            for width in sorted(widths):
                yield layers, width, self._sizes(layers, width)

    def _sizes(self, layers: int, width: int) -> Dimensions:
        """The sizes of a Llama, as `train draft` makes it."""
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

    def _reference(self) -> int:
        """The weights of the drafter that has the question's acceptance."""
        if self.question.drafter is not None:
            return Dimensions.read(Path(self.question.drafter)).weights
        context = self.question.context
        most = SHARE * Load(self._target, self.question.recipe).pass_bytes(context)
        shapes = [sizes for _, _, sizes in self._shapes()]
        recipe = Recipe.for_drafter(self.question.recipe)
        cheap = [s for s in shapes if Load(s, recipe).pass_bytes(context) <= most]
        return max((s.weights for s in cheap), default=min(s.weights for s in shapes))

    def _load(self, sizes: Dimensions) -> Load:
        """The drafter in memory, whose LM head may be cut."""
        if self.draft_vocab is not None:
            head = min(sizes.head, sizes.hidden_size * self.draft_vocab)
            sizes = replace(sizes, head=head)
        return Load(sizes, Recipe.for_drafter(self.question.recipe))

    def _predicted(
        self, layers: int, width: int, sizes: Dimensions, tokens_per_weight: int
    ) -> Drafter:
        question, load, weights = self.question, self._load(sizes), sizes.weights
        reference = self._reference()
        usual_excess = excess(reference, TOKENS_PER_WEIGHT * reference)
        own_excess = excess(weights, tokens_per_weight * weights)
        missed = (1.0 - question.acceptance) * own_excess / usual_excess
        acceptance = max(0.0, 1.0 - missed) * self.coverage
        target = Load(self._target, question.recipe)
        mode = question.profile.power_mode(question.power_mode)
        board = Board(question.profile, mode, question.context, target, load)
        choices = (
            choice
            for choice in board.choices(_CHAINS, acceptance)
            if choice.width <= WIDEST
        )
        return Drafter(
            layers=layers,
            hidden_size=width,
            weights=weights,
            tokens=tokens_per_weight * weights,
            draft_ms=board.draft_ms,
            acceptance=acceptance,
            choice=max(choices, key=lambda choice: choice.tokens_per_second),
        )
