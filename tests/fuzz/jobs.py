"""What writes to disk, as jobs that can be ended anywhere and looked at afterwards."""

from __future__ import annotations

import json
import shutil
import sqlite3
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from jetdraft.files import write_text
from jetdraft.staging import writing
from tests.kills import content, fill

PROMPT = [5, 8, 9, 40, 41]
CORPUS = "The robot sees a box. The robot sees the ball. " * 20
NOTHING, OLD, NEW = "nothing", "old", "new"

# onnxruntime is imported inside of jobs: they run in forks of a process that never
# loads it, since its threads do not survive a fork.


class Job(ABC):
    """Writes something in a `place`; `toy` is a toy bundle that it may read.

    job.prepare(place, old=True); job.run(place); job.state(place)    # "new"
    """

    name: ClassVar[str]
    share: ClassVar[int] = 10
    seconds: ClassVar[float] = 1.0
    """About how long `run` takes."""

    replaces: ClassVar[bool] = True
    """Whether it takes the place of what an earlier run has finished."""

    def __init__(self, toy: Path) -> None:
        self.toy = toy

    @abstractmethod
    def prepare(self, place: Path, old: bool) -> None:
        """Fill an empty folder; with `old` there is a result of an earlier run."""

    @abstractmethod
    def run(self, place: Path) -> None:
        """Write the new result."""

    @abstractmethod
    def state(self, place: Path) -> str:
        """What there is; raises if that is neither nothing, nor old, nor new."""


class WriteBundle(Job):
    """Files of a bundle, as an export writes them."""

    name = "bundle"

    def prepare(self, place: Path, old: bool) -> None:
        if old:
            with writing(place / "bundle") as folder:
                fill(folder, OLD, ("target", "drafter"))

    def run(self, place: Path) -> None:
        with writing(place / "bundle") as folder:
            fill(folder, NEW)

    def state(self, place: Path) -> str:
        bundle = place / "bundle"
        return content(bundle) if bundle.exists() else NOTHING


class Export(Job):
    """A checkpoint on the command line."""

    name = "export"
    share = 3
    seconds = 8.0

    def prepare(self, place: Path, old: bool) -> None:
        if old:
            shutil.copytree(self.toy, place / "bundle")

    def run(self, place: Path) -> None:
        checkpoint = self.toy.with_name("checkpoint")
        _verb("export", checkpoint, "-o", place / "bundle", "--capacity", "64")

    def state(self, place: Path) -> str:
        import jetdraft

        if not (place / "bundle").exists():
            return NOTHING
        with jetdraft.load(place / "bundle", threads=1) as model:
            model.generate(token_ids=PROMPT, max_new_tokens=4)
            return OLD if model.bundle.drafter is not None else NEW


class Recipes(Job):
    """The report of a comparison."""

    name = "recipes"
    share = 1
    seconds = 15.0

    def prepare(self, place: Path, old: bool) -> None:
        if old:
            (place / "report.json").write_text('{"rows": [], "old": 1}')

    def run(self, place: Path) -> None:
        from tools.recipes.__main__ import main as command

        checkpoint, text = self.toy.with_name("checkpoint"), place / "text"
        text.write_text(CORPUS)
        options = ("--recipes", "int8-rtn-b32", "--text", text, "-t", "1")
        words = (checkpoint, *options, "--output", place / "report.json")
        command.main([str(word) for word in words], standalone_mode=True)

    def state(self, place: Path) -> str:
        if not (place / "report.json").exists():
            return NOTHING
        fields = json.loads((place / "report.json").read_text())
        return OLD if "old" in fields else NEW


class Table(Job):
    """A table of trigrams."""

    name = "table"
    replaces = False

    def prepare(self, place: Path, old: bool) -> None:
        (place / "corpus").write_text(CORPUS)

    def run(self, place: Path) -> None:
        command = ("train", "trigram", place / "corpus", "--bundle", self.toy)
        _verb(*command, "-o", place / "table.npz")

    def state(self, place: Path) -> str:
        from jetdraft.bundle import Bundle
        from jetdraft.runtime.history.trigrams import Counts

        if not (place / "table.npz").exists():
            return NOTHING
        opened = Bundle.open(self.toy)
        size = opened.target.contract.vocab_size
        Counts.load(place / "table.npz", opened.tokenizer_sha256, size)
        return NEW


class Tune(Job):
    """What `tune` measures on a machine."""

    name = "tune"
    share = 4
    seconds = 3.0

    def prepare(self, place: Path, old: bool) -> None:
        shutil.copytree(self.toy, place / "bundle")
        if old:
            self.run(place)

    def run(self, place: Path) -> None:
        _verb("tune", place / "bundle", "-t", "1")

    def state(self, place: Path) -> str:
        import jetdraft

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with jetdraft.load(place / "bundle", threads=1) as model:
                model.generate(token_ids=PROMPT, max_new_tokens=4)
                return NOTHING if model.parts.profiles.tuned() is None else NEW


