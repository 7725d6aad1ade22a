"""What writes to disk, as jobs that can be ended anywhere and looked at afterwards."""

import json
import shutil
import sqlite3
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from jetdraft.files import write_text
from jetdraft.staging import writing
from tests.kills import content, fill

PROMPT = [5, 8, 9, 40, 41]
CORPUS = "The robot sees a box. The robot sees the ball. " * 20
NOTHING, OLD, NEW = "nothing", "old", "new"

# onnxruntime is imported inside of jobs: they run in forks of a process that never
# loads it, since its threads do not survive a fork.


class Job:
    """Writes the file or folder `result` into a place; `toy` is a toy bundle to read.

    It takes about `seconds`. It `replaces` what an earlier run has finished, or writes
    one thing after another, `stepwise`.
    """

    name = result = ""
    share, seconds = 10, 1.0
    replaces, stepwise = True, False

    def __init__(self, toy: Path) -> None:
        self.toy = toy
        self.checkpoint = toy.with_name("checkpoint")

    def prepare(self, place: Path, old: bool) -> None:
        """Fill an empty folder; with `old` there is a result of an earlier run."""
        if old:
            self.run_before(place)

    def run_before(self, place: Path) -> None:
        """The earlier run."""

    def run(self, place: Path) -> None:
        """Write the new result."""

    def state(self, place: Path) -> str:
        """What there is; raises if that is neither nothing, nor old, nor new."""
        file = place / self.result
        return self.look(file) if file.exists() else NOTHING

    def look(self, file: Path) -> str:
        """What kind of result there is."""


class WriteBundle(Job):
    name = result = "bundle"

    def run_before(self, place):
        with writing(place / "bundle") as folder:
            fill(folder, OLD, ("target", "drafter"))

    def run(self, place):
        with writing(place / "bundle") as folder:
            fill(folder, NEW)

    def look(self, file):
        return content(file)


class Export(Job):
    name, result = "export", "bundle"
    share, seconds = 3, 8.0

    def run_before(self, place):
        shutil.copytree(self.toy, place / "bundle")

    def run(self, place):
        _verb("export", self.checkpoint, "-o", place / "bundle", "--capacity", "64")

    def look(self, file):
        with _model(file) as model:
            _generate(model)
            return OLD if model.bundle.drafter is not None else NEW


class Recipes(Job):
    name, result = "recipes", "report.json"
    share, seconds = 1, 15.0

    def run_before(self, place):
        (place / "report.json").write_text('{"rows": [], "old": 1}')

    def run(self, place):
        from tools.recipes.__main__ import main as command

        text = place / "text"
        text.write_text(CORPUS)
        options = ("--recipes", "int8-rtn-b32", "--text", text, "-t", "1")
        words = (self.checkpoint, *options, "--output", place / "report.json")
        command.main([str(word) for word in words], standalone_mode=True)

    def look(self, file):
        return OLD if "old" in json.loads(file.read_text()) else NEW


class Table(Job):
    name, result = "table", "table.npz"
    replaces = False

    def prepare(self, place, old):
        (place / "corpus").write_text(CORPUS)

    def run(self, place):
        command = ("train", "trigram", place / "corpus", "--bundle", self.toy)
        _verb(*command, "-o", place / "table.npz")

    def look(self, file):
        from jetdraft.bundle import Bundle
        from jetdraft.runtime.history.trigrams import Counts

        toy = Bundle.open(self.toy)
        Counts.load(file, toy.tokenizer_sha256, toy.target.contract.vocab_size)
        return NEW


class Tune(Job):
    name, result = "tune", "bundle"
    share, seconds = 4, 3.0
    stepwise = True

    def prepare(self, place, old):
        shutil.copytree(self.toy, place / "bundle")
        if old:
            self.run(place)

    def run(self, place):
        _verb("tune", place / "bundle", "-t", "1")

    def look(self, file):
        with _model(file, strict=True) as model:
            _generate(model)
            return NOTHING if model.parts.profiles.read_tuning() is None else NEW


