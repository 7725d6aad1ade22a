"""Fixtures of all tests: the toy bundle, a tiny pair, and what a run makes once."""

import functools
import gc
import hashlib
import logging
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import onnx
import pytest
from accelerate.state import AcceleratorState
from torch.onnx._internal.exporter._registration import ONNXRegistry

import jetdraft
from jetdraft import manifest, recipe, testing
from jetdraft.export import exporter, tracer
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.graphs import Job
from jetdraft.export.tracer import KeptTraces
from jetdraft.files import locked
from jetdraft.runtime.measured import survey
from tests import whispers
from tests.tiny import drafter_config, llama_config, save_checkpoint
from tools.forecast import forecast, graph_view, kernel_table

# pytest would keep all that torch logs in a trace, as this logger does not propagate.
logging.getLogger("torch.__trace").propagate = True

# jsonschema builds grammars of URIs for seconds when imported; no test checks a URI.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

pytest_plugins = ["tests.fast"]
TRACED = ("checkpoints", "contracts", "export", "methods", "train")
"""The rooms with code that a pass may run while it is traced."""
Once = Callable[[str, Callable[[Path], object]], Path]


class Pair(NamedTuple):
    target: Path
    drafter: Path


def folder_of_traces() -> Path:
    names = ("torch", "transformers", "onnxscript", "onnx-ir")
    digest = hashlib.sha256(repr([version(name) for name in names]).encode())
    package = Path(jetdraft.__file__).parent
    for file in sorted(f for room in TRACED for f in (package / room).rglob("*.py")):
        digest.update(file.read_bytes())
    return package.parent / ".cache" / f"traces-{digest.hexdigest()[:16]}"


class SharedTraces(KeptTraces):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        for old in folder.parent.glob("traces-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, key: str) -> bytes | None:
        file = self.folder / key
        return file.read_bytes() if file.exists() else None

    def write(self, key: str, file: bytes) -> None:
        part = self.folder / f"{key}.{os.getpid()}"
        part.write_bytes(file)
        part.replace(self.folder / key)


def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def traces() -> Iterator[None]:
    """Trace what several tests export once, in all processes and runs together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracer, "KEPT_TRACES", SharedTraces(folder_of_traces()))
        # A fifth of a short trace: the table of all operators, always the same.
        registry = functools.cache(ONNXRegistry.from_torchlib)
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(registry))
        # A trace makes so much that all older objects would be looked at often.
        gc.set_threshold(700, 10, 200)
        yield


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Make a folder by its name once, in all processes of this run together."""
    run = folder_of_run(tmp_path_factory)

    def made(name: str, make: Callable[[Path], object]) -> Path:
        with locked(run / f"{name}.lock", wait=True, create=True):
            if not (mark := run / f"{name}.made").exists():
                shutil.rmtree(run / name, ignore_errors=True)  # where it was skipped
                make(run / name)
                mark.touch()
        return run / name

    return made


@pytest.fixture(scope="session", autouse=True)
def widths_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "FIRST_MS", 60_000.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def forecasts_of_all_exports() -> Iterator[None]:
    """Forecast every graph that a test exports, for every provider with a table."""
    write, seen = exporter.write_graphs, set[tuple[bytes, ...]]()

    def write_and_forecast(job: Job, entry: manifest.GraphEntry) -> manifest.GraphEntry:
        entry = write(job, entry)
        files = entry.file, entry.tree_file, entry.encoder_file, entry.compaction_file
        models = {
            f: onnx.load(job.folder / f, load_external_data=False) for f in files if f
        }
        key = tuple(map(_without_numbers, models.values()))
        for provider in kernel_table.TABLES if key not in seen else ():
            for one in forecast.graph_forecasts(job.folder, entry, provider):
                assert len(one.verdicts) == len(models[one.file].graph.node)
        seen.add(key)
        return entry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "write_graphs", write_and_forecast)
        yield


def _without_numbers(model: onnx.ModelProto) -> bytes:
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) > graph_view.SMALL:
            tensor.ClearField("raw_data")
    return hashlib.sha256(model.SerializeToString()).digest()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.toy_bundle(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture(scope="module")
def toy_model(toy: Path) -> Iterator[jetdraft.Model]:
    with jetdraft.load(toy, threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def pair(once: Once) -> Pair:
    return Pair(
        once("target", lambda place: save_checkpoint(place, llama_config(), seed=0)),
        once("drafter", lambda place: save_checkpoint(place, drafter_config(), seed=1)),
    )


@pytest.fixture(scope="session")
def bundle(pair: Pair, once: Once) -> Path:
    """The pair as an int8 bundle; copy it before changing anything in it."""
    options = ExportOptions(recipe.Recipe("int8", 32), capacity=256, max_width=64)
    target, drafter = map(str, pair)
    return once("tiny", lambda folder: export(target, folder, drafter, options))


@pytest.fixture(scope="session")
def model(bundle: Path) -> jetdraft.Model:
    model = jetdraft.load(bundle, threads=1)
    model.parts.survey.finish()  # idle work would run its graphs beside a test
    return model


@pytest.fixture(scope="session")
def whisper(once: Once) -> Path:
    def make(folder: Path) -> None:
        checkpoint = str(whispers.save(folder / "checkpoint"))
        options = ExportOptions(recipe.Recipe("none"), max_width=16, fast=True)
        export(checkpoint, folder / "bundle", checkpoint, options)

    return once("whisper", make)


@pytest.fixture(autouse=True, scope="module")
def _new_precision_of_file() -> None:
    AcceleratorState._reset_state()


@pytest.fixture(autouse=True)
def _new_precision() -> Iterator[None]:
    """Let each test multiply in its own type; accelerate keeps the first one."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()
