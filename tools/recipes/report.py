"""Compares recipes: bytes, pass times, quality, and the acceptance of a pair."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from jetdraft.bench import benchmark
from jetdraft.bundle import DRAFTER, TARGET, Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.errors import DataError, OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.files import read_text
from jetdraft.recipe import Recipe
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.planning.registry import NONE, methods
from tools.recipes.picture import Panel
from tools.recipes.quality import compare
from tools.recipes.resident import resident_mb

FULL = Recipe("none")
"""The recipe of the unquantized model."""

WIDTHS = (1, 2, 4, 8)
"""The widths whose passes are timed."""

TURNS, PASSES = 3, 4
"""Turns of each graph at a width, and timed passes of a turn."""

DRAFT_TOKENS = 3
WINDOW, WINDOWS = 128, 16
"""The text is measured in windows: tokens of a window, and windows."""

CAPACITY = 512
"""Rows of the bundles' KV buffers."""


@dataclass(frozen=True)
class TargetFigures:
    """The figures of a target's recipe.

    `pass_ms` has milliseconds by width; `relative` divides the unquantized model's
    milliseconds by them. KL divergences are in nats per token. `bytes` is the size of
    the graph and its weights on disk.
    """

    recipe: str
    bytes: int
    resident_mb: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    perplexity: float
    pass_ms: dict[int, float]
    relative: dict[int, float]


@dataclass(frozen=True)
class PairFigures:
    """The figures of a target's and a drafter's recipe together.

    `speedup` compares with plain decoding by the same target.
    """

    target: str
    drafter: str
    acceptance_rate: float
    tokens_per_second: float
    speedup: float


@dataclass
class Report:
    """The figures of all recipes, and the text that they were measured on."""

    target: str
    drafter: str | None
    text: str
    rows: list[TargetFigures] = field(default_factory=list)
    pairs: list[PairFigures] = field(default_factory=list)