class Store(Job):
    name, result = "store", "store.sqlite"
    stepwise = True

    def run_before(self, place):
        self._generate(place, 2)

    def run(self, place):
        self._generate(place, 10)

    def _generate(self, place, count):
        with _model(self.toy, store=place / "store.sqlite") as model:
            for last in range(count):
                model.generate(token_ids=[*PROMPT, last], max_new_tokens=6)

    def look(self, file):
        with _model(self.toy, strict=True, store=file) as model:
            _generate(model)
        with closing(sqlite3.connect(file)) as database:
            assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
            [(count,)] = database.execute("select count(*) from entries")
        return NEW if count > 3 else OLD


class Learn(Job):
    """Lessons of ten generations, and other weights for the drafter on the way."""

    name, result = "learn", "learned/lessons.sqlite"
    stepwise = True

    def run_before(self, place):
        self._use(place, 2)

    def run(self, place):
        from tests.toy_drafter import put_on_trial, random_arrays

        self._use(place, 5)
        put_on_trial(place / "learned", self.toy, random_arrays(self.toy))
        self._use(place, 15)

    def _use(self, place, count):
        drafted = {"method": "draft", "num_draft_tokens": 4, "max_new_tokens": 40}
        with _model(self.toy, learn=place / "learned") as model:
            for last in range(count):
                model.generate(token_ids=[*PROMPT, last], **drafted)

    def look(self, file):
        with _model(self.toy, strict=True, learn=file.parent) as model:
            _generate(model, method="draft")
            return NEW if len(model.parts.learning.lessons.read()) > 3 else OLD


class SavedPrefix(Job):
    name, result = "prefix", "prefix.npz"

    def run_before(self, place):
        self._save(place, PROMPT[:3])

    def run(self, place):
        self._save(place, PROMPT * 4)

    def _save(self, place, prompt):
        with _model(self.toy) as model:
            model.save_prefix(place / "prefix.npz", prompt)

    def look(self, file):
        options = {"token_ids": PROMPT * 4, "max_new_tokens": 6, "method": "none"}
        with _model(self.toy) as model:
            model.load_prefix(file)
            result = model.generate(**options)
            kept = result.stats.reused_tokens
            model.forget()
            assert model.generate(**options).text == result.text
        assert kept in (3, len(PROMPT * 4) - 1), f"{kept} rows were kept"
        return OLD if kept == 3 else NEW


class Talk(Job):
    name, result = "conversation", "talk.json"
    share = 3

    def run_before(self, place):
        write_text(place / "talk.json", '["old"]')

    def run(self, place):
        write_text(place / "talk.json", json.dumps(["new", "x" * 20_000]))

    def look(self, file):
        return str(json.loads(file.read_text())[0])


class Streams(Job):
    """The checkpoint of a training, which a later run continues with."""

    name, result = "streams", "streamed"
    share, seconds = 1, 25.0
    replaces = False

    def prepare(self, place, old):
        (place / "corpus").write_text(CORPUS * 4)

    def run(self, place):
        options = ("--steps", "3", "--batch-size", "1", "--sequence-length", "32")
        options += ("--layers", "1", "--gamma", "2", "--lora-rank", "2")
        command = ("train", "stream", self.checkpoint, "--data", place / "corpus")
        _verb(*command, *options, "-o", place / "streamed")

    def look(self, file):
        from safetensors.numpy import load_file

        if (file / "streams.json").exists() and not (file / "training.pt").exists():
            assert json.loads((file / "streams.json").read_text())
            assert load_file(file / "streams.safetensors")
            return NEW
        with suppress(SystemExit):  # continues where it was
            self.run(file.parent)
        assert not (file / "training.pt").exists()
        return NEW


JOBS: tuple[type[Job], ...] = (
    *(WriteBundle, Export, Recipes, Table, Tune, Store, Learn, SavedPrefix, Talk),
    Streams,
)


@contextmanager
def _model(bundle: Path, strict: bool = False, **options: Any) -> Iterator[Any]:
    """A loaded model; damage is said in warnings, which are errors if `strict`."""
    import jetdraft

    with warnings.catch_warnings():
        if strict:
            warnings.simplefilter("error")
        with jetdraft.load(bundle, threads=1, **options) as model:
            yield model


def _generate(model: Any, **options: Any) -> None:
    model.generate(token_ids=PROMPT, max_new_tokens=4, **options)


def _verb(*words: object) -> None:
    from jetdraft.cli import main

    main([str(word) for word in words], standalone_mode=True)
