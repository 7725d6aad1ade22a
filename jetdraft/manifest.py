"""The manifest of a bundle: its version, the hashes of files, and the graphs.

`writing` lets a bundle appear whole or not at all.
"""

import ctypes
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any, TypedDict

from jetdraft.contracts.step_contract import Selection, SplitContract, StepContract
from jetdraft.errors import BundleError, OutputError, as_error, printable, refusing
from jetdraft.files import check_writable, locked, replacing
from jetdraft.parsing import Count, Rule, Size, in_range, read_json_file
from jetdraft.recipe import Recipe

MANIFEST = "bundle.json"  # The file of a bundle with its manifest.
# A bundle's file of checked hashes, with the sizes, inodes and times of the files.
CHECKED_FILES = Path("profiles", "checked.json")
SCHEMA_VERSION = 6  # The version of manifests that this jetdraft reads and writes.
# The fields of a manifest with its schema, and with the hash of all others.
VERSION, SEAL = "schema_version", "sha256"


def seal_hash(manifest: dict[str, Any]) -> str:
    """Return the sha256 of a manifest's fields without `SEAL`, in hex digits."""
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    # Keys that are numbers are sorted as the text that they become in the file.
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest in a folder; raises `BundleError` if it cannot."""
    file = folder / MANIFEST
    missing = f"{folder} has no {MANIFEST}; make a bundle with jetdraft export"
    damaged = f"{file} is damaged; export or copy the bundle again"
    with (
        as_error(BundleError, OSError, f"cannot read {file}", "check its permissions"),
        refusing(BundleError(missing), FileNotFoundError),
        refusing(BundleError(damaged), ValueError, KeyError, TypeError),
    ):
        if not folder.is_dir():
            raise BundleError(f"no bundle at {folder}; make one with jetdraft export")
        manifest = dict(read_json_file(file))
        version = manifest[VERSION]
    if version != SCHEMA_VERSION:
        is_newer = isinstance(version, int) and version > SCHEMA_VERSION
        advice = "update jetdraft" if is_newer else "export the bundle again"
        fact = f"{folder} has bundle schema {printable(version, 20)}, this jetdraft "
        fact += f"reads {SCHEMA_VERSION}; {advice}"
        raise BundleError(fact)
    if manifest.get(SEAL) != seal_hash(manifest):
        fact = f"{file} was altered (its sha256 differs)"
        raise BundleError(f"{fact}; export or copy the bundle again")
    return manifest


def check_files(folder: Path, files: dict[str, Any], rehash: bool = False) -> None:
    """Raise `BundleError` unless all files have the bytes and sha256 in `files`.

    A file with the size, inode and times in `CHECKED_FILES` is hashed only to `rehash`.
    """
    stamps, before, now = folder / CHECKED_FILES, dict[str, Any](), {}
    with suppress(OSError, ValueError, TypeError):
        before = {} if rehash else dict(read_json_file(stamps))
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise BundleError(f"{file} is missing; export or copy the bundle again")
        status = file.stat()
        if status.st_size != expected["bytes"]:
            fact = f"{file} has {status.st_size} bytes instead of {expected['bytes']}"
            raise BundleError(f"{fact}; export or copy the bundle again")
        times = [status.st_mtime_ns, status.st_ctime_ns]
        now[name] = [expected["sha256"], status.st_size, status.st_ino, *times]
        if before.get(name) != now[name] and sha256_of(file) != expected["sha256"]:
            fact = f"{file} was altered (its sha256 differs)"
            raise BundleError(f"{fact}; export or copy the bundle again")
    if now != before:
        # Without a writable folder the files are hashed at each load.
        with suppress(OSError):
            stamps.parent.mkdir(exist_ok=True)
            with replacing(stamps) as partial:
                partial.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")


def sha256_of(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


FileName = Annotated[
    str, Rule("a plain file name", lambda n: n == Path(n).name and n.isprintable())
]
Share = Annotated[float, in_range(0.0, 1.0)]


class AcceptanceRecord(TypedDict):
    """How often drafts were accepted in the greedy text that followed `prompts`."""

    by_position: tuple[Share, ...]
    prompts: tuple[tuple[Count, ...], ...]
    new_tokens: Size


class Quantization(TypedDict, total=False):
    """The recipe of a graph's weights; `overlap` estimates a drafter's acceptance."""

    scheme: str
    block_size: Count
    algorithm: str
    head: str | None
    kv: str | None
    raised: tuple[Count, ...]
    packed: str
    kept: dict[str, Count]
    others: Count
    kl: float
    overlap: Share
    full_overlap: Share
    acceptance: AcceptanceRecord


class _ProbeRecord(TypedDict):
    """The fields of a `StreamRecord` that every target with probes has."""

    gamma: Size
    mode: str
    base: str


class StreamRecord(_ProbeRecord, total=False):
    """What the manifest says of a target's streams, or of its prompt tokens."""

    layers: Size
    lora_rank: Size
    prune_rank: Size
    positions: str
    members: Size
    prefix: Count
    ranks: tuple[tuple[Share, ...], ...]


