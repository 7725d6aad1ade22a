"""Damaged bundles, profiles, stores and other files: a clear error or the right text.

Never a traceback, never a hang, never a write outside the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnx
from click.testing import CliRunner

import jetdraft
from jetdraft.bundle import TOKENIZER, Bundle
from jetdraft.cli import main
from jetdraft.errors import JetdraftError
from jetdraft.manifest import MANIFEST, SEAL, seal_of, sha256_of
from jetdraft.testing import toy_bundle
from jetdraft.train.table import count
from tests.fuzz.mutations import (
    Explodes,
    Route,
    damaged_bytes,
    damaged_json,
    damaged_npz,
    manifest_routes,
    routes,
    write_json,
)
from tests.fuzz.requests import TEXTS
from tests.fuzz.subject import Fault, Subject

PROMPT = [5, 8, 9, 40, 41, 5, 8, 9, 40]
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": False}
METHODS = ("none", "lookup", "draft", "auto", "trigram", "cascade")
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
Damage = Callable[[Random, Path], bool]


class Bundles(Subject):
    """Damages one thing, then uses it, in this process or on the command line."""

    name = "bundles"
    things = "mutations"
    seconds = 30.0

    def __init__(self, folder: Path, light: bool = False) -> None:
        super().__init__(folder, light)
        self.intact = toy_bundle(folder / "intact")
        self.place = folder / "case"
        # Keeps the measurements, so that each case needs none of its own.
        self.model = jetdraft.load(self.intact, threads=1)
        self.right = self.model.generate(token_ids=PROMPT, method="none", **OPTIONS)
        self.chat = self.model.chat([{"role": "user", "content": "Hello"}], **OPTIONS)
        self._make_files()

    def _make_files(self) -> None:
        """A prefix, a table, a store and a conversation that are whole."""
        self.prefix = self.folder / "prefix.npz"
        self.model.save_prefix(self.prefix, PROMPT)
        corpus = self.folder / "corpus.txt"
        corpus.write_text("\n".join([*TEXTS] * 3), encoding="utf-8")
        self.table = self.folder / "table.npz"
        count([corpus], self.model.bundle, self.table)
        self.store = self.folder / "store.sqlite"
        with jetdraft.load(self.intact, threads=1, store=self.store) as model:
            model.generate(token_ids=PROMPT, **OPTIONS)
            model.generate(token_ids=[*PROMPT, 7], **OPTIONS)

    def run(self, draw: Random) -> str:
        """Damage a copy and use it; gives what came of it."""
        shutil.rmtree(self.place, ignore_errors=True)
        outside = self.place / "outside"
        outside.mkdir(parents=True)
        (outside / "secret").write_bytes(b"secret" * 100)
        before = _state(outside)
        kinds = (
            *(self._files, self._files, self._manifest, self._manifest),
            *(self._profiles, self._prefix, self._table, self._store, self._template),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = self._told(draw.choice(kinds), draw)
        if _state(outside) != before or {*os.listdir(self.place)} - EXPECTED:
            raise Fault("something was written outside the folder")
        if Path(Explodes.MARK).exists():
            os.rmdir(Explodes.MARK)
            raise Fault("a pickle was read")
        return outcome

    def _told(self, kind: Callable[[Random], str], draw: Random) -> str:
        """The outcome of a case; an error says what was damaged."""
        self.damage = kind.__name__.strip("_")
        try:
            return kind(draw)
        except BaseException as error:
            error.add_note(f"damaged: {self.damage}")
            raise

    def _copy(self) -> Path:
        return Path(shutil.copytree(self.intact, self.place / "bundle"))

    def _files(self, draw: Random) -> str:
        """Damage a file that the manifest lists, with or without its hash."""
        bundle = self._copy()
        kind = draw.choice(tuple(DAMAGES))
        DAMAGES[kind](draw, bundle)
        hashed = draw.random() < 0.5
        self.damage += f", {kind}" + ", with new hashes" * hashed
        if hashed:
            _hash_again(bundle)
        return self._use(draw, bundle, may_differ=hashed)

    def _manifest(self, draw: Random) -> str:
        bundle = self._copy()
        manifest = json.loads((bundle / MANIFEST).read_text())
        text = damaged_json(draw, manifest, manifest_routes(manifest))
        write_json(bundle / MANIFEST, text)
        sealed = draw.random() < 0.5 and _seal_again(bundle)
        self.damage += f", sealed again: {sealed}: " + _difference(manifest, text)
        return self._use(draw, bundle, may_differ=sealed)

    def _profiles(self, draw: Random) -> str:
        """Damage what was measured; it has no hash, and must not matter."""
        bundle = self._copy()
        file = draw.choice(sorted((bundle / "profiles").glob("*.json")))
        whole = json.loads(file.read_text())
        if draw.random() < 0.3:
            file = file.with_name(file.name.replace(".json", "-tuning.json"))
            whole |= {"drafter_threads": 1}
        text = damaged_json(draw, whole, list(routes(whole)))
        self.damage += f", {file.name}: {_difference(whole, text)}"
        write_json(file, text)
        return self._use(draw, bundle)

    def _template(self, draw: Random) -> str:
        bundle, file = self._copy(), "chat_template.jinja"
        text = draw.choice(TEMPLATES)
        self.damage += f" {text}"
        if draw.random() < 0.5:
            text = damaged_bytes(draw, (bundle / file).read_bytes()).decode(
                "utf-8", "surrogateescape"
            )
        write_json(bundle / file, text)
        _hash_again(bundle)

        def use() -> object:
            with jetdraft.load(bundle, threads=1) as model:
                return model.chat([{"role": "user", "content": "Hello"}], **OPTIONS)

        return self._outcome(use, may_differ=True)

    def _prefix(self, draw: Random) -> str:
        """Load a damaged prefix into a model that goes on with it."""
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
        if draw.random() < 0.2:  # the toy bundle has no streams to replace

            def load() -> object:
                return jetdraft.load(self.intact, threads=1, streams=file)

            return self._outcome(load)
        return self._outcome(lambda: self.model.generate(token_ids=PROMPT, **options))

    def _store(self, draw: Random) -> str:
        """Damage a store: its bytes, its rows, or its owner."""
        file = self.place / "store.sqlite"
        file.write_bytes(self.store.read_bytes())
        kind = draw.choice(("bytes", "bytes", "rows", "other"))
        if kind == "bytes":
            file.write_bytes(damaged_bytes(draw, file.read_bytes()))
        elif kind == "rows":
            _poison(draw, file)
        else:
            return self._other_program(draw, file)
        if draw.random() < 0.3:
            verb = "list" if draw.random() < 0.7 else "clear"
            return self._command("store", verb, self.intact, file)

        def use() -> object:
            with jetdraft.load(self.intact, threads=1, store=file) as model:
                method = draw.choice(("recall", "lookup", "auto"))
                return model.generate(token_ids=PROMPT, method=method, **OPTIONS)

        return self._outcome(use)

    def _other_program(self, draw: Random, file: Path) -> str:
        """Another program's file must stay as it is."""
        data = draw.choice((bytes(72), b"\x89PNG", b"", b"text\n" * 30))
        file.write_bytes(data + bytes(draw.randrange(256) for _ in range(99)))
        before = file.read_bytes(), file.stat().st_mode

        def use() -> object:
            with jetdraft.load(self.intact, threads=1, store=file) as model:
                return model.generate(token_ids=PROMPT, **OPTIONS)

        outcome = self._outcome(use)
        if not file.exists() or (file.read_bytes(), file.stat().st_mode) != before:
            raise Fault("another program's file was changed as if it were a store")
        return outcome

    def _use(self, draw: Random, bundle: Path, may_differ: bool = False) -> str:
        """Load and generate, or run a verb."""
        if draw.random() < 0.15:
            verb = draw.choice(
                (
                    ("generate", "--raw", "--prompt", "a", "-n", "4", "-t", "1"),
                    ("check", "--no-run"),
                    ("plan",),
                )
            )
            return self._command(verb[0], bundle, *verb[1:])
        method = draw.choice(METHODS)

        def use() -> object:
            with jetdraft.load(bundle, threads=1) as model:
                return model.generate(token_ids=PROMPT, method=method, **OPTIONS)

        return self._outcome(use, may_differ)

    def _outcome(self, use: Callable[[], Any], may_differ: bool = False) -> str:
        """The right text or a clear error; with new hashes, another text too."""
        try:
            result = use()
        except JetdraftError as error:
            if not str(error).strip():
                raise Fault("an error says nothing") from error
            return "refused"
        right = (self.right.token_ids, self.right.text, self.right.finish_reason)
        if (result.token_ids, result.text, result.finish_reason) == right:
            return "the right text"
        if not may_differ:
            raise Fault(f"another text: {result.token_ids} instead of {right[0]}")
        return "hashed again, another text"

    def _command(self, *words: object) -> str:
        result = CliRunner().invoke(main, [str(word) for word in words])
        self.facts["on the command line"] += 1
        if not isinstance(result.exception, (SystemExit, type(None))):
            raise result.exception
        lines = [
            line
            for line in result.stderr.splitlines()
            if line and not line.startswith("warning: ")
        ]
        if result.exit_code == 2 and [line[:7] for line in lines] != ["error: "]:
            raise Fault(f"{words}: not one line of error: {result.stderr}")
        if result.exit_code not in (0, 2):
            raise Fault(f"{words}: exit code {result.exit_code}: {result.stderr}")
        return "a verb refused" if result.exit_code else "a verb ran"

    def close(self) -> None:
        """Close the model."""
        self.model.close()


