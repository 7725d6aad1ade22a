"""Any request gives the text of plain decoding, whatever is drafted and was before."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import cycle
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from unittest import mock

import jetdraft
from jetdraft import BundleError, JetdraftError, Model, OptionError, Result, StoreError
from jetdraft.devices.providers import PROVIDERS, try_provider
from jetdraft.methods import Method, Proposer, Rows, Traits, registered
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.text.stops import StopWatcher
from jetdraft.testing import toy_bundle
from tests import toy_graphs
from tests.families import FAMILIES, made
from tests.fuzz import Draw, Fault, Subject, requests
from tests.fuzz.requests import draw_drafting, draw_options, draw_prompt, table_of_texts
from tests.toy_drafter import put_on_trial, random_arrays
from tests.toy_graphs import resized, respelled, streamed_bundle, toy_block, toy_eagle

# Capacity and width of the toy bundle's siblings.
SIZES = ((16, 2), (17, 3), (64, 5), (40, 16), (200, 33))
# The variable with more bundles, divided by colons.
BUNDLES = "JETDRAFT_FUZZ_BUNDLES"
# Where scripts/demo puts a trained pair.
EXPORTED = Path(__file__).parents[2] / "bundles"
# The folder of what the toy has learned from use.
LEARNED = "learned"
# Plain texts that are kept.
MAX_KEPT = 4000


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
        how = {"store": self.store, "learn": self.learn, "provider": self.provider}
        return jetdraft.load(self.bundle, threads=1, **how)

    @cached_property
    def reference(self) -> jetdraft.Model:
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
    yield from toy_worlds(folder)
    yield from head_worlds(folder)
    if not light:
        yield from other_worlds(folder)


def toy_worlds(folder: Path) -> Iterator[World]:
    toy = toy_bundle(folder / "toy")
    yield World("toy", toy, folder / "store.sqlite", folder / LEARNED, share=40)
    for capacity, width in SIZES:
        name = f"toy-{capacity}-{width}"
        yield World(name, resized(toy, folder / name, capacity, width))
    for family in FAMILIES:
        name = f"toy-{family}"
        yield World(name, respelled(toy, folder / name, made(family)))


def head_worlds(folder: Path) -> Iterator[World]:
    yield World("toy-eagle", toy_eagle(folder / "toy-eagle"), folder / "eagle.sqlite")
    for method in toy_graphs.METHODS:
        yield World(f"toy-{method}", toy_block(folder / f"toy-{method}", method))


def made_worlds(
    tables: str, recipes: str, folder: Path, light: bool
) -> Iterator[World]:
    """Families of tables in tests/tiny.py, with the `recipes` in turns."""
    from jetdraft.export.exporter import ExportOptions, export
    from jetdraft.recipe import Recipe
    from tests import tiny
    from tests.runtime.test_recurrent import add_mtp

    families = [item for name in tables.split() for item in getattr(tiny, name).items()]
    turns = zip(families[: 2 if light else None], cycle(recipes.split()))
    for (name, make), own in turns:
        source = tiny.save_checkpoint(folder / f"{name}-checkpoint", make())
        if name == "qwen3_5":
            add_mtp(source, make())
        options = ExportOptions(Recipe.parse(own), capacity=96, max_width=32, fast=True)
        bundle = export(str(source), folder / name, options=options)
        yield World(name, bundle.path, folder / f"{name}.sqlite")


def other_worlds(folder: Path) -> Iterator[World]:
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


Options = dict[str, Any]
# What a draft may be refused with: contradicting options, a missing head.
REFUSALS = (OptionError, StoreError, BundleError)


class SameText(Subject):
    name = "same-text"
    seconds = 120.0
    make_worlds = staticmethod(worlds_of)
    always = ""
    """The method that drafts in every case, beside those that are drawn."""

    def __init__(self, folder: Path, light: bool = False) -> None:
        super().__init__(folder, light)
        self.worlds = [*self.make_worlds(folder, light)]
        self.disturbances = Disturbances(folder)
        self.table = table_of_texts(folder, self.worlds[0].reference)
        self._verbose = bool(os.environ.get("JETDRAFT_FUZZ_VERBOSE"))
        self._earlier: list[int] = []
        self._set_inputs = Graph._set_inputs
        Graph._set_inputs = _checked(Graph._set_inputs)  # type: ignore[method-assign]

    def run(self, draw: Random) -> str:
        """Disturb a model up to three times, then compare up to three ways to draft."""
        world = draw.choices(self.worlds, [world.share for world in self.worlds])[0]
        for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
            self.disturb(draw, world)
        return self.compare(draw, world)

    def disturb(self, draw: Random, world: World) -> None:
        prompt = draw_prompt(draw, world.model, self._earlier)
        self._say(f"disturbed: {self.disturbances.one(draw, world.model, prompt)}")
        if draw.random() < 0.5:
            self._earlier = prompt

    def compare(self, draw: Random, world: World) -> str:
        ids = draw_prompt(draw, world.model, self._earlier)
        options = draw_options(draw, world.model)
        table = self.table if world.name.startswith("toy") or self.always else None
        count = draw.randint(1, 3)
        ways = [draw_drafting(draw, world.model, table) for _ in range(count)]
        if self.always:
            length = draw.choice((1, 2, 4, 7, 15))
            ways.append({"method": self.always, "num_draft_tokens": length})
        self._say(f"{world.name}: token_ids={ids}, {requests.words(options)}")
        try:
            plain = world.plain(ids, _plainly(options))
        except OptionError:
            return "refused"
        self._earlier = Oracle.text = ids + plain.token_ids
        self._read_again(draw, world, ids, options, plain)
        outcomes = [self._one(world, ids, options, way) for way in ways]
        return "same" if "same" in outcomes else "refused"

    def _read_again(
        self,
        draw: Random,
        world: World,
        ids: list[int],
        options: Options,
        plain: Result,
    ) -> None:
        parts = world.model.parts
        ends = () if options.get("ignore_eos") else parts.bundle.eos_token_ids
        constrained = not {"regex", "json_schema", "grammar"}.isdisjoint(options)
        stream = parts.text.stream(ids, ends, constrained)
        watcher = StopWatcher(stream, ends, options.get("stop", ()))
        text, rest = "", plain.token_ids
        while rest:
            size = draw.randint(1, 6)
            watcher.read(rest[:size])
            text, rest = text + watcher.take(), rest[size:]
        text += watcher.rest()
        if text != plain.text:
            asked = f"{ids}, {requests.words(options)}"
            raise Fault(f"{asked}: {text!r} instead of {plain.text!r}")

    def _one(
        self, world: World, ids: list[int], options: Options, drafting: Options
    ) -> str:
        self._say(f"  {requests.words(drafting)}")
        try:
            result = world.model.generate(token_ids=ids, **options, **drafting)
        except REFUSALS as error:
            self._say(f"  refused: {error}")
            return "refused"
        plain = world.plain(ids, _plainly(options))
        for name in ("token_ids", "text", "finish_reason", "logprobs"):
            value, other = getattr(plain, name), getattr(result, name)
            if value != other:
                raise Fault(
                    f"another {name} on {world.name}: model.generate(token_ids={ids}, "
                    f"{requests.words({**options, **drafting})}): {other!r} instead of "
                    f"{value!r}"
                )
        self.facts["generations compared"] += 1
        self.facts["drafted tokens"] += result.stats.drafted_tokens
        return "same"

    def refresh(self) -> None:
        self._earlier = []
        self.disturbances.forget()
        for world in self.worlds:
            if "model" in vars(world):
                world.model.forget()

    def _say(self, line: str) -> None:
        if self._verbose:
            print(line, flush=True)

    def close(self) -> None:
        Graph._set_inputs = self._set_inputs  # type: ignore[method-assign]
        for world in self.worlds:
            world.close()


class Oracle(Proposer):
    traits = Traits("oracle", max_draft_tokens=15)
    text: ClassVar[list[int]] = []

    def propose(self, context: Any, budget: int, parents: Any = None) -> Rows:
        draw, rest = Random(len(context)), self.text[len(context) :]
        tokens = [token ^ (draw.random() < 0.2) for token in rest[:budget]]
        return Rows.chain([int(context[-1]), *tokens])


class Hybrids(SameText):
    """Compares texts of recurrent families; an oracle with errors drafts too."""

    name, always = "hybrids", "oracle"
    make_worlds = staticmethod(
        partial(made_worlds, "HYBRIDS", "none q4_0 int8-rtn-b32 int4-b32")
    )

    def __init__(self, folder: Path, light: bool = False) -> None:
        self._oracle = registered(Method("oracle", "plain text", lambda *_: Oracle()))
        self._oracle.__enter__()
        super().__init__(folder, light)

    def close(self) -> None:
        super().close()
        self._oracle.__exit__(None, None, None)


class Mixtures(Hybrids):
    name = "mixtures"
    make_worlds = staticmethod(
        partial(made_worlds, "SHARING MIXTURES", "none q4_0 q8_0")
    )


class Families(Subject):
    name = things = "families"
    seconds = 600.0

    def run(self, draw: Random) -> str:
        from families import NAMES, PAGE, documented, title, try_family

        assert isinstance(draw, Draw)
        name = NAMES[draw.number % len(NAMES)]
        with TemporaryDirectory(dir=self.folder) as folder:
            outcome = try_family(name, Path(folder), draw.number // len(NAMES))
        if title(outcome) != documented(PAGE).get(name):
            raise Fault(f"{name}: {title(outcome)} ({outcome.reason})")
        return outcome.result


def _checked(run: Any) -> Any:
    """`Graph._set_inputs`, which refuses a pass that reaches past the buffers."""

    def checked(graph: Graph, binding: Any, cursor: int) -> Any:
        end = cursor + binding.size.width + binding.size.probes.total
        if end > graph.contract.capacity:
            raise Fault(f"a pass ends at {end} of {graph.contract.capacity} rows")
        return run(graph, binding, cursor)

    return checked


def _plainly(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, **({"seed": int(options["seed"])} if "seed" in options else {})}


class Disturbances:
    """Leaves a model in some state; prefixes are kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: dict[str, list[Path]] = {}

    def one(self, draw: Random, model: Model, prompt: list[int]) -> str:
        kinds = [name for name in vars(type(self)) if name.startswith("_do_")]
        kind = draw.choice(kinds).removeprefix("_do_")
        with suppress(OptionError, StoreError):  # contradictions, a missing head
            getattr(self, f"_do_{kind}")(draw, model, prompt)
        return kind

    def _options(self, draw: Random, model: Model) -> dict[str, object]:
        return {**draw_options(draw, model), **draw_drafting(draw, model)}

    def _do_finished(self, draw: Random, model: Model, prompt: list[int]) -> None:
        model.generate(token_ids=prompt, **self._options(draw, model))

    def _do_inexact(self, draw: Random, model: Model, prompt: list[int]) -> None:
        options = {**self._options(draw, model), "exact": False}
        model.generate(token_ids=prompt, **options)

    def _do_verifier(self, draw: Random, model: Model, prompt: list[int]) -> None:
        options = {**draw_options(draw, model), **requests.draw_verifier(draw)}
        model.generate(token_ids=prompt, **options)

    def _do_left(self, draw: Random, model: Model, prompt: list[int]) -> None:
        stream = model.stream(token_ids=prompt, **self._options(draw, model))
        for _ in range(draw.randint(0, 3)):
            next(stream, None)

    def _do_cancelled(self, draw: Random, model: Model, prompt: list[int]) -> None:
        stream = model.stream(token_ids=prompt, **self._options(draw, model))
        next(stream, None)
        model.cancel()
        if stream.result().finish_reason == "":
            raise AssertionError("a cancelled generation has no finish reason")

    def _do_deadline(self, draw: Random, model: Model, prompt: list[int]) -> None:
        model.generate(token_ids=prompt, **self._options(draw, model), max_seconds=1e-6)

    def _do_interrupted(self, draw: Random, model: Model, prompt: list[int]) -> None:
        left, choose = [draw.randint(0, 5)], Chooser.choose

        def interrupted(*arguments: object) -> list[int]:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return choose(*arguments)  # type: ignore[arg-type]

        options = self._options(draw, model)
        with (
            mock.patch.object(Chooser, "choose", interrupted),
            suppress(KeyboardInterrupt),
        ):
            model.generate(token_ids=prompt, **options)

    def _do_forgotten(self, draw: Random, model: Model, prompt: list[int]) -> None:
        model.forget()

    def _do_busy(self, draw: Random, model: Model, prompt: list[int]) -> None:
        with model.stream(token_ids=prompt, max_new_tokens=40, method="none") as stream:
            if next(stream, None) is None:
                return
            try:
                model.generate(token_ids=prompt)
            except JetdraftError:
                return
        if stream.stats.finish_reason == "cancelled":
            raise AssertionError("two generations used the same buffers")

    def _do_learned(self, draw: Random, model: Model, prompt: list[int]) -> None:
        if model.parts.learning is None:
            return
        bundle, folder = model.bundle.path, self.folder / LEARNED
        arrays = random_arrays(bundle, seed=draw.randrange(4))
        put_on_trial(folder, bundle, arrays, before=draw.choice(("", *_sets(folder))))
        options = {"method": "draft", "num_draft_tokens": 15, "max_new_tokens": 60}
        for _ in range(draw.randint(1, 6)):
            model.generate(token_ids=prompt, ignore_eos=True, **options)

    def forget(self) -> None:
        self._saved.clear()

    def _do_prefix_saved(self, draw: Random, model: Model, prompt: list[int]) -> None:
        owner = str(model.bundle.path)
        files = self._saved.setdefault(owner, [])
        number = list(self._saved).index(owner)
        file = self.folder / f"prefix-{number}-{len(files) % 8}.npz"
        model.save_prefix(file, prompt)
        files.append(file)

    def _do_prefix_loaded(self, draw: Random, model: Model, prompt: list[int]) -> None:
        files = self._saved.get(str(model.bundle.path), [])
        if files:
            model.load_prefix(draw.choice(files))


def _sets(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if len(entry.name) == 64)
