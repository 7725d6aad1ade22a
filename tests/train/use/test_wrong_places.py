"""The loss of learning from use counts wrong places, and nothing else."""

import numpy as np
import torch
import torch.nn.functional as F

from jetdraft.kept.lessons import Lesson
from jetdraft.train.use.wrong_places import LessonBatch, missed


def lesson(tokens, places, ids, logits):
    return Lesson(
        np.array(tokens), np.array(places), np.array(ids), np.array(logits, np.float32)
    )


ONE = lesson([5, 6, 7, 8], [1, 3], [[6, 2], [8, 9]], [[2.0, 1.0], [0.5, 0.25]])
OTHER = lesson([1, 3], [1], [[3, 4, 5]], [[1.0, 0.0, -1.0]])


def test_the_mean_over_wrong_places():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 12)
    batch = LessonBatch.of([ONE, OTHER])
    terms = [
        F.cross_entropy(
            logits[row, place - 1],
            torch.zeros(12).index_put(
                (torch.tensor(ids),), torch.tensor(target).softmax(0)
            ),
        )
        for row, place, ids, target in (
            (0, 1, [6, 2], [2.0, 1.0]),
            (0, 3, [8, 9], [0.5, 0.25]),
            (1, 1, [3, 4, 5], [1.0, 0.0, -1.0]),
        )
    ]
    assert torch.allclose(missed(logits, batch).loss, torch.stack(terms).mean())


def test_no_gradient_elsewhere():
    logits = torch.randn(2, 4, 12, requires_grad=True)
    missed(logits, LessonBatch.of([ONE, OTHER])).loss.backward()
    touched = logits.grad.abs().sum(-1).nonzero().tolist()
    assert touched == [[0, 0], [0, 2], [1, 0]]


def test_right_where_the_best_token_is_the_targets():
    logits = torch.zeros(1, 4, 12)
    logits[0, 0, 6] = logits[0, 2, 9] = 1.0
    assert missed(logits, LessonBatch.of([ONE])).right == 0.5
