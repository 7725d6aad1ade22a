"""Fixtures of all tests: the toy bundle, a tiny pair, and what a run makes once."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import onnx
import pytest
from accelerate.state import AcceleratorState
from torch.onnx._internal.exporter._registration import ONNXRegistry

import jetdraft
from jetdraft.export import exporter, tracer
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.graphs import Job
from jetdraft.export.tracer import KeptTraces
from jetdraft.manifest import GraphEntry
from jetdraft.recipe import Recipe
from jetdraft.runtime.measured import survey
from jetdraft.testing import toy_bundle
from tests import whispers
from tests.tiny import drafter_config, llama_config, save_checkpoint
from tools.forecast.forecast import graph_forecasts
from tools.forecast.graph_view import SMALL
from tools.forecast.kernel_table import TABLES

# pytest listens to loggers that do not propagate, and torch would write all that it
# does in a trace down for it.
logging.getLogger("torch.__trace").propagate = True

pytest_plugins = ["tests.fast"]


class Pair(NamedTuple):
    """Folders of two checkpoints."""

    target: Path
    drafter: Path


class SharedTraces(KeptTraces):
    """Keeps every trace of a run in a folder, each as a file named by its fingerprint.

    Most tests export one of a few tiny models, and the trace is most of the work.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def read(self, key: str) -> bytes | None:
        file = self.folder / key
        return file.read_bytes() if file.exists() else None

    def write(self, key: str, file: bytes) -> None:
        """Write it whole, since another process may look for it."""
        part = self.folder / f"{key}.{os.getpid()}"
        part.write_bytes(file)
        part.replace(self.folder / key)


@pytest.fixture(scope="session", autouse=True)
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trace what several tests export once, in all processes of this run together."""
    base = tmp_path_factory.getbasetemp()
    # Each worker has a folder of its own in the folder of the run.
    run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracer, "KEPT", SharedTraces(run / "traces"))
        # A fifth of a short trace: the table of all operators, always the same.
        registry = functools.cache(ONNXRegistry.from_torchlib)
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(registry))
        yield


@pytest.fixture(scope="session", autouse=True)
def widths_at_once() -> Iterator[None]:
    """Compare all widths before the first token, also where others have the cores.

    Otherwise a thread compares the rest while a test reads the buffers by itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "FIRST_MS", 60_000.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def forecasts_of_all_exports() -> Iterator[None]:
    """Forecast every graph that a test exports, for every provider with a table.

    Graphs that differ in their weights only get one forecast.
    """
    write, seen = exporter.write_graphs, set[tuple[bytes, ...]]()

    def write_and_forecast(job: Job, entry: GraphEntry) -> GraphEntry:
        entry = write(job, entry)
        files = entry.file, entry.tree_file, entry.encoder_file, entry.compaction_file
        models = {
            f: onnx.load(job.folder / f, load_external_data=False) for f in files if f
        }
        key = tuple(map(_without_numbers, models.values()))
        for provider in TABLES if key not in seen else ():
            for one in graph_forecasts(job.folder, entry, provider):
                assert len(one.verdicts) == len(models[one.file].graph.node)
        seen.add(key)
        return entry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "write_graphs", write_and_forecast)
        yield


def _without_numbers(model: onnx.ModelProto) -> bytes:
    """A hash of a graph without the numbers that no forecast reads."""
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) > SMALL:
            tensor.ClearField("raw_data")
    return hashlib.sha256(model.SerializeToString()).digest()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy bundle of a test file; copy it before changing anything in it."""
    return toy_bundle(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture(scope="module")
def toy_model(toy: Path) -> Iterator[jetdraft.Model]:
    """The toy bundle, loaded on one thread."""
    with jetdraft.load(toy, threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A 3-layer target and a 1-layer drafter with the same tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return Pair(
        save_checkpoint(folder / "target", llama_config(), seed=0),
        save_checkpoint(folder / "drafter", drafter_config(), seed=1),
    )


@pytest.fixture(scope="session")
def bundle(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair as an int8 bundle; copy it before changing anything in it."""
    output = tmp_path_factory.mktemp("bundles") / "tiny"
    options = ExportOptions(Recipe("int8", 32), capacity=256, max_width=64)
    export(str(pair.target), output, str(pair.drafter), options)
    return output


@pytest.fixture(scope="session")
def model(bundle: Path) -> jetdraft.Model:
    """The bundle, loaded on one thread."""
    return jetdraft.load(bundle, threads=1)


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of a tiny Whisper, and a bundle of it.

    The bundle's drafter is the target itself.
    """
    folder = tmp_path_factory.mktemp("whisper")
    checkpoint = whispers.save(folder / "checkpoint")
    options = ExportOptions(Recipe("none"), max_width=16)
    export(str(checkpoint), folder / "bundle", str(checkpoint), options)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _new_precision_of_file() -> None:
    """Let the fixtures of a file multiply in their own type; see `_new_precision`."""
    AcceleratorState._reset_state()


@pytest.fixture(autouse=True)
def _new_precision() -> Iterator[None]:
    """Let each test multiply in its own type; accelerate keeps the first one."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()