@dataclass(frozen=True)
class Halves:
    """The graphs of a model that is cut below its top `layers`.

    `hidden_size` is the width of the states between the halves; with `scores` the lower
    half has an early exit. Earlier versions wrote a graph `exit` for weights with the
    hash `base`; both are ignored.
    """

    lower: FileName
    upper: FileName
    lower_compaction: FileName
    upper_compaction: FileName
    layers: Size
    hidden_size: Size
    scores: bool
    exit: FileName | None = None
    base: str = ""

    @property
    def files(self) -> list[str]:
        return [self.lower, self.upper, self.lower_compaction, self.upper_compaction]


@dataclass(frozen=True)
class GraphEntry:
    """One model: its step graph, contract, quantization and source.

    `tree_file` and `compaction_file` are its graphs for branching drafts, None if its
    attention does not allow branching. `streams` are the settings of its streams,
    `halves` its graphs below and above a cut. `vocabulary_file` is the draft vocabulary
    of a head or of probes, see `Bundle.draft_vocabulary`, and `encoder_file` the
    encoder's graph of a decoder that reads a source. `select_file` is a graph that can
    also read the rows of a `selection` only. Graphs with `own_operators` of jetdraft
    run on the CPU only.
    """

    file: FileName
    contract: StepContract
    quantization: Annotated[dict[str, Any], Quantization]
    source: str
    parameters: Annotated[int, Rule("0 or more", lambda count: count >= 0)]
    tree_file: FileName | None = None
    compaction_file: FileName | None = None
    streams: Annotated[dict[str, Any], StreamRecord] | None = None
    halves: Halves | None = None
    encoder_file: FileName | None = None
    vocabulary_file: FileName | None = None
    select_file: FileName | None = None
    selection: Selection | None = None
    own_operators: bool = False

    def check(self) -> None:
        """Raise `BundleError` or `ValueError` if the fields contradict each other."""
        Recipe.from_json(self.quantization)
        if self.halves is not None:
            self.split_contract  # noqa: B018  # raises if malformed
        if bool(self.contract.draft_vocab) != (self.vocabulary_file is not None):
            raise ValueError("a draft vocabulary and its file come together")
        if bool(self.contract.source_slots) != (self.encoder_file is not None):
            raise ValueError("a decoder that reads a source comes with an encoder")
        if (self.selection is None) != (self.select_file is None):
            raise ValueError("a selection of rows and its graph come together")

    @property
    def files(self) -> list[str]:
        """The names of all its files but the weights."""
        own = [v for name, v in vars(self).items() if name.endswith("file") and v]
        return own + (self.halves.files if self.halves else [])

    def only_on_cpu(self, provider: str) -> str:
        """Return why a `provider` beside the CPU cannot run it; "" if some may."""
        fix = "run on the CPU only; choose --provider cpu"
        if self.contract.states:
            return f"recurrent states {fix}"
        own = f"jetdraft's operators {fix}, or export with --provider {provider}"
        return own if self.own_operators else ""

    @property
    def split_contract(self) -> SplitContract:
        """The contract of the halves; the entry must have halves."""
        cut, whole = self.halves, self.tree_contract
        assert cut is not None
        return SplitContract.of(whole, cut.layers, cut.hidden_size, cut.scores)

    @property
    def tree_contract(self) -> StepContract:
        return replace(self.contract, tree=True)

    @property
    def widest_contract(self) -> StepContract:
        branching = self.contract.tree or self.tree_file is not None
        return replace(self.contract, tree=branching, selection=self.selection)

    @property
    def widest_file(self) -> str:
        """The graph that can do most: select rows, else branch, else run chains."""
        return self.select_file or self.tree_file or self.file

    @property
    def scheme(self) -> str:
        """How its weights are quantized, in a few words for people to read."""
        name = Recipe.from_json(self.quantization).name
        if "kept" not in self.quantization:
            return name
        kept, others = self.quantization["kept"], self.quantization["others"]
        forms = ", ".join(f"{count} {form}" for form, count in kept.items())
        rest = "left as floats" if name.startswith("none") else f"requantized to {name}"
        return f"{sum(kept.values())} matrices kept ({forms}), {others} {rest}"


