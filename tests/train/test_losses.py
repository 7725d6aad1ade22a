"""Losses are the plain formulas: streams', DistillSpec's, and of learning from use."""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streams import SHARED, StreamSettings
from jetdraft.learning.lessons import Lesson
from jetdraft.methods.stream.task import STREAM_WEIGHT, StreamTask, compute_losses
from jetdraft.train import labels as module
from jetdraft.train.attention import IMPLEMENTATION
from jetdraft.train.data import IGNORED, Example, collate
from jetdraft.train.labels import DIVERGENCES, PREDICTED_TOKENS, Labels, rates_by_place
from jetdraft.train.students import LessonBatch, compare_missed
from jetdraft.train.teacher import logits_at
from tests.tiny import llama_config, save_checkpoint, save_probes

GAMMA = 3
ONES = torch.ones(1 + GAMMA)
SETTINGS = StreamSettings(gamma=GAMMA, layers=2, lora_rank=4, prune_rank=2)
SEQUENCES = (
    Example([5, 9, 200, 31, 8, 77, 120, 4, 66], [False] * 4 + [True] * 5),
    Example([17, 3, 90, 41, 250, 6, 11], [False] * 3 + [True] * 4),
)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    folder = save_checkpoint(tmp_path_factory.mktemp("loss") / "model", llama_config())
    loaded = Checkpoint.load(str(save_probes(folder, SETTINGS)), torch.float32)
    found = loaded.add_probes(1.0)
    loaded.model.set_attn_implementation(IMPLEMENTATION)
    return found


def one_carrier(streamed, ids):
    rows = len(ids)
    read, last = torch.tensor([ids]), torch.tensor([rows - 1])
    carried = last.expand(GAMMA), torch.arange(GAMMA), last
    logits, early, _ = streamed(
        read, torch.arange(rows)[None], *carried, early=last, use_cache=False
    )
    return logits[0], early[0, 0]


def by_hand(streamed):
    """Per guess 0..gamma, and for the early exit last, all cross entropies."""
    lost = [[] for _ in range(GAMMA + 2)]
    for ids, learned in ((row.ids, row.learned) for row in SEQUENCES):
        for place in range(len(ids)):
            if not (place + 1 < len(ids) and learned[place + 1]):
                continue
            logits, early = one_carrier(streamed, ids[: place + 1])
            for ahead, guess in enumerate(logits[: len(ids) - place - 1], start=1):
                found = -guess.log_softmax(-1)[ids[place + ahead]]
                lost[ahead - 1].append(found.item())
            lost[-1].append(-early.log_softmax(-1)[ids[place + 1]].item())
    return [math.fsum(each) / len(each) for each in lost]


def test_the_loss_is_the_formula(streamed):
    with torch.no_grad():
        found = compute_losses(streamed, collate(SEQUENCES), GAMMA)
        wanted = by_hand(streamed)
    got = [found.main.item(), *found.streams.tolist(), found.early.item()]
    assert got == pytest.approx(wanted, abs=1e-5)


def masked(streamed, batch):
    size, rows = batch.ids.shape
    at = torch.arange(rows)
    carried = at.repeat_interleave(GAMMA), torch.arange(GAMMA).repeat(rows), at
    places = at.expand(size, rows)
    logits, early, _ = streamed(batch.ids, places, *carried, early=at, use_cache=False)
    guesses = logits[:, rows:].unflatten(1, (rows, GAMMA))
    labels = torch.cat([batch.labels, torch.full((size, GAMMA + 1), IGNORED)], 1)
    main = labels[:, 1 : rows + 1]

    def mean(scores, wanted):
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())

    lost = mean(logits[:, :rows], main) + mean(early, main)
    for stream in range(GAMMA):
        wanted = labels[:, stream + 2 : rows + stream + 2]
        wanted = wanted.where(main != IGNORED, IGNORED)
        lost = lost + STREAM_WEIGHT * mean(guesses[:, :, stream], wanted)
    return lost


