"""Bundles beside the toy: with other buffers, another tokenizer, or streams."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from tokenizers import Tokenizer

from jetdraft.bundle import Bundle
from jetdraft.contracts.step_contract import StepContract

SLOTS, LAST = "draft_mask.slots", "draft_mask.last"
"""Constants of a tree graph: the numbers of its slots, and a draft's slots."""


def resized(bundle: Path, output: Path, capacity: int, max_width: int) -> Path:
    shutil.copytree(bundle, output, ignore=shutil.ignore_patterns("profiles"))
    (output / "bundle.json").unlink()
    opened, graphs = Bundle.open(bundle), {}
    for name, entry in opened.graphs.items():
        contract = replace(entry.contract, capacity=capacity, max_width=max_width)
        for file in (entry.file, entry.tree_file, entry.compaction_file):
            if file is not None:
                _resize(output / file, entry.contract, contract)
        graphs[name] = replace(entry, contract=contract)
    replace(opened, path=output, graphs=graphs, files={}).save()
    return output


def respelled(bundle: Path, output: Path, tokenizer: Tokenizer) -> Path:
    shutil.copytree(bundle, output, ignore=shutil.ignore_patterns("profiles"))
    (output / "bundle.json").unlink()
    tokenizer.save(str(output / "tokenizer.json"))
    replace(Bundle.open(bundle), path=output, special_tokens={}, files={}).save()
    return output


def streamed_bundle(folder: Path) -> Path:
    """Export a tiny checkpoint with random streams to `folder`, in a few seconds."""
    from jetdraft.checkpoints.streams import StreamSettings
    from tests.exports import exported
    from tests.tiny import llama_config, save_checkpoint, save_streams

    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    save_checkpoint(checkpoint, llama_config(num_hidden_layers=2))
    settings = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
    save_streams(checkpoint, settings, seed=0)
    exported(checkpoint, folder, capacity=160)
    return folder


def _resize(file: Path, old: StepContract, new: StepContract) -> None:
    """Change the sizes in the declared shapes and the constants of a graph."""
    graph = onnx.load(file, load_external_data=False)
    sizes = {old.slots: new.slots, 1 + old.draft_slots: 1 + new.draft_slots}
    body = graph.graph
    for value in (*body.input, *body.output, *body.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_value in sizes:
                axis.dim_value = sizes[axis.dim_value]
    for constant in body.initializer:
        if constant.name in (SLOTS, LAST):
            before = numpy_helper.to_array(constant)
            after = [new.draft_slots]
            if constant.name == SLOTS:
                after = before.ravel()[: new.slots]
            constant.CopyFrom(
                numpy_helper.from_array(np.array(after, before.dtype), constant.name)
            )
    onnx.save(graph, file)
