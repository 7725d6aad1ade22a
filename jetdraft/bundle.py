"""The bundle: one folder that holds everything a runtime needs, checked on opening.

    bundle.json       what is in it, with a sha256 per file
    target.onnx       step graph of the target, weights in target.onnx.data
    target-tree.onnx  the same for branching drafts, over the same weights
    target-compaction.onnx   moves an accepted branch together in the KV buffers
    drafter.onnx, drafter-tree.onnx, ...   likewise, where there is a drafter
    target-lower.onnx, target-upper.onnx, ...   the target in halves, and
    streams.npz       what makes a task of the base, where it has streams
    similarity.npy    the target's embeddings, small: which requests are alike
    tokenizer.json    where the checkpoint has one
    chat_template.jinja

A bundle appears whole or not at all: `writing` fills a hidden folder beside the
output and swaps it in with one rename.

Usage:

    bundle = Bundle.open("bundle")
    bundle.graphs["target"].contract.capacity
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy.typing as npt

from jetdraft.contract import SplitContract, StepContract
from jetdraft.errors import BundleError, OutputError, PairError
from jetdraft.files import read_arrays

SCHEMA_VERSION = 3
CONTRIB, STANDARD, SCATTERED = FLAVOURS = "contrib", "standard", "standard-scatternd"
"""Graphs with onnxruntime's own operators; those of ai.onnx alone; and these without
TensorScatter, in case TensorRT does not import that."""
MANIFEST = "bundle.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
STREAMS = "streams.npz"
SIMILARITY = "similarity.npy"
TARGET = "target"
DRAFTER = "drafter"


@dataclass(frozen=True)
class Halves:
    """The graphs of a model with streams below and above where they enter."""

    lower: str
    upper: str
    lower_compaction: str
    upper_compaction: str
    hidden_size: int

    @property
    def files(self) -> list[str]:
        """All graph files."""
        return [self.lower, self.upper, self.lower_compaction, self.upper_compaction]


@dataclass(frozen=True)
class GraphEntry:
    """One model: its step graph, contract, quantization and where it came from.

    `tree_file` and `compaction_file` are its graphs for branching drafts, None where
    its attention does not allow them. `streams` says how its streams were made and
    `halves` where it is cut for them, None where it has none.
    """

    file: str
    contract: StepContract
    quantization: dict[str, Any]
    source: str
    parameters: int
    tree_file: str | None = None
    compaction_file: str | None = None
    streams: dict[str, Any] | None = None
    halves: Halves | None = None

    @property
    def files(self) -> list[str]:
        """All graph files."""
        named = (self.file, self.tree_file, self.compaction_file)
        halves = self.halves.files if self.halves else []
        return [*(file for file in named if file is not None), *halves]

    @property
    def split_contract(self) -> SplitContract:
        """The contract of the halves; only where there are some."""
        assert self.halves is not None
        assert self.streams is not None
        layers = int(self.streams["layers"])
        return self.tree_contract.split(layers, self.halves.hidden_size)

    @property
    def tree_contract(self) -> StepContract:
        """The contract of `tree_file`."""
        return replace(self.contract, tree=True)

    @property
    def widest_contract(self) -> StepContract:
        """The contract of the graph that runs whatever can be run."""
        return self.contract if self.tree_file is None else self.tree_contract

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        halves = asdict(self.halves) if self.halves else None
        return {
            **self.__dict__,
            "contract": self.contract.to_json(),
            "halves": halves,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> GraphEntry:
        """Read `to_json`'s object."""
        contract = StepContract.from_json(fields["contract"])
        halves = Halves(**fields["halves"]) if fields["halves"] else None
        return cls(**{**fields, "contract": contract, "halves": halves})


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: `path` and what its manifest says.

    `files` maps each file name to its bytes and sha256, `tools` the exporting tools
    to their versions; `flavour` is one of `FLAVOURS`, and `drafter_provider` is None
    where the drafter runs beside the target.
    """

    path: Path
    graphs: dict[str, GraphEntry]
    methods: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    provider: str
    tools: dict[str, str]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    flavour: str = CONTRIB
    drafter_provider: str | None = None

    @property
    def target(self) -> GraphEntry:
        """The target's graph."""
        return self.graphs[TARGET]

    @property
    def drafter(self) -> GraphEntry | None:
        """The drafter's graph, if the bundle has one."""
        return self.graphs.get(DRAFTER)

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer file, if the checkpoint had one."""
        return self.path / TOKENIZER if TOKENIZER in self.files else None

    @property
    def chat_template(self) -> Path | None:
        """The chat template, if the checkpoint had one."""
        return self.path / CHAT_TEMPLATE if CHAT_TEMPLATE in self.files else None

    @property
    def similarity(self) -> Path | None:
        """What tells similar requests; bundles of jetdraft 0.1 may have none."""
        return self.path / SIMILARITY if SIMILARITY in self.files else None

    @property
    def tokenizer_sha256(self) -> str:
        """What ids mean: the tokenizer's hash, or without one the vocabulary's size."""
        if self.tokenizer is None:
            return f"{self.target.contract.vocab_size} ids"
        return str(self.files[TOKENIZER]["sha256"])

    @property
    def sha256(self) -> str:
        """One hash over all files' hashes."""
        listing = json.dumps(self.files, sort_keys=True)
        return hashlib.sha256(listing.encode()).hexdigest()

    @classmethod
    def open(cls, path: str | Path) -> Bundle:
        """Read and check a bundle; raise `BundleError` with what is wrong."""
        folder = Path(path)
        bundle = cls._parse(folder, _read_manifest(folder))
        for name, expected in bundle.files.items():
            _check_file(folder / name, expected)
        bundle._check_pair()
        return bundle

    @classmethod
    def _parse(cls, folder: Path, manifest: dict[str, Any]) -> Bundle:
        try:
            graphs = manifest["graphs"].items()
            bundle = cls(
                path=folder,
                graphs={name: GraphEntry.from_json(entry) for name, entry in graphs},
                methods=tuple(manifest["methods"]),
                eos_token_ids=tuple(manifest["eos_token_ids"]),
                provider=manifest["provider"],
                tools=manifest["tools"],
                files=manifest["files"],
                flavour=manifest.get("flavour", CONTRIB),
                drafter_provider=manifest.get("drafter_provider"),
            )
            bundle._check_types()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BundleError(
                f"{folder / MANIFEST} is malformed ({error}); export the bundle again"
            ) from error
        return bundle

    def _check_types(self) -> None:
        """Raise `ValueError` or what a wrong type leads to."""
        names = [self.provider, self.drafter_provider or "", *self.methods]
        if self.flavour not in FLAVOURS:
            raise ValueError(f"unknown flavour {self.flavour!r}")
        listed = {file for entry in self.graphs.values() for file in entry.files}
        for name, file in self.files.items():
            if Path(name).name != name:
                raise ValueError(f"{name!r} is not a plain file name")
            names.append(file["sha256"])
            int(file["bytes"])
        if not all(isinstance(name, str) for name in (*names, *self.tools.values())):
            raise ValueError("text is wanted")
        if not all(isinstance(token, int) for token in self.eos_token_ids):
            raise ValueError("end-of-text ids are integers")
        if TARGET not in self.graphs or not listed <= set(self.files):
            raise ValueError("a graph or its file is not listed")

    def _check_pair(self) -> None:
        if self.drafter is not None:
            check_pair(self.target.contract, self.drafter.contract)

    def to_json(self) -> dict[str, Any]:
        """The manifest."""
        return {
            "schema_version": SCHEMA_VERSION,
            "graphs": {name: graph.to_json() for name, graph in self.graphs.items()},
            "methods": list(self.methods),
            "eos_token_ids": list(self.eos_token_ids),
            "provider": self.provider,
            "flavour": self.flavour,
            "drafter_provider": self.drafter_provider,
            "tools": self.tools,
            "files": self.files,
        }

    def save(self) -> None:
        """Hash the files in `path` and write the manifest, last of all."""
        for file in sorted(self.path.iterdir()):
            self.files[file.name] = {
                "bytes": file.stat().st_size,
                "sha256": _sha256(file),
            }
        text = json.dumps(self.to_json(), indent=2) + "\n"
        (self.path / MANIFEST).write_text(text, encoding="utf-8")


