"""Trained drafters of blocks draft better than untrained ones, and mistakes cost it."""

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.tiny import WORDS, llama_config, save_checkpoint
from tests.train.periodic import made
from tests.train.test_block_training import QUICK, SETTINGS, TASKS

LINE = " ".join(random.Random(4).choices(WORDS, k=14)) + " "
LONGER = replace(
    QUICK, steps=250, batch_size=4, sequence_length=64, learning_rate=8e-3,
    validate_every=250,
)  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder, a target that knows the line wherever it begins, and the text."""
    folder = tmp_path_factory.mktemp("drafting")
    text = folder / "text.txt"
    text.write_text(LINE * 120)
    base = save_checkpoint(folder / "base", llama_config(num_hidden_layers=5))
    model = AutoModelForCausalLM.from_pretrained(base)
    words = AutoTokenizer.from_pretrained(base)
    ids = torch.tensor(words(LINE * 25)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(250):
        starts = torch.randint(len(ids) - 120, (3,), generator=generator).tolist()
        batch = torch.stack([ids[start : start + 120] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "tuned")
    words.save_pretrained(folder / "tuned")
    return folder, str(folder / "tuned"), text


@pytest.fixture(scope="module", params=TASKS)
def trained(request, world):
    """The kind, and its training, whose folder reads back as it was."""
    folder, target, text = world
    kind, seen = request.param, []
    settings = replace(SETTINGS[kind], layers=1, block_rows=5, anchors=16)
    run = made(TASKS[kind], target, folder / kind, [text], settings, LONGER)
    figures = run.run(seen.append)
    assert figures["tokens_per_pass"] > 2 > 1.5 > seen[0].validation["tokens_per_pass"]
    checkpoint = Checkpoint.load(target, torch.float32)
    drafter = load_head(str(folder / kind), checkpoint, torch.float32)
    assert drafter.config == run.task.config
    named = dict(drafter.named_parameters())
    for name, weight in run.weights.items():
        torch.testing.assert_close(named[name], weight.detach())
    return kind, folder / kind


def drafted(world, kind, head, folder, **how):
    """The figures of a greedy text, which must be the text of plain decoding."""
    made = export(
        world[1],
        folder / "bundle",
        options=ExportOptions(
            Recipe("none"), Recipe("none"), capacity=128, max_width=16, fast=True
        ),
        head=str(head),
    )  # fmt: skip
    return decoded(made.path, kind, **how)


def decoded(bundle, kind, prepare=lambda model: None, **how):
    with jetdraft.load(bundle, threads=1) as model:
        prepare(model)
        ways = {"max_new_tokens": 60, "ignore_eos": True, **how}
        plain = model.generate(2 * LINE, method="none", **ways)
        options = {"num_draft_tokens": 4, "drafting": {"confidence": 0.0}}
        result = model.generate(2 * LINE, method=kind, **ways, **options)
        assert result.token_ids == plain.token_ids
        return result.stats


@pytest.fixture(scope="module")
def right(world, trained, tmp_path_factory):
    """The tokens per pass of the trained drafter, and its bundle."""
    folder = tmp_path_factory.mktemp("right")
    stats = drafted(world, trained[0], trained[1], folder)
    return stats.tokens_per_pass, folder / "bundle"


def test_a_trained_drafter_is_right_more_often(right):
    assert right[0] > 2.5


def test_the_same_when_sampled(trained, right):
    stats = decoded(right[1], trained[0], temperature=0.7, seed=3)
    assert stats.tokens_per_pass > 2


def test_a_second_step_does_not_make_it_worse(trained, right):
    with jetdraft.load(right[1], threads=1) as model:
        result = model.generate(
            2 * LINE, method=trained[0], max_new_tokens=60, ignore_eos=True,
            num_draft_tokens=4, drafting={"steps": 2, "confidence": 0.0},
        )  # fmt: skip
    assert result.stats.tokens_per_pass > 0.95 * right[0]


def test_kept_rows_of_a_block_cost_acceptance(trained, right):
    """A cursor that moves over a block leaves rows of masks among the context."""

    def leak(model):
        graph, kept = model.parts.drafter, [0]
        run = graph.run

        def keep(*args, **options):
            graph.cache.length += kept[0]
            answer = run(*args, **options)
            graph.cache.length -= kept[0]
            kept[0] = min(kept[0] + 2, 12)
            return answer

        graph.run = keep

    stats = decoded(right[1], trained[0], prepare=leak, max_new_tokens=40)
    assert stats.tokens_per_pass < 0.95 * right[0]


def test_wrong_positions_cost_acceptance(trained, right, tmp_path):
    """A block that begins five places too late, in the graph of the trained drafter."""
    others = shutil.ignore_patterns("bundle.json", "profiles")
    folder = shutil.copytree(right[1], tmp_path / "late", ignore=others)
    model = onnx.load(folder / "drafter.onnx", load_external_data=False)
    first = {(n.op_type, *n.input[:1]): n for n in model.graph.node}
    [last] = first["Slice", "position_ids"].output
    late = onnx.numpy_helper.from_array(np.array(1 + 5), "late")
    model.graph.initializer.append(late)
    first["Add", last].input[1] = late.name
    onnx.save(model, folder / "drafter.onnx")
    replace(Bundle.open(right[1]), path=folder, files={}).save()
    stats = decoded(folder, trained[0])
    assert stats.tokens_per_pass < 0.8 * right[0], stats.tokens_per_pass


def test_other_taps_cost_acceptance(world, trained, right, tmp_path):
    """Ids that are off by one name other states of the target."""
    if trained[0] != "dflash":
        pytest.skip("it reads no states")

    head = shutil.copytree(trained[1], tmp_path / "head")
    fields = json.loads((head / "config.json").read_text())
    own = fields["dflash_config"]
    own["target_layer_ids"] = [i + 1 for i in own["target_layer_ids"]]
    (head / "config.json").write_text(json.dumps(fields))
    stats = drafted(world, trained[0], head, tmp_path)
    assert stats.tokens_per_pass < 0.8 * right[0], stats.tokens_per_pass
