import json
import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.methods.dflash.task import DFlashSettings, DFlashTask
from jetdraft.methods.diffusion.task import DiffusionSettings, DiffusionTask
from jetdraft.train.blocks import Blocks, block_mask, block_starts
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.teacher import Lesson
from tests import same_text
from tests.tiny import VOCAB_SIZE, WORDS, exported, llama_config, save_checkpoint
from tests.train.periodic import QUICK, descend, made

SETTINGS = {
    "dflash": DFlashSettings(layers=1, block_rows=4, anchors=6),
    "diffusion": DiffusionSettings(layers=1, block_rows=3, anchors=6, hidden_size=32),
}
TASKS = {"dflash": DFlashTask, "diffusion": DiffusionTask}
LINE = " ".join(random.Random(4).choices(WORDS, k=14)) + " "
LONGER = replace(QUICK, steps=250, validate_every=250, learning_rate=8e-3)
LONGER = replace(LONGER, batch_size=4, sequence_length=64)


def prepare(target, output, text, kind, options=QUICK, **changes):
    settings = replace(SETTINGS[kind], **changes)
    return made(TASKS[kind], target, output, [text], settings, options)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("blocks") / "target"
    return str(save_checkpoint(folder, llama_config(num_hidden_layers=5)))


def test_a_dflash_folder_has_the_published_names(target, text, tmp_path):
    run = prepare(target, tmp_path / "out", text, "dflash", half=True)
    fields, tensors = run.task.contents(run, run.weights, None)
    assert fields["architectures"] == ["DFlashDraftModel"]
    assert (fields["block_size"], fields["num_target_layers"]) == (4, 5)
    # Three outputs of five layers, 1 + i * (5 - 4) / 2.
    assert fields["dflash_config"] == {
        "mask_token_id": run.task.config.mask_token,
        "target_layer_ids": [1, 2],
    }
    texts = run.corpus.training
    assert all(run.task.config.mask_token not in text.ids for text in texts)
    assert tensors["fc.weight"].shape == (64, 128)
    assert tensors["fc.weight"].dtype == torch.float16
    others = {n for n in tensors if not n.startswith("layers.0.")}
    assert others == {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert tensors["layers.0.self_attn.q_norm.weight"].shape == (16,)


def test_processes_draw_the_blocks_of_one(target, text, tmp_path):
    run = prepare(target, tmp_path / "out", text, "dflash")
    run.step = 3
    alone = SimpleNamespace(process_index=0, num_processes=1)

    def drawn(accelerator, batch):
        run.accelerator = accelerator
        return run.task.blocks(run, batch, learns=True)

    batch = run.corpus.batch(3, 2)
    whole = drawn(alone, batch)
    for part in (0, 1):
        own = run.corpus.batch(3, 2, part, 2)
        blocks = drawn(SimpleNamespace(process_index=part, num_processes=2), own)
        assert torch.equal(blocks.anchors[0], whole.anchors[part])
        assert torch.equal(blocks.known[0], whole.known[part])
    run.step = 4
    assert not torch.equal(drawn(alone, batch).anchors, whole.anchors)


def labelled(*learned):
    labels = torch.tensor([[5 if one else IGNORED for one in row] for row in learned])
    return Batch(torch.full_like(labels, 5), labels)


def test_blocks_begin_before_learned_tokens():
    batch = labelled([0, 0, 0, 1, 1, 1, 0, 0], [1] * 8)
    assert block_starts(batch.labels[0]).tolist() == [2, 3, 4]
    assert block_starts(batch.labels[1]).tolist() == [1, 2, 3, 4, 5, 6]
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    blocks = Blocks.draw(batch, 5, 4, 0.5, generators)
    assert blocks.is_real.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert sorted(blocks.anchors[0, :3].tolist()) == [2, 3, 4]
    assert len(set(blocks.anchors[1].tolist())) == 5
    assert int(blocks.known.max()) <= 3
    spread = Blocks.spread(batch, 3)
    assert spread.anchors.tolist() == [[2, 3, 4], [1, 3, 6]]
    assert not spread.known.any()


def test_a_share_of_the_blocks_has_known_tokens():
    batch = labelled([1] * 400)
    for share in (0.0, 0.25, 1.0):
        blocks = Blocks.draw(batch, 300, 4, share, [torch.Generator().manual_seed(1)])
        shown = (blocks.known > 0).float().mean().item()
        assert shown == pytest.approx(share, abs=0.08)
    assert set(blocks.known.flatten().tolist()) == {1, 2, 3}


def test_a_block_sees_its_context_and_itself():
    last = torch.tensor([[0, 2]])
    mask = block_mask(last, 2, 4, context_asks=False)
    assert mask.int().tolist() == [[[
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1],
    ]]]  # fmt: skip
    whole = block_mask(last, 2, 4, context_asks=True)
    assert torch.equal(whole[:, :, 4:], mask)
    assert torch.equal(whole[0, 0, :4, :4], torch.ones(4, 4).tril().bool())
    assert not whole[0, 0, :4, 4:].any()