class Store(Job):
    """Requests and responses, kept by ten generations."""

    name = "store"

    def prepare(self, place: Path, old: bool) -> None:
        if old:
            self._generate(place, 2)

    def run(self, place: Path) -> None:
        self._generate(place, 10)

    def _generate(self, place: Path, count: int) -> None:
        import jetdraft

        with jetdraft.load(self.toy, threads=1, store=place / "store.sqlite") as model:
            for last in range(count):
                model.generate(token_ids=[*PROMPT, last], max_new_tokens=6)

    def state(self, place: Path) -> str:
        import jetdraft

        file = place / "store.sqlite"
        if not file.exists():
            return NOTHING
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a damaged store is moved with a warning
            with jetdraft.load(self.toy, threads=1, store=file) as model:
                model.generate(token_ids=PROMPT, max_new_tokens=4)
        database = sqlite3.connect(file)
        try:
            assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
            [(count,)] = database.execute("select count(*) from entries")
        finally:
            database.close()
        return NEW if count > 3 else OLD


class Learn(Job):
    """Lessons of ten generations, and other weights for the drafter on the way."""

    name = "learn"

    def prepare(self, place: Path, old: bool) -> None:
        if old:
            self._use(place, 2)

    def run(self, place: Path) -> None:
        from tests.toy_drafter import put_on_trial, random_arrays

        self._use(place, 5)
        put_on_trial(place / "learned", self.toy, random_arrays(self.toy))
        self._use(place, 15)

    def _use(self, place: Path, count: int) -> None:
        import jetdraft

        drafted = {"method": "draft", "num_draft_tokens": 4, "max_new_tokens": 40}
        with jetdraft.load(self.toy, threads=1, learn=place / "learned") as model:
            for last in range(count):
                model.generate(token_ids=[*PROMPT, last], **drafted)

    def state(self, place: Path) -> str:
        import jetdraft

        file = place / "learned" / "lessons.sqlite"
        if not file.exists():
            return NOTHING
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # damage is told in warnings
            with jetdraft.load(self.toy, threads=1, learn=file.parent) as model:
                model.generate(token_ids=PROMPT, max_new_tokens=4, method="draft")
                count = len(model.parts.learning.lessons.read())
        return NEW if count > 3 else OLD


class SavedPrefix(Job):
    """The rows of a prompt."""

    name = "prefix"

    def prepare(self, place: Path, old: bool) -> None:
        if old:
            self._save(place, PROMPT[:3])

    def run(self, place: Path) -> None:
        self._save(place, PROMPT * 4)

    def _save(self, place: Path, prompt: list[int]) -> None:
        import jetdraft

        with jetdraft.load(self.toy, threads=1) as model:
            model.save_prefix(place / "prefix.npz", prompt)

    def state(self, place: Path) -> str:
        import jetdraft

        if not (place / "prefix.npz").exists():
            return NOTHING
        with jetdraft.load(self.toy, threads=1) as model:
            model.load_prefix(place / "prefix.npz")
            prompt, options = PROMPT * 4, {"max_new_tokens": 6, "method": "none"}
            result = model.generate(token_ids=prompt, **options)
            kept = result.stats.reused_tokens
            model.forget()
            assert model.generate(token_ids=prompt, **options).text == result.text
        assert kept in (3, len(prompt) - 1), f"{kept} rows were kept"
        return OLD if kept == 3 else NEW


class Talk(Job):
    """A conversation's messages."""

    name = "conversation"
    share = 3

    def prepare(self, place: Path, old: bool) -> None:
        if old:
            write_text(place / "talk.json", '["old"]')

    def run(self, place: Path) -> None:
        write_text(place / "talk.json", json.dumps(["new", "x" * 20_000]))

    def state(self, place: Path) -> str:
        if not (place / "talk.json").exists():
            return NOTHING
        return str(json.loads((place / "talk.json").read_text())[0])


class Streams(Job):
    """The checkpoint of a training, which a later run continues with."""

    name = "streams"
    share = 1
    seconds = 25.0
    replaces = False

    def prepare(self, place: Path, old: bool) -> None:
        (place / "corpus").write_text(CORPUS * 4)

    def run(self, place: Path) -> None:
        checkpoint = self.toy.with_name("checkpoint")
        options = ("--steps", "3", "--batch-size", "1", "--sequence-length", "32")
        options += ("--layers", "1", "--gamma", "2", "--lora-rank", "2")
        command = ("train", "stream", checkpoint, "--data", place / "corpus")
        _verb(*command, *options, "-o", place / "streamed")

    def state(self, place: Path) -> str:
        from safetensors.numpy import load_file

        folder = place / "streamed"
        if not folder.exists():
            return NOTHING
        if (folder / "streams.json").exists() and not (folder / "training.pt").exists():
            assert json.loads((folder / "streams.json").read_text())
            assert load_file(folder / "streams.safetensors")
            return NEW
        with suppress(SystemExit):  # continues where it was
            self.run(place)
        assert not (folder / "training.pt").exists()
        return NEW


JOBS: tuple[type[Job], ...] = (
    *(WriteBundle, Export, Recipes, Table, Tune, Store, Learn, SavedPrefix, Talk),
    Streams,
)


def _verb(*words: object) -> None:
    """Run a verb in this process; its exit raises `SystemExit`."""
    from jetdraft.cli import main

    main([str(word) for word in words], standalone_mode=True)