@dataclass(frozen=True)
class RecipeComparison:
    """Checkpoints, and the recipes to compare; `work` is a folder for their bundles.

    The recipes are measured on the file `text`, and recipes that need calibration read
    the file `calibration`. Where a file is None, the unquantized target writes the
    text.

        RecipeComparison("target", None, [Recipe()], [], work).run(print)
    """

    target: str
    drafter: str | None
    recipes: Sequence[Recipe]
    drafter_recipes: Sequence[Recipe]
    work: Path
    text: Path | None = None
    calibration: Path | None = None
    threads: int | None = None

    @property
    def steps(self) -> int:
        """How many names `run` announces."""
        targets, drafters = 1 + len(self.recipes), 1 + len(self.drafter_recipes)
        return 1 + targets * (1 + (drafters if self.drafter else 0))

    def run(self, announce: Callable[[str], None]) -> Report:
        """Measure all recipes, one after the other, beside the unquantized model.

        `announce` gets the name of what is measured next.
        """
        announce("the text")
        if Checkpoint.load(self.target, torch.float32).packed is not None:
            raise OptionError(
                f"{self.target} is quantized already and keeps its integers, so there "
                "are no recipes to compare; give the checkpoint before quantization"
            )
        full = self._load(self._bundle(FULL, None))
        windows = self._windows(full)
        calibration = self.calibration
        if calibration is None and self._needs_calibration:
            calibration = self._write_calibration(full)
        with full.parts.claim.held():
            pass  # the idle work of the texts' generations has ended
        source = "a text of the model" if self.text is None else str(self.text)
        report = Report(self.target, self.drafter, source)
        bundles = {}
        for recipe in [FULL, *self.recipes]:
            announce(recipe.name)
            bundle = self._bundle(recipe, calibration)
            bundles[recipe.name] = bundle
            report.rows.append(self._target_figures(recipe, bundle, full, windows))
        prompts = [window[: WINDOW // 2] for window in windows[:8]]
        for drafter, drafter_bundle in self._drafters(calibration).items():
            for name, bundle in bundles.items():
                announce(f"{name} with {drafter}")
                pair = compose(bundle, drafter_bundle, self.work / f"{name}+{drafter}")
                report.pairs.append(self._pair_figures(name, drafter, pair, prompts))
        return report

    @property
    def _needs_calibration(self) -> bool:
        drafter_recipes = self.drafter_recipes if self.drafter else []
        recipes = (*self.recipes, *drafter_recipes)
        return any(recipe.needs_calibration for recipe in recipes)

    def _drafters(self, calibration: Path | None) -> dict[str, Bundle]:
        """A bundle for each recipe of the drafter, by the recipe's name.

        A bundle must have a target, so the unquantized drafter is the target too.
        """
        if self.drafter is None:
            return {}
        bundles = {}
        for recipe in [FULL, *self.drafter_recipes]:
            options = replace(self._options(FULL, calibration), drafter_recipe=recipe)
            output = self.work / f"drafter-{recipe.name}"
            bundles[recipe.name] = export(self.drafter, output, self.drafter, options)
        return bundles

    def _options(self, recipe: Recipe, calibration: Path | None) -> ExportOptions:
        return ExportOptions(
            recipe, capacity=CAPACITY, max_width=128, calibration=calibration
        )

    def _bundle(self, recipe: Recipe, calibration: Path | None) -> Bundle:
        """The target's bundle of a recipe; it is exported unless it exists already."""
        output = self.work / recipe.name
        if output.exists():
            return Bundle.open(output)
        return export(self.target, output, None, self._options(recipe, calibration))

    def _load(self, bundle: Bundle) -> Model:
        return load(bundle.path, threads=self.threads)

    def _windows(self, full: Model) -> list[list[int]]:
        """The token ids to measure on, in windows of equal length."""
        if self.text is None:
            return [_write_window(full, seed) for seed in range(WINDOWS)]
        ids = full.parts.text.encode(read_text(self.text))
        if len(ids) < 2:
            raise DataError(f"{self.text} has {len(ids)} tokens; give a longer text")
        size = min(WINDOW, len(ids))
        starts = np.linspace(0, len(ids) - size, min(WINDOWS, len(ids) // size))
        return [list(ids[int(start) : int(start) + size]) for start in starts]

    def _write_calibration(self, full: Model) -> Path:
        """Let the model write a calibration text that is not the measured text."""
        file = self.work / "calibration.txt"
        seeds = range(1000, 1000 + 2 * WINDOWS)
        texts = (full.parts.text.decode(_write_window(full, seed)) for seed in seeds)
        file.write_text("\n".join(texts), encoding="utf-8")
        return file

    def _target_figures(
        self, recipe: Recipe, bundle: Bundle, full: Model, windows: list[list[int]]
    ) -> TargetFigures:
        model = self._load(bundle)
        quality = compare(full.parts.target, model.parts.target, windows)
        own_ms, full_ms = pass_ms(model.parts.target, full.parts.target)
        target_file = bundle.target.file
        return TargetFigures(
            recipe=recipe.name,
            bytes=sum(
                bundle.files[name]["bytes"]
                for name in (target_file, f"{target_file}.data")
                if name in bundle.files
            ),
            resident_mb=resident_mb(bundle.path),
            kl_mean=quality.kl_mean,
            kl_p99=quality.kl_p99,
            top1_agreement=quality.top1_agreement,
            perplexity=quality.perplexity,
            pass_ms=own_ms,
            relative={width: full_ms[width] / own_ms[width] for width in WIDTHS},
        )

    def _pair_figures(
        self, target: str, drafter: str, bundle: Bundle, prompts: list[list[int]]
    ) -> PairFigures:
        model = self._load(bundle)
        method = next(m.name for m in methods().values() if m.cost == "drafter")
        plain, draft = rows = [
            benchmark.Contender(NONE, None, exact=False),
            benchmark.Contender(method, DRAFT_TOKENS, exact=True),
        ]
        ids = [model.prompt(token_ids=prompt) for prompt in prompts]
        benchmark.run(model, rows, ids, 1, lambda: None, max_new_tokens=WINDOW // 2)
        plain_speed, speed = (
            statistics.median(stats.tokens_per_second or 0.0 for stats in row.runs[0])
            for row in (plain, draft)
        )
        rate = draft.total().acceptance_rate or 0.0
        return PairFigures(target, drafter, rate, speed, speed / plain_speed)


def _write_window(model: Model, seed: int) -> list[int]:
    """Let the model write a window of token ids after a random first token."""
    vocab = model.parts.target.contract.vocab_size
    first = int(np.random.default_rng(seed).integers(vocab))
    return model.generate(
        token_ids=[first],
        method=NONE,
        temperature=1.0,
        seed=seed,
        max_new_tokens=WINDOW - 1,
        ignore_eos=True,
    ).token_ids


def compose(target: Bundle, drafter: Bundle, folder: Path) -> Bundle:
    """A bundle with the target of one bundle and the drafter of another.

    Its files are hard links. To export each pair of recipes would quantize the target
    again for every drafter.
    """
    assert drafter.drafter is not None
    files = {name: target.path / name for name in target.files} | {
        name: drafter.path / name
        for name in drafter.files
        if name.startswith((f"{DRAFTER}.", f"{DRAFTER}-"))
    }
    folder.mkdir()
    for name, file in files.items():
        os.link(file, folder / name)
    graphs = {TARGET: target.target, DRAFTER: drafter.drafter}
    replace(target, path=folder, graphs=graphs, files={}).save()
    return Bundle.open(folder)


def pass_ms(one: Graph, other: Graph) -> tuple[dict[int, float], dict[int, float]]:
    """The time of the shortest pass of each of two graphs, in ms by width.

    The graphs take turns of a few passes each. The first pass of a turn does not count,
    since the threads of the other graph still spin then.
    """
    shortest: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for width in WIDTHS:
        tokens = list(range(1, width + 1))
        for graph, times in [*zip((one, other), shortest, strict=True)] * TURNS:
            graph.run(tokens)
            for _ in range(PASSES):
                before = graph.seconds
                graph.run(tokens)
                ms = 1e3 * (graph.seconds - before)
                times[width] = min(ms, times.get(width, ms))
    return shortest


def panels(report: Report) -> list[Panel]:
    """The panels of a picture: bytes, and speed-ups of pairs, over the mean KL.

    draw_points(file, panels(report), "mean KL")
    """
    rows = {row.recipe: row for row in report.rows if row.recipe != FULL.name}
    sizes = {name: (row.kl_mean, row.bytes / 1e6) for name, row in rows.items()}
    best: dict[str, float] = {}
    for pair in report.pairs:
        best[pair.target] = max(pair.speedup, best.get(pair.target, 0.0))
    drawn = [Panel("MB on disk", sizes, rises=False)]
    if best:
        speeds = {name: (row.kl_mean, best[name]) for name, row in rows.items()}
        label = "speed-up of the pair, its best drafter"
        drawn.append(Panel(label, speeds, rises=True))
    return drawn
