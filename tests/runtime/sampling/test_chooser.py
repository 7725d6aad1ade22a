"""A log probability depends on the row's logits alone."""

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Logprob, Sampling

VOCAB = 1000
RNG = np.random.default_rng(11)


def answer(logits, candidates=64):
    """An `Answer` as a graph would give it for these logits [n, vocab]."""
    logits = np.asarray(logits, np.float32)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :candidates]
    best = np.take_along_axis(logits, order, 1)
    total = np.log(np.exp(logits.astype(np.float64)).sum(1)).astype(np.float32)
    return Answer(order, best, total, logits)


def reference(logits, sampling):
    """The filtered distribution, written the plain way over one row."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = order[: sampling.top_k] if sampling.top_k else order
    p = np.exp(scaled[kept] - scaled[kept].max())
    p /= p.sum()
    if sampling.top_p < 1:
        length = int(np.count_nonzero(np.cumsum(p) < sampling.top_p)) + 1
        kept, p = kept[:length], p[:length]
    kept = kept[p >= sampling.min_p * p.max()]
    full = np.zeros(len(logits))
    weights = np.exp(scaled[kept] - scaled[kept].max())
    full[kept] = weights / weights.sum()
    return full


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7),
    Sampling(temperature=1.5),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_k=200),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02),
    # Here top-p alone does not close within the candidates, and min-p must not hide it.
    Sampling(temperature=1.0, top_p=0.5, min_p=0.01),
    Sampling(temperature=1.5, top_p=0.5, min_p=0.02),
    Sampling(temperature=1.2, top_p=0.7, min_p=0.01),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("spread", [0.3, 3.0], ids=["flat", "peaked"])
def test_draws_follow_the_filtered_softmax(sampling, spread):
    # Rows that need all logits take them one by one, so a large vocabulary is slow.
    vocab, draws = 250, 20000
    logits = np.random.default_rng(5).normal(size=vocab) * spread
    rows = answer(np.repeat(logits[None], 500, 0))
    counts = np.zeros(vocab)
    for start in range(0, draws, 500):
        chosen = Chooser(sampling).choose(rows, range(start, start + 500))
        counts += np.bincount(chosen, minlength=vocab)
    p = reference(logits.astype(np.float32), sampling)
    assert counts[p == 0].sum() == 0
    # Chi-square over cells of at least 10 expected draws, the others pooled.
    expected = p * draws
    large = expected >= 10
    seen = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = max(len(wanted) - 1, 1)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 8


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_candidates_choose_what_all_logits_choose(sampling, spread):
    logits = RNG.normal(size=(200, VOCAB)) * spread
    positions = range(200)
    few = Chooser(sampling).choose(answer(logits, 64), positions)
    all_ = Chooser(sampling).choose(answer(logits, VOCAB), positions)
    assert few == all_


@pytest.mark.parametrize("sampling", [*SETTINGS, Sampling()], ids=str)
def test_rows_do_not_depend_on_their_neighbours(sampling):
    logits = RNG.normal(size=(8, VOCAB)) * 2
    together = Chooser(sampling).choose(answer(logits), range(40, 48))
    alone = [
        Chooser(sampling).choose(answer(row[None]), [40 + i])[0]
        for i, row in enumerate(logits)
    ]
    assert together == alone


def test_greedy_takes_the_largest_and_ignores_the_seed():
    logits = RNG.normal(size=(20, VOCAB))
    for seed in (0, 1):
        chosen = Chooser(Sampling(seed=seed)).choose(answer(logits), range(20))
        assert chosen == logits.astype(np.float32).argmax(1).tolist()


def test_seeds_differ():
    logits = np.repeat(RNG.normal(size=(1, VOCAB)), 50, 0)
    first, second = (
        Chooser(Sampling(1.0, seed=seed)).choose(answer(logits), range(50))
        for seed in (1, 2)
    )
    assert first != second


def test_two_close_models_tend_to_choose_alike():
    """The coupling: agreement is far above that of independent draws."""
    logits = RNG.normal(size=(2000, VOCAB)) * 2
    near = logits + RNG.normal(size=logits.shape) * 0.3
    at = range(2000)
    coupled = Chooser(Sampling(1.0, seed=1))
    other = Chooser(Sampling(1.0, seed=2))
    p, q, independent = (
        np.array(chooser.choose(answer(values), at))
        for chooser, values in ((coupled, logits), (coupled, near), (other, near))
    )
    assert np.mean(p == q) > 0.6
    assert np.mean(p == q) > 3 * np.mean(p == independent)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"min_p": -0.1},
    ],
)
def test_out_of_range(wrong):
    with pytest.raises(OptionError, match="out of range"):
        Sampling(**wrong)


def test_the_last_bits_do_not_come_from_the_graphs_sum():
    logits = np.random.default_rng(0).normal(0, 3, (2, 279)).astype(np.float32)
    logits[1] = logits[0]
    order = np.argsort(-logits)[:, :5]
    sums = np.array([5.0, 6.0], np.float32)  # of a kernel that sums rows in two ways
    answer = Answer(order, np.take_along_axis(logits, order, 1), sums, logits)
    first, second = (Logprob.of(answer, row, 7, 3) for row in (0, 1))
    assert first == second
    whole = logits[0].astype(np.float64)
    expected = whole[[7, *order[0, :3]]] - np.log(np.exp(whole).sum())
    assert [first.logprob, *(value for _, value in first.top)] == pytest.approx(
        expected
    )
    assert [token for token, _ in first.top] == order[0, :3].tolist()