def test_gradients_are_those_of_streams_on_all_rows(streamed):
    batch, gradients = collate(SEQUENCES), []
    for loss in (
        lambda: masked(streamed, batch),
        lambda: compute_losses(streamed, batch, GAMMA).total(SHARED, ONES),
    ):
        streamed.requires_grad_(True).zero_grad()
        loss().backward()
        gradients.append({n: w.grad.clone() for n, w in streamed.named_parameters()})
    streamed.requires_grad_(False)
    assert gradients[0]["streams.embeddings"].abs().min() > 0
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)


def test_the_mean_over_parts_of_a_batch_is_that_of_the_batch(streamed):
    task = StreamTask(StreamSettings(mode=SHARED, gamma=GAMMA))
    every = torch.tensor([5 + 4, 4 + 3, 3 + 2, 2 + 1])
    two = SimpleNamespace(processes=2, sum_over_processes=lambda places: every)
    one = SimpleNamespace(processes=1, sum_over_processes=lambda places: places)
    with torch.no_grad():
        whole = task.loss(one, streamed, collate(SEQUENCES))
        parts = [task.loss(two, streamed, collate([part])) for part in SEQUENCES]
    assert torch.stack(parts).mean() == pytest.approx(whole.item(), abs=1e-5)


def test_only_rows_with_a_learned_successor_carry_streams(streamed):
    """The longest completion has five tokens: after the fourth to the eighth."""
    passes = []
    handle = streamed.register_forward_pre_hook(lambda _, args: passes.append(args))
    with torch.no_grad():
        compute_losses(streamed, collate(SEQUENCES), GAMMA)
    handle.remove()
    ((_, _, probe_rows, probe_ids, keep),) = passes
    assert probe_rows[:, ::GAMMA].tolist() == [[3, 4, 5, 6, 7], [2, 3, 4, 5, 0]]
    assert probe_ids.tolist() == [0, 1, 2] * 5
    assert keep.tolist() == [2, 3, 4, 5, 6, 7]


def pair(rows: int = 6, tokens: int = 9):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, rows, tokens, generator=generator, dtype=torch.float64)
    return (2 * logits).log_softmax(-1)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_it_is_zero_for_equal_distributions_only_and_has_its_gradients(name):
    wanted, got = pair()
    apart = DIVERGENCES[name](wanted, got, 0.3)
    assert apart.shape == (6,)
    assert (apart > 0.01).all()
    assert DIVERGENCES[name](wanted, wanted, 0.3).abs().max() < 1e-12
    logits = got.clone().requires_grad_(True)
    torch.autograd.gradcheck(
        lambda x: DIVERGENCES[name](wanted, x.log_softmax(-1), 0.3), logits
    )


def test_jensen_shannon_goes_from_one_divergence_to_the_other():
    """For a small beta it is beta times the forward KL; for a large one, the other."""
    wanted, got = pair()
    js = DIVERGENCES[module.JENSEN_SHANNON]
    for beta, other in ((1e-6, "forward-kl"), (1 - 1e-6, "reverse-kl")):
        small, expected = min(beta, 1 - beta), DIVERGENCES[other](wanted, got, 0.0)
        torch.testing.assert_close(
            js(wanted, got, beta) / small, expected, rtol=1e-2, atol=1e-3
        )


def exact(wanted):
    ones = torch.ones(len(wanted), dtype=wanted.dtype)
    return Labels(wanted, ones, ones.bool())


def test_what_is_not_accepted_is_the_total_variation():
    wanted, got = pair()
    accepted = exact(wanted).accepted(got)
    torch.testing.assert_close(accepted, 1.0 - DIVERGENCES["tv"](wanted, got, 0.0))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_likeliest_tokens_and_the_rest_are_a_bound(name):
    """Tokens that count as one cannot differ; with all tokens the bound is exact."""
    wanted, got = pair()
    apart = DIVERGENCES[name](wanted, got, 0.5)
    before = torch.zeros(6, dtype=torch.float64)
    for kept in (1, 4, 8):
        best = wanted.topk(kept, dim=-1)
        labels = Labels(
            module.add_rest(best.values),
            torch.ones(6),
            torch.ones(6).bool(),
            best.indices,
        )
        bound = DIVERGENCES[name](labels.wanted, labels.binned(got), 0.5)
        assert (bound > before - 1e-9).all()
        assert (bound < apart + 1e-9).all()
        before = bound
    torch.testing.assert_close(before, apart)