EXPECTED = {"bundle", "outside", "prefix.npz", "table.npz", "store.sqlite"}
EXPECTED |= {"store.sqlite.damaged", "store.sqlite-journal"}


def _difference(before: Any, text: str) -> str:
    """The places where a JSON text differs from a value."""
    try:
        after = json.loads(text)
    except (ValueError, RecursionError):
        return "no JSON"
    places = {*routes(before), *routes(after)}
    return "; ".join(
        f"{'/'.join(map(str, place))} {old!r:.40} -> {new!r:.40}"
        for place in sorted(places, key=str)
        if (old := _at(before, place)) != (new := _at(after, place))
    )


def _at(value: Any, place: Route) -> Any:
    try:
        for key in place:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return "nothing"
    return value


def _state(folder: Path) -> list[tuple[str, bytes]]:
    return [(file.name, file.read_bytes()) for file in sorted(folder.iterdir())]


def _listed(bundle: Path) -> list[Path]:
    return [bundle / name for name in sorted(Bundle.open(bundle).files)]


def _hash_again(bundle: Path) -> None:
    """Let the manifest list what is there now."""
    manifest = json.loads((bundle / MANIFEST).read_text())
    for name, entry in manifest["files"].items():
        file = bundle / name
        if file.is_file():
            entry |= {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    _seal_again(bundle)


def _seal_again(bundle: Path) -> bool:
    """Renew the manifest's hash of itself; False if that cannot be done."""
    try:
        manifest = json.loads((bundle / MANIFEST).read_bytes())
        manifest[SEAL] = seal_of(manifest)
        (bundle / MANIFEST).write_text(json.dumps(manifest))
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _bytes(draw: Random, bundle: Path) -> None:
    file = draw.choice(_listed(bundle))
    file.write_bytes(damaged_bytes(draw, file.read_bytes()))


def _swapped(draw: Random, bundle: Path) -> None:
    one, other = draw.sample(_listed(bundle), 2)
    one_bytes = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(one_bytes)


def _removed(draw: Random, bundle: Path) -> None:
    draw.choice(_listed(bundle)).unlink()


def _renamed(draw: Random, bundle: Path) -> None:
    """In the folder and in the manifest."""
    file = draw.choice(_listed(bundle))
    name = draw.choice(("other", "../outside/moved", "..", ".", "", "a/b", "x\0"))
    manifest = json.loads((bundle / MANIFEST).read_text())
    manifest["files"][name] = manifest["files"].pop(file.name)
    text = json.dumps(manifest)
    if draw.random() < 0.5:  # in the graphs too
        text = text.replace(f'"{file.name}"', json.dumps(name))
    (bundle / MANIFEST).write_text(text)


def _linked(draw: Random, bundle: Path) -> None:
    file = draw.choice(_listed(bundle))
    file.unlink()
    kind = draw.choice(("link", "loop", "folder", "fifo", "device"))
    if kind == "link":
        file.symlink_to("../outside/secret")
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "folder":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")


def _external(draw: Random, bundle: Path) -> None:
    """Let a graph read its weights elsewhere."""
    file = draw.choice([file for file in _listed(bundle) if file.suffix == ".onnx"])
    graph = onnx.load(file, load_external_data=False)
    place = draw.choice(("../outside/secret", "/etc/hostname", "", "/dev/zero", ".."))
    for weight in graph.graph.initializer:
        for pair in weight.external_data:
            if pair.key == "location":
                pair.value = place
            elif draw.random() < 0.2:
                pair.value = draw.choice(("-1", "0", str(2**62), "x"))
    onnx.save(graph, file)


def _tokenizer(draw: Random, bundle: Path) -> None:
    whole = json.loads((bundle / TOKENIZER).read_text())
    write_json(bundle / TOKENIZER, damaged_json(draw, whole, list(routes(whole))))


DAMAGES: dict[str, Callable[[Random, Path], None]] = {
    "bytes": _bytes,
    "swapped": _swapped,
    "removed": _removed,
    "renamed": _renamed,
    "linked": _linked,
    "external": _external,
    "tokenizer": _tokenizer,
}


def _poison(draw: Random, file: Path) -> None:
    """Rows that no jetdraft wrote."""
    column = draw.choice(("user", "used", "prompt", "response", "vector", "id"))
    value = draw.choice(
        ("text", 1e300, float("inf"), -1, b"", b"\1", b"\xff" * 4000, bytes(64), "\x1b")
    )
    database = sqlite3.connect(file)
    try:
        with database:
            database.execute(f"update entries set {column} = ?", (value,))
    except sqlite3.Error:
        pass  # not every column takes every value
    finally:
        database.close()
