"""The export of one model, from its checkpoint to the graphs of the bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.step import Step
from jetdraft.manifest import GraphEntry
from jetdraft.quant.blocks import Floats
from jetdraft.quant.weights import Quantization

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, the steps done and the number of steps."""


@dataclass
class Job:
    """One model on its way into the bundle `folder`; the variants change it in turn.

    `entry` is the model's entry in the manifest. `names` maps the ids of the weights to
    their names in the checkpoint. `scales` are those of integer KV buffers, empty for
    float buffers. `step` is the pass that is traced. `task` has the weights of streams,
    by name, which must not be fused or quantized.
    """

    folder: Path
    name: str
    checkpoint: Checkpoint
    entry: GraphEntry
    options: ExportOptions
    report: Progress
    quantization: Quantization
    scales: list[Floats]
    names: Mapping[int, str]
    step: Step
    task: dict[str, Tensor] = field(default_factory=dict)

    @property
    def contract(self) -> StepContract:
        """The contract of the chain graph."""
        return self.entry.contract

    @property
    def file(self) -> Path:
        """The chain graph."""
        return self.folder / self.entry.file

    def beside(self, kind: str) -> Path:
        """The file of another graph of this model, for example kind "tree"."""
        return self.folder / f"{self.name}-{kind}.onnx"
