"""Trained drafters guess a periodic text, which the target knows, more often."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import jetdraft
from jetdraft import Bundle, OptionError
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.streams import MAX_RANKS, StreamSettings
from jetdraft.methods.chimera.task import ChimeraTask
from jetdraft.methods.draft.task import ModelSettings, ModelTask
from jetdraft.methods.eagle.task import EagleSettings, EagleTask
from jetdraft.methods.falcon.task import FalconSettings, FalconTask
from jetdraft.methods.forecast.task import ForecastSettings, ForecastTask
from jetdraft.methods.glide.task import GlideTask
from jetdraft.methods.kangaroo.task import KangarooSettings, KangarooTask
from jetdraft.methods.medusa.task import MedusaTask
from jetdraft.methods.ppd.task import PpdSettings, PpdTask
from jetdraft.methods.stream.task import StreamTask
from jetdraft.train.heads import HeadSettings, LayerSettings
from jetdraft.train.task import Task, TrainingOptions
from jetdraft.train.training import Training
from tests import same_text
from tests.tiny import exported, refused
from tests.train.periodic import LONGER, PERIOD, made

LAYERS = 4
ALONE = replace(LONGER, batch_size=1, sequence_length=64)
FLOATS = {"capacity": 128, "max_width": 32}
CHAIN, BEST = {"num_draft_tokens": 3}, {"drafting": {"tree": "best"}}
TREES = (CHAIN, BEST, {"drafting": {"tree": "comb"}}, {"drafting": {"tree": "heap"}})
TREE = {"tree": "k-ary", "branching": [2, 1, 1]}


class Kind(NamedTuple):
    """A training, the ways to draft with what it made, and what must be reached.

    In the last validation each `figure` is above `right`, their mean rises by `gain`;
    the first way takes more than `tokens` a pass, the `others` as many.
    """

    task: type[Task]
    settings: Any
    ways: tuple[dict[str, Any], ...] = (CHAIN,)
    options: TrainingOptions = LONGER
    right: float = 0.8
    gain: float = 0.3
    tokens: float = 2.5
    others: float = 1.0
    figure: str = "acceptance"


OF_DRAFT = ModelSettings(layers=1, hidden_size=32, draft_vocab=30, half=True)
OF_PPD = PpdSettings(gamma=3, members=2)
SPARSE = {"drafting": {"rows": 12, "slots": 40}}, {"drafting": {"tree": "chain"}}, BEST
OF_FORECAST = ForecastSettings(gamma=2, prefix=4)
FAST = replace(LONGER, learning_rate=3e-2)
SLOW = replace(FAST, steps=160)
UNSURE = {"right": 0.0, "tokens": 1.5}
LOSSLESS = StreamSettings(gamma=3, layers=3, lora_rank=16)
SHARED = replace(LOSSLESS, mode="shared")
# Through one graph or two, compacted or carried.
PRUNED = ({"drafting": TREE | {"prune_threshold": t}} for t in (None, 0, 0.02))
BRIEF, WHOLE = replace(ALONE, steps=80), replace(ALONE, steps=240, sequence_length=96)
SURE = {"tokens": 3.0, "others": 2.0}
KINDS = {
    "eagle3": Kind(EagleTask, EagleSettings(draft_vocabulary=40, unrolled=3), ()),
    "eagle1": Kind(EagleTask, EagleSettings(kind="eagle1", unrolled=3), ()),
    "mtp": Kind(EagleTask, EagleSettings(kind="mtp", unrolled=3)),
    "medusa": Kind(MedusaTask, HeadSettings(unrolled=3), (CHAIN, BEST), others=2.0),
    "chimera": Kind(ChimeraTask, LayerSettings(), TREES),
    "glide": Kind(GlideTask, LayerSettings(), TREES),
    "falcon": Kind(FalconTask, FalconSettings(), TREES),
    "kangaroo": Kind(KangarooTask, KangarooSettings(exit_layer=1), TREES),
    "draft": Kind(ModelTask, OF_DRAFT, right=0.6, figure="agreement"),
    "ppd": Kind(PpdTask, OF_PPD, SPARSE, FAST, gain=0.13, **UNSURE),
    "forecast": Kind(ForecastTask, OF_FORECAST, ({},), SLOW, gain=0.15, **UNSURE),
    "lossless": Kind(StreamTask, LOSSLESS, (CHAIN, *PRUNED), BRIEF, **SURE),
    "shared": Kind(StreamTask, SHARED, (CHAIN, {"drafting": TREE}), WHOLE, **SURE),
}


@pytest.fixture(scope="module", params=KINDS)
def trained(request, target, tmp_path_factory):
    kind, seen = KINDS[request.param], []
    data = Path(target).parent / "text.txt"
    folder = tmp_path_factory.mktemp("trained") / "out"
    run = made(kind.task, target, folder, [data], kind.settings, kind.options)
    run.run(lambda progress: seen.append(progress.validation))
    return kind, run, seen[0], seen[-1]


def test_it_is_right_more_often(trained):
    kind, _, before, after = trained
    rates, untrained = after[kind.figure], before[kind.figure]
    assert len(rates) >= 2
    # The first tokens of a window cannot be guessed by anyone.
    assert min(rates) > kind.right
    assert np.mean(rates) > np.mean(untrained) + kind.gain


def test_its_folder_reads_back_as_it_was(trained, target):
    kind, run, _, figures = trained
    folder = run.folder.path
    if run.task.figures_file:
        record = json.loads((folder / run.task.figures_file).read_text())
        assert (record["step"], record["validation"]) == (run.steps, figures)
    if (folder / "streams.json").exists():
        described = json.loads((folder / "streams.json").read_text())
        assert (described["step"], described["validation"]) == (run.steps, figures)
        if "ranks" in described:
            assert described["parameters"] == run.parameters
            assert [ranks[0] for ranks in described["ranks"]] == figures["acceptance"]
            assert {len(ranks) for ranks in described["ranks"]} == {MAX_RANKS}
        for file in Path(target).iterdir():
            assert (folder / file.name).read_bytes() == file.read_bytes()
        return
    checkpoint = Checkpoint.load(target, torch.float32)
    if kind.task is ModelTask:
        read = Checkpoint.load(str(folder), torch.float32)
        assert torch.equal(read.draft_ids, run.task.ids)
        named = read.model.state_dict()
    else:
        head = load_head(str(folder), checkpoint, torch.float32)
        own, read = run.task.config, head.config
        # Medusa's files have no more.
        assert read == own or (read.slots, read.blocks) == (own.slots, own.blocks)
        if getattr(run.task, "ids", None) is not None:
            assert torch.equal(head.ids, run.task.ids)
        named = head.state_dict()
    for name, weight in run.weights.items():
        own = weight.detach().half() if kind.settings.half else weight.detach()
        torch.testing.assert_close(named[name].float(), own.float())


def bundle_of(target: str, run: Training, folder: Path) -> Bundle:
    own = str(run.folder.path)
    if isinstance(run.task, ModelTask):
        said = "drafter was trained with its own"
        refused(OptionError, said, target, drafter=own, draft_vocab=20)
        return exported(target, folder, drafter=own, **FLOATS)
    if (run.folder.path / "streams.json").exists():
        return exported(own, folder, **FLOATS)
    return exported(target, folder, head=own, **FLOATS)


def test_it_drafts_more_and_changes_no_text(trained, target, tmp_path):
    kind, run, _, _ = trained
    if not kind.ways:
        return
    method = kind.task.__module__.split(".")[-2]
    bundle = bundle_of(target, run, tmp_path / "bundle")
    with jetdraft.load(bundle.path, threads=1) as model:
        for way in kind.ways:
            if way.get("drafting", {}).get("prune_threshold") is not None:
                assert bundle.target.halves is not None
            drafts = [{"method": method, "exact": e, **way} for e in (True, False)]
            how = {"prompt": PERIOD * 2, "max_new_tokens": 60}
            least = kind.tokens if way is kind.ways[0] else kind.others
            for found in same_text(model, drafts, [{}], **how):
                assert found.stats.tokens_per_pass >= least
