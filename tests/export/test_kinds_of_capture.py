"""Graphs of heads, probes and attached drafters can be captured on CUDA.

The table of CUDA's kernels is jetdraft/devices/kernels/cuda.json, taken from
onnxruntime-gpu.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import onnx
import pytest
import torch

from jetdraft.checkpoints.prompts import FORECAST, PromptSettings
from jetdraft.checkpoints.streams import SHARED, StreamSettings
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods.chimera.task import ChimeraTask
from jetdraft.methods.falcon.task import FalconTask
from jetdraft.methods.glide.task import GlideTask
from jetdraft.recipe import Recipe
from tests.checkpoints.heads import layouts
from tests.export.empty_sums import empty_sums
from tests.tiny import llama_config, save_checkpoint, save_prompts, save_streams
from tests.train.attached.drafts import STILL
from tests.train.periodic import made
from tools.forecast.forecast import forecasts

OPTIONS = ExportOptions(
    Recipe("int8", 32), Recipe("int8", 32), capacity=64, max_width=16, provider="cuda"
)
STREAMS = StreamSettings(gamma=3, layers=2, lora_rank=4, prune_rank=2)
PROMPTS = PromptSettings(gamma=3, ranks=((0.5, 0.2), (0.4, 0.2), (0.3, 0.1)))
FORECASTS = PromptSettings(gamma=3, prefix=4, mode=FORECAST)
PROBES = {
    "streams": partial(save_streams, settings=STREAMS),
    "shared": partial(save_streams, settings=replace(STREAMS, mode=SHARED)),
    "ppd": partial(save_prompts, settings=PROMPTS),
    "ensemble": partial(save_prompts, settings=replace(PROMPTS, members=2)),
    "prefix": partial(save_prompts, settings=replace(PROMPTS, prefix=2)),
    "forecast": partial(save_prompts, settings=FORECASTS),
}
HEADS = {
    "eagle1": (layouts.eagle1, 1, ()),
    "eagle3": (layouts.eagle3, layouts.LAYERS, ()),
    "speculators": (layouts.speculators, layouts.LAYERS, ()),
    "medusa": (partial(layouts.medusa, 3), 2, ("medusa_lm_head.pt",)),
    "hydra": (partial(layouts.hydra, 3), 2, ("hydra_lm_head.pt",)),
    "dflash": (partial(layouts.dflash, num_target_layers=5), 5, ()),
    "diffusion": (layouts.diffusion, 1, ()),
}
TASKS = {"glide": GlideTask, "chimera": ChimeraTask, "falcon": FalconTask}


def target_of(folder, layers):
    config = llama_config(num_hidden_layers=layers, tie_word_embeddings=False)
    return str(save_checkpoint(folder / "target", config))


def probed(kind, folder):
    target_of(folder, 3)
    return export(
        str(PROBES[kind](folder / "target")), folder / "bundle", options=OPTIONS
    )


def headed(kind, folder):
    layout, layers, file = HEADS[kind]
    torch.manual_seed(3)
    head = layouts.write(folder / "head", *layout(), *file)
    target = target_of(folder, layers)
    return export(target, folder / "bundle", options=OPTIONS, head=head)


def attached(kind, folder):
    """A drafter as it begins, which chooses among 40 tokens."""
    text = folder / "text.txt"
    text.write_text(" the self of the text" * 200)
    target = target_of(folder, 2)
    made(TASKS[kind], target, folder / "head", [text], None, STILL).run()
    options = replace(OPTIONS, draft_vocab=40)
    return export(target, folder / "bundle", options=options, head=str(folder / "head"))


KINDS = {
    **dict.fromkeys(HEADS, headed),
    **dict.fromkeys(PROBES, probed),
    **dict.fromkeys(TASKS, attached),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_captured(kind, tmp_path):
    bundle = KINDS[kind](kind, tmp_path)
    passes = []
    for one in forecasts(bundle, "cuda"):
        assert one.refused == [], one.file
        assert one.copies == (), one.file
        assert one.no_capture == "", one.file
        graph = onnx.load(bundle.path / one.file, load_external_data=False).graph
        if kind in PROBES and "position_ids" in {each.name for each in graph.input}:
            assert empty_sums(bundle.path / one.file) == [], one.file
            passes.append(one.file)
        # CUDA's GatherND copies a size from the host; a replay would read it again.
        assert "GatherND" not in {node.op_type for node in graph.node}, one.file
    assert passes or kind not in PROBES
