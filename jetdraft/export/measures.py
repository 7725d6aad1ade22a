"""What an export measures before it writes: texts, moments, and recipes left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from jetdraft.bundle import DRAFTER, TARGET
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head import Head
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import OptionError
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.job import Progress
from jetdraft.export.own_text import own_prompts, own_text
from jetdraft.export.pair.frequent_tokens import frequent_tokens
from jetdraft.export.pair.reading_head import ReadingHead
from jetdraft.quant.blocks import Floats
from jetdraft.quant.calibration import Windows, own_attention, second_moments
from jetdraft.quant.choice import (
    TOP,
    DrafterChoice,
    Sensitivity,
    choose,
    choose_drafter,
)
from jetdraft.quant.divergence import Divergence
from jetdraft.recipe import Recipe


@dataclass
class Measures:
    """Measures on the calibration text, or on what the target itself writes.

    `kl` maps the names of models to the KL divergence of their recipes, where it was
    measured, and `overlaps` are what was measured of the drafter's. The drafter is a
    `head`, or a checkpoint; `ids` int64 [n] are the tokens that it may draft, None for
    all.

        measures = Measures(checkpoints, contracts, options, report)
        options = measures.settled()
        measures.moments("target")
    """

    checkpoints: Mapping[str, Checkpoint]
    contracts: Mapping[str, StepContract]
    options: ExportOptions
    report: Progress
    head: Head | None = None
    ids: Tensor | None = None
    kl: dict[str, float] = field(default_factory=dict)
    overlaps: dict[str, float] = field(default_factory=dict)

    @cached_property
    def windows(self) -> Windows:
        """The text; raises `DataError` if the file cannot be read."""
        target, file = self.checkpoints[TARGET], self.options.calibration
        if file is not None:
            capacity = self.contracts[TARGET].capacity
            return Windows.of(file, target.tokenizer, capacity)
        return own_text(target, lambda done, of: self.report("write text", done, of))

    def moments(self, name: str) -> dict[str, Floats]:
        """The second moments of a model's inputs, if its recipe needs them."""
        recipe = self.options.recipe_of(name)
        if not recipe.needs_moments:
            return {}
        return second_moments(self.checkpoints[name].model, self.windows)

    def settled(self) -> ExportOptions:
        """The options with all recipes chosen."""
        target = self.checkpoints[TARGET]
        if self.options.limit is not None:
            self._settle(self._mixed(target))
        elif self.options.recipe is None:
            self._settle(self._chosen(target))
        if self._drafter_is_open:
            self._settle_drafter(target)
        return self.options

    def draft_vocabulary(self, count: int) -> Tensor:
        """The `count` tokens that the target writes most often, int64, ascending.

        A drafter has all of them.
        """
        known = min(checkpoint.vocab_size for checkpoint in self.checkpoints.values())
        target = self.checkpoints[TARGET].model
        return frequent_tokens(target, self.windows, count, known)

    @property
    def prompts(self) -> list[list[int]]:
        """Beginnings of texts after which a bundle's acceptance is measured."""
        if self.options.calibration is None:
            return own_prompts(self.checkpoints[TARGET])
        ids = self.windows.ids
        return ids[:, : max(1, ids.shape[1] // 2)].tolist()

    def _settle(self, recipe: Recipe) -> None:
        self.options = replace(self.options, recipe=recipe, limit=None)

    def _mixed(self, target: Checkpoint) -> Recipe:
        """The mix that meets the limit."""
        assert self.options.limit is not None
        if target.packed is not None:
            raise OptionError(
                f"{target.source} is quantized already, so its layers cannot get more "
                "bits; leave the limit out"
            )
        divergence, recipe = self._divergence(TARGET), self.options.recipe_of(TARGET)
        with own_attention(target.model):
            mix, self.kl[TARGET] = Sensitivity(divergence, recipe).mixed(
                self.options.limit,
                lambda done, of: self.report("measure layers", done, of),
            )
        return mix

    def _chosen(self, target: Checkpoint) -> Recipe:
        """The cheapest recipe that keeps the target's text."""
        if target.packed is not None:
            return Recipe.parse(TOP)  # for the matrices that are floats still
        try:
            divergence = self._divergence(TARGET)
        except OptionError:  # matrices that no unit contains
            return Recipe.parse(TOP)
        with own_attention(target.model):
            recipe, self.kl[TARGET] = choose(divergence, self.report)
        return recipe

    @property
    def _drafter_is_open(self) -> bool:
        return (
            (DRAFTER in self.checkpoints or self.head is not None)
            and self.options.drafter_recipe is None
            and not self.options.fast
            and self.options.recipe_of(TARGET).bits is not None
            and all(c.packed is None for c in self.checkpoints.values())
        )

    def _settle_drafter(self, target: Checkpoint) -> None:
        """Choose the drafter's recipe by what the pair gains."""
        try:
            choice = self._choice(target)
        except OptionError:
            return
        self.report("measure drafter", 1, 1)
        self.options = replace(self.options, drafter_recipe=choice.recipe)
        self.overlaps |= choice.overlaps

    def _choice(self, target: Checkpoint) -> DrafterChoice:
        recipe, windows = self.options.recipe_of(TARGET), self.windows
        if self.head is None:
            models = self._divergence(TARGET), self._divergence(DRAFTER)
            with (
                own_attention(target.model),
                own_attention(self.checkpoints[DRAFTER].model),
            ):
                return choose_drafter(*models, recipe, self.ids)
        # A head says nothing of the token after the first.
        windows = Windows(windows.ids, min(windows.scored, windows.ids.shape[1] - 1))
        assert target.taps is not None
        reading = ReadingHead(target.model, self.head, target.taps)
        on_cpu = self.options.provider_of(DRAFTER).name == "cpu"
        with own_attention(target.model):
            full = Divergence(target.model, windows, {})
            head = Divergence(reading, windows, {}, rounds_inputs=on_cpu)
            return choose_drafter(full, head, recipe, self.head.ids)

    def _divergence(self, name: str) -> Divergence:
        model = self.checkpoints[name].model
        moments = {} if self.options.recipe is None else self.moments(name)
        on_cpu = self.options.provider_of(name).name == "cpu"
        windows = self.windows  # they have a stage of their own
        self.report(f"measure {name} in floats", 0, 1)
        with own_attention(model):
            divergence = Divergence(model, windows, moments, rounds_inputs=on_cpu)
        self.report(f"measure {name} in floats", 1, 1)
        return divergence
