"""Many tokens through a model, a pool and a server: nothing grows."""

import asyncio
import gc
import json
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import psutil

import jetdraft
from jetdraft.testing import toy_bundle
from tests.fuzz import Fault, Subject
from tests.fuzz.requests import CONSTRAINTS
from tests.fuzz.serving import BODIES, JSON, Serving

# Cases until about all widths, methods and lengths were seen; of a light subject.
WARM, LIGHTLY_WARM = 60, 8
# Growth of the memory after the warm cases.
MAX_BYTES_MORE = 24_000_000
HEAVY = ("Graph", "TextCodec", "Vocabulary")
METHODS = ("none", "lookup", "draft", "trigram", "cascade", "auto")
# Tokens of one generation.
PIECE = 200


class Soak(Subject):
    """A case gives about 1000 tokens: model, stream, pool, server, load and close."""

    name = "soak"
    things = "tokens"
    unit = 5 * PIECE
    seconds = 120.0

    def __init__(self, folder: Path, light: bool = False) -> None:
        super().__init__(folder, light)
        self.bundle = toy_bundle(folder / "toy")
        self.model = jetdraft.load(self.bundle, threads=1)
        self.pool = jetdraft.Pool(self.bundle, 2, threads=1)
        (folder / "served").mkdir()
        self.server = Serving(folder / "served")
        self.warm = LIGHTLY_WARM if light else WARM
        self.cases, self.at_start = 0, ((0, 0, 0), (0, 0, 0))

    def run(self, draw: Random) -> str:
        for _ in range(3):
            self._one(self.model, draw)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(self._pooled, [Random(draw.random()) for _ in range(2)]))
        self._asked(draw)
        if draw.random() < 0.02:
            self._opened(draw)
        self.cases += 1
        if self.cases == self.warm:
            self.at_start = self._sizes()
        return "cases"

    def _one(self, model: jetdraft.Model, draw: Random) -> None:
        size = model.bundle.target.contract.vocab_size
        prompt = [draw.randrange(size) for _ in range(draw.randint(1, 250))]
        method = draw.choice(METHODS)
        fixed = draw.random() < 0.5 and method not in ("none", "auto")
        how = {"num_draft_tokens": 5} if fixed else {}
        how |= {"temperature": draw.choice((0.0, 0.9)), "seed": draw.randrange(99)}
        how |= {"method": method, "max_new_tokens": PIECE, "ignore_eos": True}
        stream = model.stream(token_ids=prompt, **how)
        if draw.random() < 0.1:
            asyncio.run(_read(model, prompt))
        if stream.result().stats.new_tokens != PIECE:
            raise Fault(f"{stream.stats.new_tokens} tokens instead of {PIECE}")

    def _pooled(self, draw: Random) -> None:
        with self.pool.take() as model:
            self._one(model, draw)

    def _asked(self, draw: Random) -> None:
        path, body = draw.choice(BODIES)
        self.server._ask(path, json.dumps(body).encode(), JSON)
        self.model.generate(
            token_ids=[5, 8], max_new_tokens=20, **draw.choice(CONSTRAINTS)
        )

    def _opened(self, draw: Random) -> None:
        before = _alive()
        with jetdraft.load(self.bundle, threads=1) as model:
            model.generate("a", regex="[a-z]{1,9}", max_new_tokens=9)
        del model
        if (after := _alive()) != before:
            raise Fault(f"a model was closed, and stays: {after} instead of {before}")

    def _sizes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        gc.collect()
        process = psutil.Process(os.getpid())
        own = process.memory_info().rss, threading.active_count(), process.num_fds()
        return own, self.server._sizes()

    def finish(self) -> None:
        if self.cases <= self.warm:
            return
        both = zip(("process", "server"), self.at_start, self._sizes(), strict=True)
        for who, before, after in both:
            self.facts[f"MB of the {who} at first"] = before[0] // 10**6
            self.facts[f"MB of the {who} at last"] = after[0] // 10**6
            grown = after[0] - before[0], after[1] - before[1], after[2] - before[2]
            if grown[0] > MAX_BYTES_MORE or max(grown[1:]) > 4:
                raise Fault(f"the {who} grew from {before} to {after}")

    def close(self) -> None:
        self.server.close()
        self.pool.close()
        self.model.close()


def _alive() -> dict[str, int]:
    gc.collect()
    names = (type(thing).__name__ for thing in gc.get_objects())
    return dict(Counter(name for name in names if name in HEAVY))


async def _read(model: jetdraft.Model, prompt: list[int]) -> None:
    async with model.astream(token_ids=prompt, max_new_tokens=20) as stream:
        async for _ in stream:
            pass