def check_pair(target: StepContract, drafter: StepContract) -> None:
    """Raise `PairError` unless the two share vocabulary and capacity."""
    if target.vocab_size != drafter.vocab_size:
        raise PairError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the target's "
            f"{target.vocab_size}; choose a drafter trained with the same tokenizer"
        )
    if target.capacity != drafter.capacity:
        raise PairError(
            f"the drafter's capacity is {drafter.capacity}, the target's "
            f"{target.capacity}; export both together"
        )


def read_streams(file: Path, bundle: Bundle) -> dict[str, npt.NDArray[Any]]:
    """The weights of a `streams.npz`; raise `BundleError` if they do not fit."""
    weights = _read_arrays(file)
    base = str(weights.pop("base", ""))
    streams = bundle.target.streams
    if streams is None or base != streams["base"]:
        raise BundleError(
            f"the streams in {file} were trained for another base, in another mode or "
            "exported at another adapter scale; give those of this bundle's"
        )
    own = _read_arrays(bundle.path / STREAMS)
    del own["base"]
    for name in sorted(own.keys() | weights.keys()):
        one, other = (
            (a[name].shape, a[name].dtype) if name in a else None
            for a in (own, weights)
        )
        if one != other:
            raise BundleError(
                f"{name} in {file} does not fit the bundle's; train with the same "
                "gamma, layers and ranks"
            )
    return weights


