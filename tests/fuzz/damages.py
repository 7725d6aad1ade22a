"""Damage to a bundle's files, with or without the hashes that go with it."""

import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import onnx

from jetdraft.bundle import TOKENIZER, Bundle
from jetdraft.manifest import MANIFEST, SEAL, seal_hash, sha256_of
from tests.fuzz.mutations import Route, damaged_bytes, damaged_json, routes, write_json


def difference(before: Any, text: str) -> str:
    try:
        after = json.loads(text)
    except (ValueError, RecursionError):
        return "no JSON"
    return "; ".join(
        f"{'/'.join(map(str, place))} {old!r:.40} -> {new!r:.40}"
        for place in sorted({*routes(before), *routes(after)}, key=str)
        if (old := _at(before, place)) != (new := _at(after, place))
    )


def _at(value: Any, place: Route) -> Any:
    try:
        for key in place:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return "nothing"
    return value


def _listed(bundle: Path) -> list[Path]:
    return [bundle / name for name in sorted(Bundle.open(bundle).files)]


def hash_again(bundle: Path) -> None:
    """Let the manifest list what is there now."""
    manifest = json.loads((bundle / MANIFEST).read_text())
    for name, entry in manifest["files"].items():
        file = bundle / name
        if file.is_file():
            entry |= {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    seal_again(bundle)


def seal_again(bundle: Path) -> bool:
    """Renew the manifest's hash of itself; False if that cannot be done."""
    try:
        manifest = json.loads((bundle / MANIFEST).read_bytes())
        manifest[SEAL] = seal_hash(manifest)
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
    replace_by_odd(draw, draw.choice(_listed(bundle)))


def replace_by_odd(draw: Random, file: Path) -> None:
    """Put a link, a folder, a pipe or a device in a file's place."""
    file.unlink()
    links = ("../outside/secret", file.name, "/dev/zero")
    make = [lambda to=to: file.symlink_to(to) for to in links]
    draw.choice((*make, file.mkdir, lambda: os.mkfifo(file)))()


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
    "bytes": _bytes, "swapped": _swapped, "removed": _removed, "renamed": _renamed,
    "linked": _linked, "external": _external, "tokenizer": _tokenizer,
}  # fmt: skip


def poison(draw: Random, file: Path, table: str, columns: Sequence[str]) -> None:
    """Rows that no jetdraft wrote."""
    column = draw.choice(columns)
    value = draw.choice(
        ("text", 1e300, float("inf"), -1, b"", b"\1", b"\xff" * 4000, bytes(64), "\x1b")
    )
    # Not every column takes every value.
    with closing(sqlite3.connect(file)) as database, suppress(sqlite3.Error), database:
        database.execute(f"update {table} set {column} = ?", (value,))
