import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any
from zipfile import ZipFile

import numpy as np

from jetdraft.bundle import TOKENIZER, Bundle
from jetdraft.contracts.step_contract import StepContract
from jetdraft.manifest import MANIFEST, SEAL, GraphEntry, Halves, seal_hash, sha256_of
from jetdraft.recipe import Recipe

# The keys and indices that lead to a value in JSON.
Route = tuple[str | int, ...]


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
    file.unlink()
    links = ("../outside/secret", file.name, "/dev/zero")
    make = [lambda to=to: file.symlink_to(to) for to in links]
    draw.choice((*make, file.mkdir, lambda: os.mkfifo(file)))()


def _external(draw: Random, bundle: Path) -> None:
    import onnx

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


DAMAGES: dict[str, Callable[[Random, Path], None]] = {"bytes": _bytes}
DAMAGES |= {"swapped": _swapped, "removed": _removed, "renamed": _renamed}
DAMAGES |= {"linked": _linked, "external": _external, "tokenizer": _tokenizer}


def poison(draw: Random, file: Path, table: str, columns: Sequence[str]) -> None:
    column = draw.choice(columns)
    value = draw.choice(
        ("text", 1e300, float("inf"), -1, b"", b"\1", b"\xff" * 4000, bytes(64), "\x1b")
    )
    with closing(sqlite3.connect(file)) as database, suppress(sqlite3.Error), database:
        database.execute(f"update {table} set {column} = ?", (value,))


# Becomes brackets that are nested too deeply to be written by Python.
DEEP = "@deep@"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**32, 2**63, 2**64, 10**400),
    *(0.5, -0.5, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "1", "float3a", "../outside/secret", "/etc/hostname", "\ud800", "\0"),
    *("a" * 10_000, "\x1b[2J", [], [[]], [None], [1] * 1000, ["a"], {}, {"": None}),
    DEEP,
)


def damaged_bytes(draw: Random, data: bytes) -> bytes:
    kind = draw.choice(("flip", "flip", "flip", "flips", "cut", "more", "zeros", "no"))
    changed, at = bytearray(data), draw.randrange(len(data) + 1)
    match kind:
        case "flip" if data:
            changed[at - 1] ^= 1 << draw.randrange(8)
        case "flips" if data:
            for _ in range(draw.randint(2, 50)):
                changed[draw.randrange(len(data))] = draw.randrange(256)
        case "cut":
            del changed[at:]
        case "more":
            changed += draw.randbytes(draw.randint(1, 99))
        case "zeros":
            length = min(draw.randint(1, 4096), len(data) - at)
            changed[at : at + length] = bytes(length)
        case _:
            return draw.choice((b"", b"\0" * 100, b"{}", b"PK\x03\x04"))
    return bytes(changed)


def routes(value: Any, before: Route = ()) -> Iterator[Route]:
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value[:20])
    for key, inner in pairs:
        yield (*before, key)
        yield from routes(inner, (*before, key))


def manifest_routes(manifest: dict[str, Any]) -> list[Route]:
    """The routes to all fields of a manifest's dataclasses, also to missing fields."""
    known = set(routes(manifest))
    for name in manifest["graphs"]:
        graph: Route = ("graphs", name)
        for where, kind in (
            (graph, GraphEntry),
            ((*graph, "contract"), StepContract),
            ((*graph, "halves"), Halves),
            ((*graph, "quantization"), Recipe),
        ):
            assert is_dataclass(kind)
            known |= {(*where, field.name) for field in fields(kind)}
    return sorted(known, key=str)


def damaged_json(draw: Random, value: Any, places: list[Route]) -> str:
    changed, kind = deepcopy(value), draw.choice(("set",) * 6 + ("drop", "add", "text"))
    route = draw.choice(places)
    parent = _parent(changed, route)
    if kind == "drop" and isinstance(parent, dict):
        parent.pop(route[-1], None)
    elif kind == "add" and isinstance(parent, dict):
        parent[draw.choice(("", "more", "__class__", "\ud800"))] = draw.choice(VALUES)
    elif kind == "text":
        text = json.dumps(changed)
        return damaged_bytes(draw, text.encode()).decode("utf-8", "surrogateescape")
    elif parent is not None:
        parent[route[-1]] = draw.choice(VALUES)
    depth = draw.choice((90, 5_000, 200_000))
    text = json.dumps(changed, indent=draw.choice((None, 2)))
    return text.replace(f'"{DEEP}"', "[" * depth + "]" * depth)


def _parent(value: Any, route: Route) -> Any:
    for key in route[:-1]:
        if isinstance(value, dict):
            if not isinstance(value.get(key), (dict, list)):
                value[key] = {}
        elif not isinstance(value, list) or not isinstance(key, int):
            return None
        value = value[key]
    inside = isinstance(value, list) and isinstance(route[-1], int)
    return value if inside or isinstance(value, dict) else None


def write_json(file: Path, text: str) -> None:
    file.write_bytes(text.encode("utf-8", "surrogatepass"))


def damaged_npz(draw: Random, data: bytes) -> bytes:
    if draw.random() < 0.4:
        return damaged_bytes(draw, data)
    if draw.random() < 0.15:
        return _marked_encrypted(data)
    with np.load(BytesIO(data), allow_pickle=False) as stored:
        arrays: dict[str, Any] = {name: stored[name] for name in stored.files}
    name = draw.choice(sorted(arrays))
    array = arrays[name]
    kind = draw.choice(("drop", "nan", "zeros", "type", "shape", "objects", "values"))
    flat, values = array.ravel(), None
    match kind, array.dtype.kind:
        case "drop", _:
            del arrays[name]
        case "nan", "f":
            values = np.nan, np.inf, 1e30
        case "zeros", "i" | "u" | "f":
            values = (0,)
        case "type", _:
            zeros = np.zeros(array.shape, complex)
            arrays[name] = draw.choice((array.astype(str), np.array("text"), zeros))
        case "shape", _:
            arrays[name] = draw.choice((array[None], flat[:1], flat[:0]))
        case "objects", _:
            arrays[name] = np.array([Explodes()], dtype=object)
        case _, "i" | "u" if array.size:
            limits = np.iinfo(array.dtype)
            values = limits.min, limits.max, 1
        case _:
            return _huge(data, name)
    if values is not None:
        arrays[name] = np.full_like(array, draw.choice(values))
    file = BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


class Explodes:
    """Its pickle makes a folder when it is read."""

    MARK = "/tmp/jetdraft-pickle-was-read"

    def __reduce__(self) -> Any:
        return os.mkdir, (self.MARK,)


def _marked_encrypted(data: bytes) -> bytes:
    changed = bytearray(data)
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = changed.find(mark)
        if at >= 0:
            changed[at + offset] |= 1
    return bytes(changed)


def _huge(data: bytes, name: str) -> bytes:
    header = BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 30, 64)}
    )
    output = BytesIO()
    with ZipFile(BytesIO(data)) as old, ZipFile(output, "w") as new:
        for entry in old.namelist():
            whole = header.getvalue() if entry == f"{name}.npy" else old.read(entry)
            new.writestr(entry, whole)
    return output.getvalue()