def test_drafts_by_place_are_counted_from_every_place():
    texts = [torch.tensor([1.0, 0.5, 1.0, 0.2, 0.9, 0.4]), torch.tensor([0.3])]
    accepted, reached = [0.0] * PREDICTED_TOKENS, [0.0] * PREDICTED_TOKENS
    for text, place in product(texts, range(PREDICTED_TOKENS)):
        for start in range(len(text) - place):
            before = text[start : start + place].prod().item()
            reached[place] += before
            accepted[place] += before * text[start + place].item()
    expected = [a / r for a, r in zip(accepted, reached, strict=True)]
    assert rates_by_place(texts) == pytest.approx(expected, abs=1e-4)
    assert rates_by_place([torch.tensor([1.0, 0.5, 1.0])]) == [0.8333, 0.6667, 1.0, 0.0]
    assert module.tokens_per_pass([0.5, 0.5]) == 1.75


def lesson(tokens, places, ids, logits):
    return Lesson(
        np.array(tokens), np.array(places), np.array(ids), np.array(logits, np.float32)
    )


ONE = lesson([5, 6, 7, 8], [1, 3], [[6, 2], [8, 9]], [[2.0, 1.0], [0.5, 0.25]])
OTHER = lesson([1, 3], [1], [[3, 4, 5]], [[1.0, 0.0, -1.0]])

PLACES = [(0, 1), (0, 3), (1, 1)]
"""Row and place of all three wrong places."""


def expected(logits, target, columns=slice(None)):
    wanted = torch.full_like(logits, -torch.inf)
    for token, logit in target.items():
        wanted[token] = logit
    return F.cross_entropy(logits[columns], wanted[columns].softmax(0))


def test_the_mean_over_wrong_places():
    torch.manual_seed(0)
    logits = torch.randn(3, 12)
    targets = {6: 2.0, 2: 1.0}, {8: 0.5, 9: 0.25}, {3: 1.0, 4: 0.0, 5: -1.0}
    terms = [expected(*pair) for pair in zip(logits, targets, strict=True)]
    wanted = torch.stack(terms).mean()
    loss = compare_missed(logits, LessonBatch.of([ONE, OTHER]), None).loss
    assert torch.allclose(loss, wanted)


def test_a_cut_vocabulary_is_compared_within_itself():
    torch.manual_seed(0)
    logits = torch.randn(3, 12, requires_grad=True)
    can_draft = torch.zeros(12).bool()
    can_draft[[2, 3, 4, 6]] = True
    found = compare_missed(logits, LessonBatch.of([ONE, OTHER]), can_draft)
    pairs = zip(logits[[0, 2]], ({6: 2.0, 2: 1.0}, {3: 1.0, 4: 0.0}), strict=True)
    terms = [expected(*pair, can_draft) for pair in pairs]
    assert found.places == 2
    assert torch.allclose(found.loss, torch.stack(terms).mean())
    found.loss.backward()
    assert logits.grad[:, ~can_draft].abs().max() == 0
    assert logits.grad.isfinite().all()
    none = compare_missed(logits, LessonBatch.of([ONE, OTHER]), torch.zeros(12).bool())
    assert (none.loss.item(), none.right, none.places) == (0.0, 0.0, 0)


def test_the_lm_head_reads_the_rows_before_wrong_places_only():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama_config()).eval()
    read = []
    model.lm_head.register_forward_hook(lambda _, args, out: read.append(out.shape))
    batch = LessonBatch.of([ONE, OTHER])
    with torch.no_grad():
        found = logits_at(model, batch.tokens, batch.rows, batch.places - 1)
        whole = model(input_ids=batch.tokens).logits
    wanted = torch.stack([whole[row, place - 1] for row, place in PLACES])
    torch.testing.assert_close(found, wanted)
    assert [shape[:-1].numel() for shape in read] == [3, 8]


def test_right_where_the_best_token_is_the_targets():
    logits = torch.zeros(2, 12)
    logits[0, 6] = logits[1, 9] = 1.0
    assert compare_missed(logits, LessonBatch.of([ONE]), None).right == 0.5