def check_output(output: Path) -> None:
    """Raise `OutputError` unless nothing, or an earlier bundle, is at `output`."""
    check_writable(output)
    if output.exists() and not (output / MANIFEST).is_file():
        fact = f"{output} exists and is not a bundle; choose another output folder"
        raise OutputError(fact)


@contextmanager
def writing(output: str | Path) -> Iterator[Path]:
    """Yield a hidden folder to fill, renamed to `output` when the block succeeds.

    A failure or a kill at any point leaves `output` as it was. Raises `OutputError`.

        with writing("bundle") as folder:
            (folder / "file").write_text("...")
    """
    final = Path(output).resolve()
    check_output(final)
    fact = f"cannot write beside {final}"
    with as_error(OutputError, OSError, fact, "choose another folder"):
        final.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(final)
        staging = Path(mkdtemp(prefix=f".{final.name}.partial-", dir=final.parent))
    try:
        with locked(staging):
            mask = os.umask(0)  # which can only be read by setting it
            os.umask(mask)
            staging.chmod(0o777 & ~mask)
            yield staging
            for file in staging.iterdir():  # to the disk before the rename
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            _move_into_place(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _clean_up(final: Path) -> None:
    """Restore or remove what killed exports to `final` have left beside it."""
    aside = _old_folder(final)
    if aside.exists() and not final.exists():
        aside.rename(final)
    shutil.rmtree(aside, ignore_errors=True)
    for leftover in final.parent.glob(f".{final.name}.partial-*"):
        with locked(leftover) as owner_is_dead:
            if owner_is_dead:
                shutil.rmtree(leftover, ignore_errors=True)


def _old_folder(final: Path) -> Path:
    """Return the path beside `final` of an earlier bundle between two renames."""
    return final.with_name(f".{final.name}.old")


def _move_into_place(staging: Path, final: Path) -> None:
    """Rename `staging` to `final`; an earlier bundle there is moved and removed."""
    if not final.exists():
        staging.rename(final)
    elif not _exchange_folders(staging, final):
        # No atomic exchange: after a kill here the next export restores the old bundle.
        aside = _old_folder(final)
        final.rename(aside)
        staging.rename(final)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange_folders(one: Path, other: Path) -> bool:
    """Exchange two folders in one atomic step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    at_cwd, exchange = -100, 2
    paths = os.fsencode(one), os.fsencode(other)
    return bool(rename(at_cwd, paths[0], at_cwd, paths[1], exchange) == 0)