@pytest.mark.parametrize("kind", TASKS)
def test_many_blocks_in_one_pass_are_the_blocks_alone(target, text, tmp_path, kind):
    run = prepare(target, tmp_path / "out", text, kind)
    pupil = run.module.eval()
    torch.manual_seed(2)
    ids = torch.randint(1, VOCAB_SIZE, (1, 12))
    states = [torch.randn(1, 12, 64) for _ in run.task.config.taps]
    logits, known = torch.randn(1, 12, VOCAB_SIZE), torch.ones(1, 12, dtype=torch.bool)
    lesson = Lesson(ids, ids, states, logits, logits, known)
    anchors, shown = torch.tensor([[3, 7, 9]]), torch.tensor([[0, 2, 1]])
    real = torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad():
        both = pupil(lesson, Blocks(anchors, shown, real))
        alone = [
            pupil(lesson, Blocks(*(x[:, i : i + 1] for x in (anchors, shown, real))))
            for i in range(3)
        ]
    for name in ("losses", "places", "right", "reached", "accepted"):
        wanted = sum(getattr(sums, name) for sums in alone)
        torch.testing.assert_close(getattr(both, name), wanted, rtol=0.02, atol=0.05)
    # Three guesses behind 3, one behind 9, and one behind 10: the next is outside.
    assert both.places.tolist() == [3, 1, 1]
    later = lesson.ids.clone()
    later[:, 4:] = 1  # what follows an anchor must not change its guesses
    with torch.no_grad():
        first = Blocks(anchors[:, :1], shown[:, :1], real[:, :1])
        one = pupil(lesson, first)
        other = pupil(replace(lesson, ids=later), first)
    torch.testing.assert_close(one.losses, other.losses)


def test_the_loss_counts_near_tokens_most():
    def total(losses):
        return DFlashTask().total(SimpleNamespace(losses=losses), torch.ones(3)).item()

    alone = [total(torch.eye(3)[i]) for i in range(3)]
    assert alone[0] == 1.0 > alone[1] > alone[2] > 0.2
    assert total(torch.ones(3)) == pytest.approx(sum(alone))


def test_the_text_or_the_target_is_the_teacher(target, text, tmp_path):
    ids, logits = torch.full((1, 6), 9), torch.zeros(1, 6, VOCAB_SIZE)
    lesson = Lesson(ids, ids, [], logits, logits, torch.ones(1, 6, dtype=torch.bool))
    real = torch.ones(1, 1, dtype=torch.bool)
    blocks, guesses = Blocks(torch.tensor([[2]]), torch.tensor([[0]]), real), []
    for loss in ("forward-kl", "text"):
        run = prepare(target, tmp_path / loss, text, "diffusion", loss=loss)
        head = run.module.eval().drafter.lm_head
        handle = head.register_forward_hook(lambda *call: guesses.append(call[2]))
        with torch.no_grad():
            sums = run.module(lesson, blocks)
        handle.remove()
        assert sums.places.tolist() == [1, 1, 1]
        lost = -guesses[-1].float().log_softmax(-1)
        wanted = lost[:, 9] if loss == "text" else lost.mean(-1)
        torch.testing.assert_close(sums.losses, wanted, rtol=1e-2, atol=1e-2)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
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
        descend(optimizer, model(input_ids=batch, labels=batch).loss)
    model.save_pretrained(folder / "tuned")
    words.save_pretrained(folder / "tuned")
    return folder, str(folder / "tuned"), text


@pytest.fixture(scope="module", params=TASKS)
def trained(request, world):
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
    bundle = exported(world[1], folder / "bundle", head=head, capacity=128)
    return decoded(bundle.path, kind, **how)


def decoded(bundle, kind, prepare=lambda model: None, steps=1, **how):
    draft = {"method": kind, "num_draft_tokens": 4}
    draft["drafting"] = {"confidence": 0.0, "steps": steps}
    with jetdraft.load(bundle, threads=1) as model:
        prepare(model)
        how = {"max_new_tokens": 60, **how}
        [result] = same_text(model, [draft], [how], prompt=2 * LINE)
        return result.stats


@pytest.fixture(scope="module")
def right(world, trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("right")
    stats = drafted(world, trained[0], trained[1], folder)
    return stats.tokens_per_pass, folder / "bundle"


def test_a_trained_drafter_is_right_more_often(right):
    assert right[0] > 2.5


def test_it_is_as_right_when_sampled_or_with_a_second_step(trained, right):
    sampled = decoded(right[1], trained[0], temperature=0.7, seed=3)
    assert sampled.tokens_per_pass > 2
    assert decoded(right[1], trained[0], steps=2).tokens_per_pass > 0.95 * right[0]


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
    if trained[0] != "dflash":
        pytest.skip("it reads no states")

    head = shutil.copytree(trained[1], tmp_path / "head")
    fields = json.loads((head / "config.json").read_text())
    own = fields["dflash_config"]
    own["target_layer_ids"] = [i + 1 for i in own["target_layer_ids"]]
    (head / "config.json").write_text(json.dumps(fields))
    stats = drafted(world, trained[0], head, tmp_path)
    assert stats.tokens_per_pass < 0.9 * right[0], stats.tokens_per_pass
