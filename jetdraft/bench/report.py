"""What every recipe costs and gives: bytes, time, quality, and a pair's acceptance."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.bench.quality import compare
from jetdraft.bundle import DRAFTER, TARGET, Bundle
from jetdraft.errors import DataError, JetdraftError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.passes.graph import Graph
from jetdraft.texts import read_text

FULL = Recipe("none")
WIDTHS = (1, 2, 4, 8)
TURNS, PASSES = 3, 4
DRAFT_TOKENS = 3
WINDOW, WINDOWS = 128, 16
CAPACITY = 512
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """A recipe of the target. Times in ms by width; `relative` are full / quantized."""

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
class Combination:
    """A target's and a drafter's recipe; `speedup` is against its plain decoding."""

    target: str
    drafter: str
    acceptance_rate: float
    tokens_per_second: float
    speedup: float


@dataclass
class Report:
    """All rows, and what was compared on."""

    target: str
    drafter: str | None
    text: str
    rows: list[Row] = field(default_factory=list)
    pairs: list[Combination] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """What is compared: checkpoints, recipes, texts; bundles are made in `work`.

    Without a `text` to measure on, or one for `calibration`, the unquantized target
    writes them.

        Comparison("target", None, [Recipe()], [], work).run(print)
    """

    target: str
    drafter: str | None
    recipes: Sequence[Recipe]
    drafter_recipes: Sequence[Recipe]
    work: Path
    text: Path | None = None
    calibration: Path | None = None
    threads: int | None = None

    def run(self, say: Say) -> Report:
        """Measure everything, one recipe after the other beside the full model."""
        say("none")
        full = self._load(self._bundle(FULL, None))
        windows = self._windows(full)
        calibration = self.calibration
        if calibration is None and self._calibrated:
            calibration = self._written(full)
        given = "written by the model" if self.text is None else str(self.text)
        report = Report(self.target, self.drafter, given)
        bundles = {}
        for recipe in [FULL, *self.recipes]:
            say(recipe.name)
            bundle = self._bundle(recipe, calibration)
            bundles[recipe.name] = bundle
            report.rows.append(self._row(recipe, bundle, full, windows))
        prompts = [window[: WINDOW // 2] for window in windows[:8]]
        for drafter, beside in self._drafters(calibration).items():
            for name, bundle in bundles.items():
                say(f"{name} with {drafter}")
                pair = compose(bundle, beside, self.work / f"{name}+{drafter}")
                report.pairs.append(self._pair(name, drafter, pair, prompts))
        return report

    @property
    def _calibrated(self) -> bool:
        """Whether any recipe looks at a text."""
        beside = self.drafter_recipes if self.drafter else []
        return any(recipe.needs_calibration for recipe in (*self.recipes, *beside))

    def _drafters(self, calibration: Path | None) -> dict[str, Bundle]:
        """Each recipe's drafter, in a bundle whose target is the drafter too."""
        found = {}
        for recipe in [FULL, *self.drafter_recipes] if self.drafter else []:
            assert self.drafter is not None
            options = self._options(FULL, calibration)
            options = replace(options, drafter_recipe=recipe)
            output = self.work / f"drafter-{recipe.name}"
            found[recipe.name] = export(self.drafter, output, self.drafter, options)
        return found

    def _options(self, recipe: Recipe, calibration: Path | None) -> ExportOptions:
        return ExportOptions(
            recipe, capacity=CAPACITY, max_width=128, calibration=calibration
        )

    def _bundle(self, recipe: Recipe, calibration: Path | None) -> Bundle:
        output = self.work / recipe.name
        if output.exists():
            return Bundle.open(output)
        return export(self.target, output, None, self._options(recipe, calibration))

    def _load(self, bundle: Bundle) -> Model:
        return load(bundle.path, threads=self.threads)

    def _windows(self, full: Model) -> list[list[int]]:
        """Token ids to measure on."""
        if self.text is None:
            return [_written(full, seed) for seed in range(WINDOWS)]
        ids = full.parts.text.encode(read_text(self.text))
        if len(ids) < 2:
            raise DataError(f"{self.text} has {len(ids)} tokens; give a longer text")
        size = min(WINDOW, len(ids))
        starts = np.linspace(0, len(ids) - size, min(WINDOWS, len(ids) // size))
        return [list(ids[int(start) : int(start) + size]) for start in starts]

    def _written(self, full: Model) -> Path:
        """A text of the model's own for calibration, other than the measured one."""
        file = self.work / "calibration.txt"
        seeds = range(1000, 1000 + 2 * WINDOWS)
        texts = (full.parts.text.decode(_written(full, seed)) for seed in seeds)
        file.write_text("\n".join(texts), encoding="utf-8")
        return file

    def _row(
        self, recipe: Recipe, bundle: Bundle, full: Model, windows: list[list[int]]
    ) -> Row:
        model = self._load(bundle)
        quality = compare(full.parts.target, model.parts.target, windows)
        ours, theirs = pass_ms(model.parts.target, full.parts.target)
        return Row(
            recipe=recipe.name,
            bytes=sum(bundle.files[name]["bytes"] for name in _weights_of(bundle)),
            resident_mb=resident_mb(bundle.path),
            kl_mean=quality.kl_mean,
            kl_p99=quality.kl_p99,
            top1_agreement=quality.top1_agreement,
            perplexity=quality.perplexity,
            pass_ms=ours,
            relative={width: theirs[width] / ours[width] for width in WIDTHS},
        )

    def _pair(
        self, name: str, drafter: str, bundle: Bundle, prompts: list[list[int]]
    ) -> Combination:
        model = self._load(bundle)
        drafting = {"method": "draft", "num_draft_tokens": DRAFT_TOKENS}
        ways: dict[str, dict[str, Any]] = {
            "plain": {"method": "none", "exact": False},
            "draft": drafting,
        }
        speeds: dict[str, list[float]] = {way: [] for way in ways}
        total = Stats("draft", exact=True, prompt_tokens=0)
        for prompt in prompts:
            for way, options in ways.items():
                given = {"max_new_tokens": WINDOW // 2, "ignore_eos": True, **options}
                stats = model.generate(token_ids=prompt, **given).stats
                speeds[way].append(stats.tokens_per_second or 0.0)
                if way == "draft":
                    total.merge(stats)
        plain, draft = (statistics.median(speeds[way]) for way in ways)
        rate = total.acceptance_rate or 0.0
        return Combination(name, drafter, rate, draft, draft / plain)


def _written(model: Model, seed: int) -> list[int]:
    """A window that the model writes itself, from a token of chance."""
    vocab = model.parts.target.contract.vocab_size
    first = int(np.random.default_rng(seed).integers(vocab))
    return model.generate(
        token_ids=[first],
        method="none",
        temperature=1.0,
        seed=seed,
        max_new_tokens=WINDOW - 1,
        ignore_eos=True,
    ).token_ids


def _weights_of(bundle: Bundle) -> list[str]:
    """The target's graph and its weights."""
    file = bundle.target.file
    return [name for name in (file, f"{file}.data") if name in bundle.files]


def compose(target: Bundle, drafter: Bundle, folder: Path) -> Bundle:
    """A bundle of one's target and the other's drafter, by links to their files."""
    folder.mkdir()
    for bundle, name in ((target, TARGET), (drafter, DRAFTER)):
        for file in bundle.files:
            if file.startswith(f"{name}.") or file.startswith(f"{name}-"):
                os.link(bundle.path / file, folder / file)
    for file in target.files:
        if not (folder / file).exists():
            os.link(target.path / file, folder / file)
    assert drafter.drafter is not None
    graphs = {TARGET: target.target, DRAFTER: drafter.drafter}
    made = replace(target, path=folder, graphs=graphs, files={})
    made.save()
    return Bundle.open(folder)


def pass_ms(ours: Graph, theirs: Graph) -> tuple[dict[int, float], dict[int, float]]:
    """The shortest pass of two graphs at each width, a few passes each in turns.

    Of the first pass in a turn nothing is believed: the other's threads still spin.
    """
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for width in WIDTHS:
        tokens = list(range(1, width + 1))
        for graph, best in [*zip((ours, theirs), found, strict=True)] * TURNS:
            graph.run(tokens)
            for _ in range(PASSES):
                before = graph.seconds
                graph.run(tokens)
                ms = 1e3 * (graph.seconds - before)
                best[width] = min(ms, best.get(width, ms))
    return found


def resident_mb(bundle: Path) -> float:
    """Of a process of its own that has loaded a bundle and written a little."""
    code = (
        "import sys, jetdraft\n"
        "model = jetdraft.load(sys.argv[1])\n"
        "model.generate(token_ids=[1], method='none', max_new_tokens=4)\n"
        "pages = int(open('/proc/self/statm').read().split()[1])\n"
        "import os\n"
        "print(pages * os.sysconf('SC_PAGE_SIZE') / 1e6)\n"
    )
    command = [sys.executable, "-c", code, str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JetdraftError(
            f"a process that loads {bundle.name} ended with {done.returncode}; free "
            "some memory"
        )
    return float(done.stdout)


def panels(report: Report) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the points of a picture: by y label and recipe, mean KL and y.

    draw_points(file, panels(report), "mean KL")
    """
    rows = {row.recipe: row for row in report.rows if row.recipe != FULL.name}
    best: dict[str, float] = {}
    for pair in report.pairs:
        best[pair.target] = max(pair.speedup, best.get(pair.target, 0.0))
    values = {"MB on disk": {name: row.bytes / 1e6 for name, row in rows.items()}}
    if best:
        values["speed-up of the pair, its best drafter"] = best
    return {
        label: {name: (row.kl_mean, ys[name]) for name, row in rows.items()}
        for label, ys in values.items()
    }
