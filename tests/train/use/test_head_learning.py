"""A head learns from use: the states it reads are computed again from the texts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError, OptionError
from jetdraft.export.drafters import head_arrays
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.learning.lessons import Lesson
from jetdraft.methods.eagle.task import EagleSettings, EagleTask
from jetdraft.recipe import Recipe
from jetdraft.train.task import TrainingOptions
from jetdraft.train.use.learning import Pace, UseOptions, UseTraining
from jetdraft.train.use.students import UNROLLED_STEPS, load_student
from tests.train.periodic import PERIOD, made, nothing, write_periodic

QUICK = TrainingOptions(steps=12, batch_size=2, sequence_length=48, validate_every=12)
LAYERS = 4
SETTINGS = EagleSettings(draft_vocabulary=40)


@pytest.fixture(scope="module")
def world(target, tmp_path_factory):
    """The folder of a bundle, and of its head, which has learned little."""
    folder = tmp_path_factory.mktemp("world")
    text = write_periodic(folder / "text.txt")
    made(EagleTask, target, folder / "head", [text], SETTINGS, QUICK).run(nothing)
    recipes = Recipe("none"), Recipe.parse("int8-rtn-b32")
    options = ExportOptions(*recipes, capacity=128, max_width=16, fast=True)
    export(target, folder / "bundle", options=options, head=str(folder / "head"))
    return folder


def test_an_export_of_the_same_head_changes_nothing(world, target):
    bundle, checkpoint = Bundle.open(world / "bundle"), load(target)
    head = load_head(str(world / "head"), checkpoint, torch.float32)
    assert head_arrays(bundle, checkpoint, head) == {}


def load(target):
    return Checkpoint.load(target, torch.float32)


def test_a_wrong_place_counts_in_each_step_that_reaches_it(world):
    """Row t of step i says what a draft from row t says of token t + 2 + i."""
    student = load_student(Bundle.open(world / "bundle"))
    head = student.load({})
    tokens = np.arange(1, 20)
    _, first, *_ = student.bundle.draft_vocabulary()
    ids, logits = np.array([[first, 0]]), np.array([[2.0, 1.0]], np.float32)
    counts = [
        student.missed(head, [Lesson(tokens, np.array([place]), ids, logits)]).places
        for place in (1, 2, 4, 12)
    ]
    assert counts == [0, 1, 3, UNROLLED_STEPS]


def test_it_learns_and_the_text_stays(world):
    """More of its tokens are accepted after the swap, as in the training's figures."""
    bundle, learned = Bundle.open(world / "bundle"), world / "learned"
    prompts = [(PERIOD * 3)[start:60] for start in range(0, 40, 2)]
    how = {"max_new_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    drafted = {"method": "eagle", "num_draft_tokens": 3, **how}
    with jetdraft.load(world / "bundle", threads=1, learn=learned) as model:
        plain = [model.generate(p, method="none", **how).token_ids for p in prompts]

        def rate():
            results = [model.generate(p, **drafted) for p in prompts]
            assert [result.token_ids for result in results] == plain
            shares = [r.stats.by_method["eagle"] for r in results]
            return sum(s.accepted_tokens for s in shares) / sum(
                s.evaluated_tokens for s in shares
            )

        before = rate()
        options = UseOptions(steps=60, learning_rate=1e-2)
        figures = UseTraining(load_student(bundle), learned, options).run(Pace())
        assert figures.after.right > figures.before.right
        assert figures.name is not None
        rates = [rate() for _ in range(3)]
        assert model.parts.learning.weights.version > 0
    assert max(rates) > before + 0.1


def test_what_it_needs(world, target):
    bundle = Bundle.open(world / "bundle")
    with pytest.raises(CheckpointError, match=r"name it with --target"):
        load_student(bundle, target=str(world / "no"))
    with pytest.raises(CheckpointError, match=r"name it with --from"):
        load_student(bundle, str(world / "no"))
    with pytest.raises(CheckpointError):
        load_student(bundle, target)
    graphs = {name: graph for name, graph in bundle.graphs.items() if name == "target"}
    with pytest.raises(OptionError, match="only a drafter model, or a head"):
        load_student(replace(bundle, graphs=graphs))
