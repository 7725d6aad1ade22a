"""Opening a bundle's graphs on a provider, each in the way that suits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import CONTRIB, Bundle, GraphEntry
from jetdraft.devices.detection import detect
from jetdraft.devices.providers import (
    CudaOptions,
    Provider,
    TensorrtOptions,
    as_options,
)
from jetdraft.devices.tensorrt import WIDTHS, engine_folder, engine_options
from jetdraft.ort import ort
from jetdraft.runtime.passes.captures import Captures
from jetdraft.runtime.passes.engines import Engines
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.session import open_session
from jetdraft.runtime.passes.shared_weights import shared_weights
from jetdraft.runtime.passes.tensor import HOST, Memory

Weights = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Opening:
    """How the graphs of a bundle are opened.

    Opening(bundle, PROVIDERS["cpu"], threads=2, spinning=True).graph(bundle.target)
    """

    bundle: Bundle
    provider: Provider
    threads: int
    spinning: bool
    _opened: dict[str, ort.InferenceSession] = field(default_factory=dict, repr=False)

    def graph(self, entry: GraphEntry, weights: Weights | None = None) -> Graph:
        """A model of the bundle; `weights` take the place of its own of those names."""
        how = {
            "cpu": self._on_cpu,
            "cuda": self._on_cuda,
            "tensorrt": self._on_tensorrt,
        }
        return how[self.provider.name](entry, weights or {})

    def session(
        self,
        file: str,
        weights: Weights | None = None,
        options: CudaOptions | TensorrtOptions | None = None,
        shared: Mapping[str, ort.OrtValue] | None = None,
    ) -> ort.InferenceSession:
        """One session of the bundle.

        On the CPU, where sessions hold no state of a pass, the same for every model
        over this opening.
        """
        if file in self._opened:
            return self._opened[file]
        made = open_session(
            self.bundle.path / file,
            self.provider.name,
            self.threads,
            self.spinning,
            weights,
            shared,
            as_options(options) if options else {},
        )
        if self.provider.memory == "cpu":
            self._opened[file] = made
        return made

    def compaction(self, file: str | None) -> ort.InferenceSession | None:
        """What moves rows together: weightless, and never worth many threads."""
        if file is None:
            return None
        path: Path = self.bundle.path / file
        if self.provider.memory == "cpu":
            return open_session(path, "cpu")
        # TensorRT's own tensors lie where CUDA's do, and an engine would gain nothing.
        options = as_options(CudaOptions(enable_cuda_graph=False))
        return open_session(path, "cuda", provider_options=options)

    def _on_cpu(self, entry: GraphEntry, weights: Weights) -> Graph:
        """One session: a chain costs the same in a tree graph and gives the same bits.

        Two would hold the packed weights twice (docs/log.md).
        """
        session = self.session(entry.tree_file or entry.file, weights)
        engines = Engines(session, entry.widest_contract)
        return Graph(engines, self.compaction(entry.compaction_file), HOST)

    def _on_cuda(self, entry: GraphEntry, weights: Weights) -> Graph:
        """Chains and trees over the same weights; an attention bias costs a kernel."""
        moves = self.compaction(entry.compaction_file)
        memory, options = self.provider.memory, CudaOptions()
        if entry.tree_file is None or self.bundle.flavour != CONTRIB:
            # Of two standard graphs each would hold the weights.
            session = self.session(entry.tree_file or entry.file, weights, options)
            engines = Engines(session, entry.widest_contract)
        else:
            shared = shared_weights(self.bundle.path / entry.file, memory)
            shared = {name: w for name, w in shared.items() if name not in weights}
            chain, tree = (
                self.session(file, weights, options, shared)
                for file in (entry.file, entry.tree_file)
            )
            engines = Engines(tree, entry.tree_contract, chain, weights=shared)
        return Graph(engines, moves, Memory(memory, copies=True), Captures())

    def _on_tensorrt(self, entry: GraphEntry, weights: Weights) -> Graph:
        """An engine for passes of any width, and some for the widths of decoding."""
        contract, file = entry.widest_contract, entry.tree_file or entry.file
        widths = [width for width in WIDTHS if width <= contract.max_width]
        name = file.removesuffix(".onnx")
        folder = self.bundle.path / "profiles" / f"tensorrt-{name}"
        kept = engine_folder(folder, self._machine())
        sessions = {
            width: self.session(file, weights, engine_options(contract, width, kept))
            for width in (None, *widths)
        }
        engines = Engines(
            sessions[None], contract, fixed={w: sessions[w] for w in widths}
        )
        moves = self.compaction(entry.compaction_file)
        return Graph(engines, moves, Memory(self.provider.memory, copies=True))

    def _machine(self) -> dict[str, str]:
        """What engines depend on."""
        machine = detect()
        return {
            "bundle": self.bundle.sha256,
            "gpu": machine.gpu or "unknown",
            "tensorrt": machine.tensorrt or "unknown",
            "onnxruntime": ort.__version__,
        }
