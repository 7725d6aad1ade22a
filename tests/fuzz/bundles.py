"""Damaged files of all kinds: a clear error or the right text, and no hang."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

from click.testing import CliRunner

import jetdraft
from jetdraft import JetdraftError, Result
from jetdraft.bundle import STREAMS, Bundle
from jetdraft.cli import main
from jetdraft.learning.lessons import (
    ARRAYS,
    CHOICE_FILE,
    LESSONS_FILE,
    Choice,
    drafter_sha256,
)
from jetdraft.manifest import MANIFEST, sha256_of
from jetdraft.testing import toy_bundle
from tests.fuzz import Fault, Subject, damages
from tests.fuzz.damages import damaged_json, damaged_npz, difference, poison, write_json
from tests.fuzz.requests import table_of_texts
from tests.toy_drafter import choose, put_on_trial, random_arrays
from tests.toy_graphs import METHODS, streamed_bundle, toy_block, toy_eagle

PROMPT = [5, 8, 9, 40, 41, 5, 8, 9, 40]
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": False}
TEMPLATES = (
    "{{ 1 // 0 }}",
    "{{ 2.0 ** 5000 }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].content | tojson }}",
    "{{ raise_exception('no') }}",
    "{% if %}",
    "{{ messages[7].content.x }}",
    "{{ '\ud800' }}",
    "{{ 'a' * 300000000 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
)


@dataclass(frozen=True)
class Whole:
    path: Path
    right: Result
    methods: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> "Whole":
        """Load a bundle; measurements stay in it, so that no case needs its own."""
        with jetdraft.load(path, threads=1) as model:
            right = model.generate(token_ids=PROMPT, method="none", **OPTIONS)
            model.generate(token_ids=PROMPT, **OPTIONS)
            return cls(path, right, (*model.methods, "auto"))


class Bundles(Subject):
    name = "bundles"
    things = "mutations"
    seconds = 30.0

    def __init__(self, folder: Path, light: bool = False) -> None:
        super().__init__(folder, light)
        self.intact = toy_bundle(folder / "intact")
        self.place = folder / "case"
        self.toy = Whole.of(self.intact)
        self.model = jetdraft.load(self.intact, threads=1)
        others = [toy_eagle(folder / "eagle")]
        others += [toy_block(folder / method, method) for method in METHODS]
        if not light:
            others.append(streamed_bundle(folder / "streamed"))
        self.wholes = [self.toy] * 2 + [Whole.of(other) for other in others]
        self._make_files()

    def _make_files(self) -> None:
        self.prefix = self.folder / "prefix.npz"
        self.model.save_prefix(self.prefix, PROMPT)
        self.table = table_of_texts(self.folder, self.model)
        self.store = self.folder / "store.sqlite"
        self.learned = self.folder / "learned"
        with jetdraft.load(
            self.intact, threads=1, store=self.store, learn=self.learned
        ) as model:
            model.generate(token_ids=PROMPT, **OPTIONS)
            model.generate(token_ids=[*PROMPT, 7], **OPTIONS)
            model.generate(token_ids=PROMPT, method="draft", num_draft_tokens=4)

    def run(self, draw: Random) -> str:
        shutil.rmtree(self.place, ignore_errors=True)
        outside = self.place / "outside"
        outside.mkdir(parents=True)
        (outside / "secret").write_bytes(b"secret" * 100)
        before = _state(outside)
        kinds = (
            *(self._files, self._files, self._manifest, self._manifest),
            *(self._profiles, self._prefix, self._table, self._store, self._template),
            *(self._learned, self._streams),
        )
        kind = draw.choice(kinds)
        self.damage = kind.__name__.strip("_")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = kind(draw)
        except BaseException as error:
            error.add_note(f"damaged: {self.damage}")
            raise
        if _state(outside) != before or {*os.listdir(self.place)} - EXPECTED:
            raise Fault("something was written outside the folder")
        if Path(damages.Explodes.MARK).exists():
            os.rmdir(damages.Explodes.MARK)
            raise Fault("a pickle was read")
        return outcome

    def _copy(self, whole: Whole) -> Path:
        self.damage += f" of {whole.path.name}"
        return Path(shutil.copytree(whole.path, self.place / "bundle"))

    def _files(self, draw: Random) -> str:
        whole = draw.choice(self.wholes)
        bundle = self._copy(whole)
        kind = draw.choice(tuple(damages.DAMAGES))
        damages.DAMAGES[kind](draw, bundle)
        hashed = draw.random() < 0.5
        self.damage += f", {kind}" + ", with new hashes" * hashed
        if hashed:
            damages.hash_again(bundle)
        return self._use(draw, bundle, whole, may_differ=hashed)

    def _manifest(self, draw: Random) -> str:
        whole = draw.choice(self.wholes)
        bundle = self._copy(whole)
        manifest = json.loads((bundle / MANIFEST).read_text())
        text = damaged_json(draw, manifest, damages.manifest_routes(manifest))
        write_json(bundle / MANIFEST, text)
        sealed = draw.random() < 0.5 and damages.seal_again(bundle)
        self.damage += f", sealed again: {sealed}: " + difference(manifest, text)
        return self._use(draw, bundle, whole, may_differ=sealed)

    def _profiles(self, draw: Random) -> str:
        whole = draw.choice(self.wholes)
        bundle = self._copy(whole)
        file = draw.choice(sorted((bundle / "profiles").glob("*.json")))
        measured = json.loads(file.read_text())
        if draw.random() < 0.3:
            file = file.with_name(file.name.replace(".json", "-tuning.json"))
            measured |= {"drafter_threads": 1}
        text = damaged_json(draw, measured, list(damages.routes(measured)))
        self.damage += f", {file.name}: {difference(measured, text)}"
        write_json(file, text)
        return self._use(draw, bundle, whole)

    def _template(self, draw: Random) -> str:
        bundle, file = self._copy(self.toy), "chat_template.jinja"
        text = draw.choice(TEMPLATES)
        self.damage += f" {text}"
        if draw.random() < 0.5:
            text = damages.damaged_bytes(draw, (bundle / file).read_bytes()).decode(
                "utf-8", "surrogateescape"
            )
        write_json(bundle / file, text)
        damages.hash_again(bundle)

        def use() -> object:
            with jetdraft.load(bundle, threads=1) as model:
                return model.chat([{"role": "user", "content": "Hello"}], **OPTIONS)

        return self._outcome(use, may_differ=True)

    def _prefix(self, draw: Random) -> str:
        file = self.place / "prefix.npz"
        file.write_bytes(damaged_npz(draw, self.prefix.read_bytes()))

        def use() -> object:
            self.model.load_prefix(file)
            return self.model.generate(token_ids=PROMPT, method="none", **OPTIONS)

        try:
            return self._outcome(use)
        finally:
            self.model.forget()

    def _table(self, draw: Random) -> str:
        file = self.place / "table.npz"
        file.write_bytes(damaged_npz(draw, self.table.read_bytes()))
        options = {**OPTIONS, "method": "trigram", "drafting": {"table": file}}
        return self._outcome(lambda: self.model.generate(token_ids=PROMPT, **options))

    def _streams(self, draw: Random) -> str:
        whole, file = draw.choice(self.wholes), self.place / "table.npz"
        own = whole.path / STREAMS
        if not own.exists():
            own = self.table
        file.write_bytes(damaged_npz(draw, own.read_bytes()))
        self.damage += f" of {whole.path.name}"
        method = draw.choice(whole.methods)
        return self._outcome(lambda: _written(whole.path, method, streams=file), whole)

    def _learned(self, draw: Random) -> str:
        folder = Path(shutil.copytree(self.learned, self.place / "learned"))
        name = put_on_trial(folder, self.intact, random_arrays(self.intact))
        kind = draw.choice(("arrays", "choice", "choice", "lessons", "rows", "linked"))
        self.damage += f", {kind}"
        if kind == "arrays":
            self._other_arrays(draw, folder, folder / name / ARRAYS)
        elif kind == "choice":
            chosen = json.loads((folder / CHOICE_FILE).read_text())
            if draw.random() < 0.5:
                chosen["before"] = None
            text = damaged_json(draw, chosen, list(damages.routes(chosen)))
            self.damage += f": {difference(chosen, text)}"
            write_json(folder / CHOICE_FILE, text)
        elif kind == "lessons":
            data = (folder / LESSONS_FILE).read_bytes()
            (folder / LESSONS_FILE).write_bytes(damages.damaged_bytes(draw, data))
        elif kind == "rows":
            columns = ("user", "kept", "tokens", "places", "ids", "logits")
            poison(draw, folder / LESSONS_FILE, "lessons", columns)
        else:
            choose(folder, Choice(name, None, drafter_sha256(Bundle.open(self.intact))))
            file = draw.choice((folder / name / ARRAYS, folder / CHOICE_FILE))
            damages.replace_by_odd(draw, file)

        methods = "draft", draw.choice(self.toy.methods)
        return self._outcome(lambda: _written(self.intact, *methods, learn=folder))

    def _other_arrays(self, draw: Random, folder: Path, file: Path) -> None:
        """Arrays under the hash that they have, so that they are read."""
        file.write_bytes(damaged_npz(draw, file.read_bytes()))
        name = sha256_of(file)
        if draw.random() < 0.8:
            file.parent.rename(folder / name)
        choose(folder, Choice(name, None, drafter_sha256(Bundle.open(self.intact))))

    def _store(self, draw: Random) -> str:
        file = self.place / "store.sqlite"
        file.write_bytes(self.store.read_bytes())
        kind = draw.choice(("bytes", "bytes", "rows", "other"))
        if kind == "bytes":
            file.write_bytes(damages.damaged_bytes(draw, file.read_bytes()))
        elif kind == "rows":
            columns = ("user", "used", "prompt", "response", "vector", "id")
            poison(draw, file, "entries", columns)
        else:
            return self._other_program(draw, file)
        if draw.random() < 0.3:
            verb = "list" if draw.random() < 0.7 else "clear"
            return self._command("store", verb, self.intact, file)
        method = draw.choice(("recall", "lookup", "auto"))
        return self._outcome(lambda: _written(self.intact, method, store=file))

    def _other_program(self, draw: Random, file: Path) -> str:
        data = draw.choice((bytes(72), b"\x89PNG", b"", b"text\n" * 30))
        file.write_bytes(data + bytes(draw.randrange(256) for _ in range(99)))
        before = file.read_bytes(), file.stat().st_mode

        outcome = self._outcome(lambda: _written(self.intact, "auto", store=file))
        if not file.exists() or (file.read_bytes(), file.stat().st_mode) != before:
            raise Fault("another program's file was changed as if it were a store")
        return outcome

    def _use(
        self, draw: Random, bundle: Path, whole: Whole, may_differ: bool = False
    ) -> str:
        if draw.random() < 0.15:
            generate = ("generate", "--raw", "--prompt", "a", "-n", "4", "-t", "1")
            verb, *words = draw.choice((generate, ("check", "--no-run"), ("plan",)))
            return self._command(verb, bundle, *words)
        method = draw.choice(whole.methods)
        return self._outcome(lambda: _written(bundle, method), whole, may_differ)

    def _outcome(
        self,
        use: Callable[[], Any],
        whole: Whole | None = None,
        may_differ: bool = False,
    ) -> str:
        """The right text or a clear error; with new hashes, another text too."""
        try:
            result = use()
        except JetdraftError as error:
            if not str(error).strip():
                raise Fault("an error says nothing") from error
            return "refused"
        wanted = (whole or self.toy).right
        compared = attrgetter("token_ids", "text", "finish_reason")
        if compared(result) == compared(wanted):
            return "the right text"
        if not may_differ:
            ids = f"{result.token_ids} instead of {wanted.token_ids}"
            raise Fault(f"another text: {ids}")
        return "hashed again, another text"

    def _command(self, *words: object) -> str:
        result = CliRunner().invoke(main, [str(word) for word in words])
        self.facts["on the command line"] += 1
        if not isinstance(result.exception, (SystemExit, type(None))):
            raise result.exception
        lines = result.stderr.splitlines()
        lines = [line for line in lines if line and not line.startswith("warning: ")]
        if result.exit_code == 2 and [line[:7] for line in lines] != ["error: "]:
            raise Fault(f"{words}: not one line of error: {result.stderr}")
        if result.exit_code not in (0, 2):
            raise Fault(f"{words}: exit code {result.exit_code}: {result.stderr}")
        return "a verb refused" if result.exit_code else "a verb ran"

    def close(self) -> None:
        self.model.close()


EXPECTED = {"bundle", "outside", "prefix.npz", "table.npz", "store.sqlite"}
EXPECTED |= {"store.sqlite.damaged", "store.sqlite-journal", "learned"}


def _written(bundle: Path, *methods: str, **options: Any) -> Result:
    with jetdraft.load(bundle, threads=1, **options) as model:
        for method in methods:
            result = model.generate(token_ids=PROMPT, method=method, **OPTIONS)
    return result


def _state(folder: Path) -> list[tuple[str, bytes]]:
    return [(file.name, file.read_bytes()) for file in sorted(folder.iterdir())]
