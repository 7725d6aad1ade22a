"""The bundles at hand, loaded once: what generations are compared on."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

import jetdraft
from jetdraft.devices.providers import PROVIDERS, try_provider
from jetdraft.errors import JetdraftError
from jetdraft.runtime.piece import Result
from jetdraft.testing import toy_bundle
from tests.families import FAMILIES, made
from tests.fuzz.other_bundles import resized, respelled, streamed_bundle
from tests.toy_graphs import METHODS, toy_block, toy_eagle

SIZES = ((16, 2), (17, 3), (64, 5), (40, 16), (200, 33))
"""Capacity and width of the toy bundle's siblings."""

BUNDLES = "JETDRAFT_FUZZ_BUNDLES"
"""The variable with more bundles, divided by colons."""

EXPORTED = Path(__file__).parents[2] / "bundles"
"""Where scripts/demo puts a trained pair."""

LEARNED = "learned"
"""The folder of what the toy has learned from use."""

MAX_KEPT = 4000
"""Plain texts that are kept."""


@dataclass
class World:
    """A bundle with two models: one is attacked, the other only decodes plainly."""

    name: str
    bundle: Path
    store: Path | None = None
    learn: Path | None = None
    provider: str | None = None
    share: int = 10
    _kept: dict[str, Result] = field(default_factory=dict)

    @cached_property
    def model(self) -> jetdraft.Model:
        return jetdraft.load(
            self.bundle, threads=1, store=self.store, learn=self.learn,
            provider=self.provider,
        )  # fmt: skip

    @cached_property
    def reference(self) -> jetdraft.Model:
        """Another model, without a store, that nothing disturbs."""
        return jetdraft.load(self.bundle, threads=1, provider=self.provider)

    @property
    def capacity(self) -> int:
        return self.reference.bundle.target.contract.capacity

    def plain(self, ids: list[int], options: dict[str, Any]) -> Result:
        key = repr((ids, sorted(options.items(), key=lambda pair: pair[0])))
        if key not in self._kept:
            self.reference.forget()
            result = self.reference.generate(token_ids=ids, method="none", **options)
            if len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = result
        return self._kept[key]

    def close(self) -> None:
        for name in ("model", "reference"):
            if name in vars(self):
                with suppress(JetdraftError):
                    vars(self).pop(name).close()


def worlds_of(folder: Path, light: bool) -> Iterator[World]:
    """All worlds but hybrids; a `light` subject does without the last."""
    yield from toy_worlds(folder)
    yield from head_worlds(folder)
    if not light:
        yield from other_worlds(folder)


def toy_worlds(folder: Path) -> Iterator[World]:
    """The toy bundle, which has a store and learns, and its siblings."""
    toy = toy_bundle(folder / "toy")
    yield World("toy", toy, folder / "store.sqlite", folder / LEARNED, share=40)
    for capacity, width in SIZES:
        name = f"toy-{capacity}-{width}"
        yield World(name, resized(toy, folder / name, capacity, width))
    for family in FAMILIES:
        name = f"toy-{family}"
        yield World(name, respelled(toy, folder / name, made(family)))


def head_worlds(folder: Path) -> Iterator[World]:
    """Targets that give features, with heads and drafters that fill a block."""
    yield World("toy-eagle", toy_eagle(folder / "toy-eagle"), folder / "eagle.sqlite")
    for method in METHODS:
        yield World(f"toy-{method}", toy_block(folder / f"toy-{method}", method))


def made_worlds(
    tables: str, recipes: str, folder: Path, light: bool
) -> Iterator[World]:
    """Families of tables in tests/tiny.py; the hybrid Qwen3.5 has an MTP module.

    They have the `recipes` in turns.
    """
    from jetdraft.export.exporter import ExportOptions, export
    from jetdraft.recipe import Recipe
    from tests import tiny
    from tests.runtime.test_recurrent import add_mtp

    families = [item for name in tables.split() for item in getattr(tiny, name).items()]
    turns = zip(families[: 2 if light else None], cycle(recipes.split()))
    for (name, make), words in turns:
        source = tiny.save_checkpoint(folder / f"{name}-checkpoint", make())
        if name == "qwen3_5":
            add_mtp(source, make())
        recipe = Recipe.parse(words)
        options = ExportOptions(recipe, capacity=96, max_width=32, fast=True)
        bundle = export(str(source), folder / name, options=options)
        yield World(name, bundle.path, folder / f"{name}.sqlite")


def other_worlds(folder: Path) -> Iterator[World]:
    """Streams, bundles that were named or exported, and worlds on other providers."""
    yield World("streamed", streamed_bundle(folder / "streamed"))
    named = [Path(path) for path in os.environ.get(BUNDLES, "").split(":") if path]
    for bundle in named or sorted(EXPORTED.glob("*")):
        if (bundle / "bundle.json").is_file():
            # Profiles are written, and the caller's are not ours.
            copy = Path(shutil.copytree(bundle, folder / f"copy-of-{bundle.name}"))
            yield World(bundle.name, copy, folder / f"{bundle.name}.sqlite", share=5)
            yield from _on_other_providers(World(bundle.name, copy, share=1))
    yield from _on_other_providers(World("toy", folder / "toy", share=2))


def _on_other_providers(world: World) -> Iterator[World]:
    for name in PROVIDERS:
        if name == jetdraft.Bundle.open(world.bundle).provider:
            continue
        if try_provider(name).runs:
            other = World(f"{world.name}-{name}", world.bundle, provider=name, share=2)
            with suppress(JetdraftError):  # graphs of another flavour
                other.model  # noqa: B018
                yield other