def _read_arrays(file: Path) -> dict[str, npt.NDArray[Any]]:
    refusal = BundleError(
        f"cannot read streams from {file}; give a streams.npz that jetdraft export "
        "wrote"
    )
    return read_arrays(file, refusal)


def check_output(output: Path) -> None:
    """Raise `OutputError` unless `output` is free or a bundle to replace."""
    if not output.exists():
        return
    if not output.is_dir() or not (output / MANIFEST).is_file():
        raise OutputError(
            f"{output} exists and is not a bundle; choose another output folder"
        )


@contextmanager
def writing(output: str | Path) -> Iterator[Path]:
    """Give a hidden folder to fill; swap it in as `output` when the block succeeds.

    A failure or a kill at any point leaves what `output` was before.

        with writing("bundle") as folder:
            (folder / "file").write_text("...")
    """
    final = Path(output).resolve()
    check_output(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _sweep(final)
        staging = Path(mkdtemp(prefix=f".{final.name}.partial-", dir=final.parent))
    except OSError as error:
        raise OutputError(
            f"cannot write beside {final} ({error.strerror}); choose another folder"
        ) from error
    try:
        with _locked(staging):
            staging.chmod(0o777 & ~_umask())
            yield staging
            _flush(staging)
            _swap_in(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a lock that ends with this process; True if nobody else held it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        os.close(handle)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sweep(final: Path) -> None:
    """Undo or remove what killed exports to the same folder left behind."""
    aside = _aside(final)
    if aside.exists() and not final.exists():
        aside.rename(final)
    shutil.rmtree(aside, ignore_errors=True)
    for left in final.parent.glob(f".{final.name}.partial-*"):
        with _locked(left) as dead:
            if dead:
                shutil.rmtree(left, ignore_errors=True)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def _flush(folder: Path) -> None:
    """Have the data on disk before the rename is."""
    for file in folder.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _swap_in(staging: Path, final: Path) -> None:
    """Rename into place; an earlier bundle moves to `staging`, to be removed."""
    if not final.exists():
        staging.rename(final)
    elif not _exchange(staging, final):
        # Only file systems without an atomic exchange come here. After a kill between
        # the two renames the next export to this place moves the old bundle back.
        aside = _aside(final)
        final.rename(aside)
        staging.rename(final)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one atomic step (Linux); False where that is not possible."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    at_cwd, exchange = -100, 2
    paths = os.fsencode(one), os.fsencode(other)
    return bool(rename(at_cwd, paths[0], at_cwd, paths[1], exchange) == 0)


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise BundleError(f"no bundle at {folder}; make one with jetdraft export")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["schema_version"]
    except FileNotFoundError as error:
        raise BundleError(
            f"{folder} has no {MANIFEST}; make a bundle with jetdraft export"
        ) from error
    except OSError as error:
        raise BundleError(
            f"cannot read {folder / MANIFEST} ({error.strerror}); check its permissions"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(
            f"{folder / MANIFEST} is damaged; export the bundle again"
        ) from error
    if version != SCHEMA_VERSION:
        advice = (
            "update jetdraft"
            if isinstance(version, int) and version > SCHEMA_VERSION
            else "export the bundle again"
        )
        raise BundleError(
            f"{folder} has bundle schema {version}, this jetdraft reads "
            f"{SCHEMA_VERSION}; {advice}"
        )
    return dict(manifest)


def _check_file(file: Path, expected: dict[str, Any]) -> None:
    if not file.is_file():
        raise BundleError(f"{file} is missing; export the bundle again")
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise BundleError(
            f"{file} has {size} bytes instead of {expected['bytes']}; "
            "export or copy the bundle again"
        )
    if _sha256(file) != expected["sha256"]:
        raise BundleError(
            f"{file} was altered (its sha256 differs); export or copy the bundle again"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
