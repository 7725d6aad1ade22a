"""Any request gives the text of plain decoding, whatever is drafted and was before."""

import os
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from jetdraft.errors import BundleError, OptionError, StoreError
from jetdraft.methods import Method, Proposer, Rows, Traits, registered
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.piece import Result
from jetdraft.runtime.text.stops import StopWatcher
from tests.fuzz.disturbances import Disturbances
from tests.fuzz.requests import (
    draw_drafting,
    draw_options,
    draw_prompt,
    table_of_texts,
    words,
)
from tests.fuzz.subject import Draw, Fault, Subject
from tests.fuzz.worlds import World, made_worlds, worlds_of

Options = dict[str, Any]
REFUSALS = (OptionError, StoreError, BundleError)
"""What a draft may be refused with: contradicting options, a missing head."""


class SameText(Subject):
    """Compares tokens, text, finish reason and log probabilities, `light`: of toys."""

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
        self._say(f"{world.name}: token_ids={ids}, {words(options)}")
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
        """Compare the text with the text of the same tokens in drawn rounds."""
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
            raise Fault(f"{ids}, {words(options)}: {text!r} instead of {plain.text!r}")

    def _one(
        self, world: World, ids: list[int], options: Options, drafting: Options
    ) -> str:
        self._say(f"  {words(drafting)}")
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
                    f"{words({**options, **drafting})}): {other!r} instead of {value!r}"
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
    """Drafts what plain decoding wrote, with an error now and then."""

    traits = Traits("oracle", max_draft_tokens=15)
    text: ClassVar[list[int]] = []

    def propose(self, context: Any, budget: int, parents: Any = None) -> Rows:
        draw, rest = Random(len(context)), self.text[len(context) :]
        tokens = [token ^ (draw.random() < 0.2) for token in rest[:budget]]
        return Rows.chain([int(context[-1]), *tokens])


class Hybrids(SameText):
    """Compares texts of the families with recurrent states, of two if it is `light`.

    An oracle with errors drafts too, since no method guesses much of a random model.
    """

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
    """The same for mixtures of experts, and for layers that share keys and values."""

    name = "mixtures"
    make_worlds = staticmethod(
        partial(made_worlds, "SHARING MIXTURES", "none q4_0 q8_0")
    )


class Families(Subject):
    """Tries the decoders of transformers in turn, see benchmarks/families.py."""

    name = things = "families"
    seconds = 600.0

    def run(self, draw: Random) -> str:
        """Try the family of the case's number; its row is the row in the table."""
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
