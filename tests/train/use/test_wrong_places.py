"""The loss of learning from use counts wrong places, and nothing else."""

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from jetdraft.learning.lessons import Lesson
from jetdraft.train.teacher import logits_at
from jetdraft.train.use.students import LessonBatch, compare_missed
from tests.tiny import llama_config


def lesson(tokens, places, ids, logits):
    return Lesson(
        np.array(tokens), np.array(places), np.array(ids), np.array(logits, np.float32)
    )


ONE = lesson([5, 6, 7, 8], [1, 3], [[6, 2], [8, 9]], [[2.0, 1.0], [0.5, 0.25]])
OTHER = lesson([1, 3], [1], [[3, 4, 5]], [[1.0, 0.0, -1.0]])


PLACES = [(0, 1), (0, 3), (1, 1)]
"""Row and place of all three wrong places."""


def expected(logits, target, columns=slice(None)):
    """The cross entropy of one place; `target` are logits by token."""
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
    assert torch.allclose(
        compare_missed(logits, LessonBatch.of([ONE, OTHER]), None).loss, wanted
    )


def test_a_cut_vocabulary_is_compared_within_itself():
    """The second place has no token that can be drafted."""
    torch.manual_seed(0)
    logits = torch.randn(3, 12, requires_grad=True)
    can_draft = torch.zeros(12).bool()
    can_draft[[2, 3, 4, 6]] = True
    found = compare_missed(logits, LessonBatch.of([ONE, OTHER]), can_draft)
    targets = {6: 2.0, 2: 1.0}, {3: 1.0, 4: 0.0}
    pairs = zip(logits[[0, 2]], targets, strict=True)
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
