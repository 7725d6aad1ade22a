"""What an export measures before it writes: texts, moments, and recipes left open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from jetdraft.bundle import DRAFTER, TARGET
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contract import StepContract
from jetdraft.errors import OptionError
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.job import Progress
from jetdraft.export.own_text import own_text
from jetdraft.quant.blocks import Floats
from jetdraft.quant.calibration import Windows, own_attention, second_moments
from jetdraft.quant.divergence import Divergence
from jetdraft.quant.ladder import TOP, choose
from jetdraft.quant.pair_speed import choose_drafter
from jetdraft.quant.sensitivity import Sensitivity
from jetdraft.recipe import Recipe


@dataclass
class Measures:
    """Measures on the calibration text, or on what the target itself writes.

    `kl` maps the names of models to the KL divergence of their recipes, where it was
    measured.

        measures = Measures(checkpoints, contracts, options, report)
        options = measures.settled()
        measures.moments("target")
    """

    checkpoints: Mapping[str, Checkpoint]
    contracts: Mapping[str, StepContract]
    options: ExportOptions
    report: Progress
    kl: dict[str, float] = field(default_factory=dict)

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
            self._settle_drafter(target, self.checkpoints[DRAFTER])
        return self.options

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
            DRAFTER in self.checkpoints
            and self.options.drafter_recipe is None
            and not self.options.fast
            and self.options.recipe_of(TARGET).bits is not None
            and all(c.packed is None for c in self.checkpoints.values())
        )

    def _settle_drafter(self, target: Checkpoint, drafter: Checkpoint) -> None:
        """Choose the drafter's recipe by what the pair gains."""
        try:
            models = self._divergence(TARGET), self._divergence(DRAFTER)
        except OptionError:
            return
        with own_attention(target.model), own_attention(drafter.model):
            recipe = choose_drafter(*models, self.options.recipe_of(TARGET))
        self.report("measure drafter", 1, 1)
        self.options = replace(self.options, drafter_recipe=recipe)

    def _divergence(self, name: str) -> Divergence:
        model = self.checkpoints[name].model
        moments = {} if self.options.recipe is None else self.moments(name)
        on_cpu = self.options.provider_of(name).name == "cpu"
        windows = self.windows  # they have a stage of their own
        self.report(f"measure {name} in floats", 0, 1)
        with own_attention(model):
            return Divergence(model, windows, moments, rounds_inputs=on_cpu)
