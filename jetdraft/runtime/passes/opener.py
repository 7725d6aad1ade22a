"""Opens the graphs of a bundle on one provider: CPU, CUDA, TensorRT or WebGPU."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, TypedDict
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import CONTRIB, Bundle
from jetdraft.devices import providers, webgpu
from jetdraft.devices.detection import detect_machine
from jetdraft.devices.providers import CUDA_OPTIONS, PROVIDERS, WEBGPU_OPTIONS
from jetdraft.errors import OptionError, ProviderError
from jetdraft.manifest import GraphEntry
from jetdraft.options import Flag
from jetdraft.ort import import_onnx, ort
from jetdraft.runtime.passes.buffers import HOST, Memory, SourceBuffers
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.pictures import PictureRows
from jetdraft.runtime.passes.session import (
    Captures,
    StepSessions,
    Threads,
    open_session,
)


class LoadOptions(TypedDict, total=False):
    """Where and how a bundle runs: the keyword arguments of `jetdraft.load`.

    threads: Threads of the target; default: all cores.
    drafter_provider: What runs the drafter: a provider, or off for no drafter; default:
        the provider of the export, or --provider.
    streams: A streams.npz of the same base; default: the streams in the bundle.
    adapter: The adapter of the export that changes the target; default: no adapter.
    store: Keep requests and responses in this file, and draft from them; default: keep
        nothing.
    learn: Keep what the target said where drafts were wrong in this folder, and take
        the drafter's weights that jetdraft train use learns of it; default: keep
        nothing.
    """

    threads: Annotated[int | None, Flag("runtime", names=("-t", "--threads"))]
    provider: Annotated[
        str | None,
        Flag(
            "runtime",
            f"What runs the target: {', '.join(PROVIDERS)} or auto; default: the "
            "provider of the export.",
        ),
    ]
    drafter_provider: Annotated[str | None, Flag("runtime")]
    streams: Annotated[str | Path | None, Flag("runtime")]
    adapter: Annotated[str | None, Flag("runtime", metavar="NAME")]
    store: Annotated[str | Path | None, Flag("drafting")]
    learn: Annotated[str | Path | None, Flag("drafting", metavar="DIR")]


def check_options(options: LoadOptions) -> None:
    """Raise `OptionError` or `ProviderError` for unknown options and wrong values."""
    choices = LoadOptions.__annotations__
    for name in options:
        if name not in choices:
            words = ", ".join(choices)
            raise OptionError(f"unknown option {name!r} of load; choose {words}", name)
    for path in ("streams", "store", "learn"):
        value = options.get(path)
        if not isinstance(value, (str, Path, type(None))):
            raise OptionError(f"{path} {value!r} is not a path; give a path", path)
    drafter = options.get("drafter_provider")
    if drafter not in (None, providers.OFF, providers.AUTO, *PROVIDERS):
        names = ", ".join((*PROVIDERS, providers.AUTO, providers.OFF))
        fact = f"unknown provider {drafter!r} for the drafter; choose {names}"
        raise ProviderError(fact)


Weights = Mapping[str, npt.NDArray[np.generic]]  # By the initializers' names.
Opened = tuple[StepSessions, Memory, Captures | None]
_UNCAPTURED = CUDA_OPTIONS | {"enable_cuda_graph": "0"}


@dataclass(frozen=True)
class Opener:
    """Opens graphs of one bundle on a provider; on the CPU files share sessions."""

    bundle: Bundle
    provider: providers.Provider
    threads: Threads
    # A session lives as long as a graph runs it.
    _opened: MutableMapping[str, ort.InferenceSession] = field(
        default_factory=WeakValueDictionary, repr=False
    )
    _lock: Any = field(default_factory=RLock, repr=False, compare=False)

    def graph(self, entry: GraphEntry, weights: Weights | None = None) -> Graph:
        """Open a graph with new KV buffers; `weights` replace initializers, by name."""
        open_on = getattr(self, f"_open_on_{self.provider.name}")
        sessions, memory, captures = open_on(entry, weights or {})
        compaction = self.commit_session(entry.compaction_file)
        graph = Graph(sessions, compaction, memory, captures)
        if entry.encoder_file is not None:
            session = self.session(entry.encoder_file)
            graph.source = SourceBuffers(session, entry.contract, graph.memory)
        if entry.contract.picture_size and self.bundle.vision:
            vision = self.bundle.vision
            # Kept rows must have the bits of rows that are encoded again.
            options = _UNCAPTURED if self.provider.name == "cuda" else None
            opening = partial(self.session, vision.file, options=options)
            graph.pictures = PictureRows(opening, vision, entry.contract, memory)
        return graph

    def session(
        self,
        file: str,
        weights: Weights | None = None,
        options: providers.ProviderOptions | None = None,
        shared: Mapping[str, ort.OrtValue] | None = None,
        threads: Threads | None = None,
    ) -> ort.InferenceSession:
        """Open a session of a bundle's file, once on the CPU; see `open_session`."""
        place = self.bundle.path / file, self.provider.name, threads or self.threads
        with self._lock:  # Two threads may ask first for an adapter, or the encoder.
            if (known := self._opened.get(file)) is not None:
                return known
            session = open_session(*place, weights, shared, options)
            if self.provider.memory == "cpu":
                self._opened[file] = session
            return session

    def commit_session(self, file: str | None) -> ort.InferenceSession | None:
        """The session of a commit, with one thread; None without a graph."""
        if file is None:
            return None
        path: Path = self.bundle.path / file
        if self.provider.memory == "cpu":
            return open_session(path, "cpu")
        # CUDA has the same device memory, and a TensorRT engine copies no faster.
        device = self.provider.memory
        options = _UNCAPTURED if device == "cuda" else WEBGPU_OPTIONS
        return open_session(path, device, provider_options=options)

    def _open_on_cpu(self, entry: GraphEntry, weights: Weights) -> Opened:
        """Open one session; two hold the packed weights twice (docs/log/runtime.md)."""
        session = self.session(entry.widest_file, weights)
        return StepSessions(session, entry.widest_contract), HOST, None

    def _open_on_cuda(self, entry: GraphEntry, weights: Weights) -> Opened:
        """Open two sessions over shared weights, if they are not standard graphs'."""
        memory, options = self.provider.memory, CUDA_OPTIONS
        if entry.tree_file is None or self.bundle.flavour != CONTRIB:
            session = self.session(entry.tree_file or entry.file, weights, options)
            sessions = StepSessions(session, entry.widest_contract)
        else:
            views, owners = shared_weights(self.bundle.path / entry.file, memory)
            views = {n: v for n, v in views.items() if n not in weights}
            chain, tree = (
                self.session(file, weights, options, views)
                for file in (entry.file, entry.tree_file)
            )
            kept = [*owners.values()]
            sessions = StepSessions(tree, entry.tree_contract, chain, owners=kept)
        return sessions, Memory(memory, copies=True), Captures()

    def _open_on_webgpu(self, entry: GraphEntry, weights: Weights) -> Opened:
        """Open one session, since WebGPU's sessions cannot share weights.

        Attention cannot compare a captured `total_length` with the length of a bias.
        """
        contract, file = entry.widest_contract, entry.tree_file or entry.file
        webgpu.check_buffers(self.bundle.path / file, contract)
        can_capture = not contract.has_bias
        options = WEBGPU_OPTIONS | {"enableGraphCapture": str(int(can_capture))}
        session = self.session(file, weights, options)
        memory = Memory("webgpu", True, () if can_capture else ("total_length",))
        captures = Captures() if can_capture else None
        return StepSessions(session, contract), memory, captures

    def _open_on_tensorrt(self, entry: GraphEntry, weights: Weights) -> Opened:
        """Open an engine for passes of any width, and one engine for each width."""
        contract, file = entry.widest_contract, entry.tree_file or entry.file
        name = file.removesuffix(".onnx")
        folder = self.bundle.path / "profiles" / f"tensorrt-{name}"
        machine = detect_machine()
        depends_on = {
            "bundle": self.bundle.sha256,
            "gpu": machine.gpu or "unknown",
            "tensorrt": machine.tensorrt or "unknown",
            "onnxruntime": ort.__version__,
        }
        engines = providers.engine_folder(folder, depends_on)

        def engine(width: int | None) -> ort.InferenceSession:
            options = providers.engine_options(contract, width, engines)
            return self.session(file, weights, options)

        widths = [w for w in providers.ENGINE_WIDTHS if w <= contract.max_width]
        any_width, fixed = engine(None), {width: engine(width) for width in widths}
        sessions = StepSessions(any_width, contract, fixed=fixed)
        return sessions, Memory(self.provider.memory, copies=True), None


Values = dict[str, ort.OrtValue]


def shared_weights(file: Path, device: str) -> tuple[Values, Values]:
    """The external weights of the contrib graph `file`, copied to `device`.

    Returns views for `SessionOptions.add_initializer`, which refuses a value that owns
    its memory, and the owners, which must outlive the sessions. numpy has no type for
    the integers of standard graphs. Raises `ProviderError` if onnx is missing.
    """
    onnx = import_onnx()
    owners = {}
    for tensor in onnx.load(file, load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if "location" in place:
            array = np.memmap(
                file.parent / place["location"],
                onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type),
                mode="r",
                offset=int(place["offset"]),
                shape=tuple(tensor.dims),
            )
            value = ort.OrtValue.ortvalue_from_numpy(np.array(array), device, 0)
            owners[tensor.name] = value
    return {n: ort.OrtValue.from_dlpack(value) for n, value in owners.items()}, owners
