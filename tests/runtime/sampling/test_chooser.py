"""A slow sampler that visits every token must choose what the fast one chooses."""

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.noise import gumbel
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Logprob, Sampling
from jetdraft.runtime.sampling.processors import (
    NEVER,
    Mask,
    Penalties,
    PenaltyProcessor,
    apply_changes,
    best_ids,
)
from tests import cases

VOCABULARIES = (64, 300, 5_000, 50_000)
ROWS = 6
FILTERS = [
    *({}, {"top_k": 1}, {"top_k": 100}, {"top_p": 0.9}, {"min_p": 0.05}),
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    # Here top-p alone does not close within the candidates, and min-p must not hide it.
    {"top_p": 0.5, "min_p": 0.01},
]
PENALTIES = Penalties(
    {3: 2.5, 11: -4.0, 60: 1.0}, repetition_penalty=1.3, frequency_penalty=0.4
)
PROMPT, OUTPUT = [1, 5, 8, 60], [9, 9, 12, 5]
DRAFT = [5, 9, 20, 20, 21]
every_spread = pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])


def answer(logits, candidates=64):
    order = np.argsort(-logits, axis=1, kind="stable")[:, :candidates]
    best = np.take_along_axis(logits, order, 1)
    shifted = np.exp(logits.astype(np.float64) - best[:, :1])
    total = best[:, 0] + np.log(shifted.sum(1)).astype(np.float32)
    return Answer(order, best, total, logits)


def penalized(logits):
    result = []
    for depth, row in enumerate(logits.copy()):
        output = OUTPUT + DRAFT[:depth]
        for token, bias in PENALTIES.biases.items():
            row[token] += np.float32(bias)
        for token in set(PROMPT + output):
            rate = np.float32(PENALTIES.repetition_penalty)
            row[token] = row[token] / rate if row[token] > 0 else row[token] * rate
        for token in set(output):
            times = np.float32(output.count(token))
            row[token] -= np.float32(PENALTIES.frequency_penalty) * times
        result.append(row)
    return np.stack(result)


def filtered(row, sampling):
    order = np.argsort(-row, kind="stable")
    scaled = row[order].astype(np.float64) / sampling.temperature
    kept = min(sampling.top_k or len(row), len(row))
    p = np.exp(scaled[:kept] - scaled[0])
    if sampling.top_p < 1:
        below = np.cumsum(p) < sampling.top_p * p.sum()
        kept = min(kept, int(np.count_nonzero(below)) + 1)
    if sampling.min_p > 0:
        passes = scaled >= scaled[0] + np.log(sampling.min_p)
        kept = min(kept, int(np.count_nonzero(passes)))
    return order[:kept], scaled[:kept]


def slow(logits, sampling, positions):
    chosen = []
    for row, position in zip(logits, positions, strict=True):
        if sampling.temperature == 0:
            chosen.append(int(np.argmax(row)))
            continue
        ids, scaled = filtered(row, sampling)
        noise = gumbel(sampling.seed, np.array([[position]]), ids[None])[0]
        chosen.append(int(ids[np.argmax(scaled + noise)]))
    return chosen


def spread_cases(spread, seed):
    generator = np.random.default_rng(seed)
    for vocab in VOCABULARIES:
        logits = generator.normal(size=(ROWS, vocab)) * spread
        yield vocab, logits.round(3).astype(np.float32)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@every_spread
def test_filters(spread, temperature, options):
    for seed, (_, logits) in enumerate(spread_cases(spread, 1)):
        sampling = Sampling(temperature, seed=seed, **options)
        positions = range(100 * seed, 100 * seed + ROWS)
        chosen = Chooser(sampling).choose(answer(logits), positions)
        assert chosen == slow(logits, sampling, positions)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@every_spread
def test_penalties(spread, temperature, options):
    for seed, (_, logits) in enumerate(spread_cases(spread, 2)):
        chooser = Chooser(
            Sampling(temperature, seed=seed, **options),
            [PenaltyProcessor(PENALTIES, PROMPT)],
        )
        rows = Rows.chain([OUTPUT[-1], *DRAFT])
        processed = chooser.process(answer(logits), rows, PROMPT + OUTPUT)
        positions, expected = range(8, 8 + ROWS), penalized(logits)
        chosen = chooser.choose(processed, positions)
        assert chosen == slow(expected, chooser.sampling, positions)
        np.testing.assert_allclose(processed.logits, expected, rtol=1e-6)


def test_penalties_before_any_output():
    ((_, logits),) = [case for case in spread_cases(0.01, 5) if case[0] == 5_000]
    sampling = Sampling(1.0)
    presence = PenaltyProcessor(Penalties(presence_penalty=1.0), PROMPT)
    chooser = Chooser(sampling, [presence])
    processed = chooser.process(answer(logits[:1]), Rows.chain([PROMPT[-1]]), PROMPT)
    assert chooser.choose(processed, [4]) == slow(logits[:1], sampling, [4])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@every_spread
def test_masks(spread, temperature, share):
    """The share of allowed tokens decides how the best of them are found."""
    for seed, (vocab, logits) in enumerate(spread_cases(spread, 3)):
        generator = np.random.default_rng(seed)
        allowed = generator.random((ROWS, vocab)) < share
        allowed[np.arange(ROWS), generator.integers(0, vocab, ROWS)] = True
        masked = apply_changes(answer(logits), list(map(Mask.of, allowed)))
        sampling = Sampling(temperature, seed=seed)
        chosen = Chooser(sampling).choose(masked, range(ROWS))
        assert chosen == slow(np.where(allowed, logits, NEVER), sampling, range(ROWS))
        assert allowed[np.arange(ROWS), chosen].all()


def test_the_whole_is_computed_only_if_it_is_read():
    ((_, logits),) = [case for case in spread_cases(4.0, 4) if case[0] == 50_000]
    processed = PenaltyProcessor(PENALTIES, PROMPT).process(
        answer(logits), Rows.chain([OUTPUT[-1], *DRAFT]), PROMPT + OUTPUT
    )
    Chooser(Sampling(0.3, top_k=20)).choose(processed, range(ROWS))
    assert not processed._fetch.__self__.is_filled
    assert np.array_equal(processed.logits, penalized(logits))


def test_of_equal_logits_the_lowest_ids_are_best():
    random = np.random.default_rng(3)
    for spread in (0.0, 0.3, 3.0):
        row = (random.standard_normal(2000) * spread).astype(np.float16)
        row = row.astype(np.float32)
        whole = np.argsort(-row, kind="stable")
        for count in (1, 64, 100, 1999, 2000):
            assert best_ids(row, count).tolist() == whole[:count].tolist()


@pytest.mark.parametrize(
    ("temperature", "options"),
    [(1.5, {}), (0.7, {}), (1.3, {"top_p": 0.8}), (0.9, FILTERS[5])],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.3, 3.0], ids=["flat", "peaked"])
def test_draws_follow_the_filtered_softmax(temperature, options, spread):
    vocab, draws, sampling = 250, 20000, Sampling(temperature, **options)
    logits = (np.random.default_rng(5).normal(size=vocab) * spread).astype(np.float32)
    rows, counts = answer(np.repeat(logits[None], 500, 0)), np.zeros(vocab)
    for start in range(0, draws, 500):
        chosen = Chooser(sampling).choose(rows, range(start, start + 500))
        counts += np.bincount(chosen, minlength=vocab)
    ids, scaled = filtered(logits, sampling)
    p = np.zeros(vocab)
    p[ids] = np.exp(scaled - scaled[0]) / np.exp(scaled - scaled[0]).sum()
    assert counts[p == 0].sum() == 0
    # Chi-square over cells of at least 10 expected draws, the others pooled.
    expected = p * draws
    large = expected >= 10
    seen = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    limit = freedom + 4 * np.sqrt(2 * freedom) + 8
    assert ((seen - wanted) ** 2 / wanted).sum() < limit


def test_two_close_models_tend_to_choose_alike():
    generator, at = np.random.default_rng(11), range(2000)
    logits = generator.normal(size=(2000, 1000)) * 2
    near = logits + generator.normal(size=logits.shape) * 0.3
    coupled, other = (Chooser(Sampling(1.0, seed=seed)) for seed in (1, 2))
    p, q, independent = (
        np.array(chooser.choose(answer(values.astype(np.float32)), at))
        for chooser, values in ((coupled, logits), (coupled, near), (other, near))
    )
    assert np.mean(p == q) > 0.6
    assert np.mean(p == q) > 3 * np.mean(p == independent)


@cases(
    "name, value",
    *(("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1)),
    *(("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.0), ("min_p", -0.1)),
)
def test_out_of_range(name, value):
    with pytest.raises(OptionError, match="out of range"):
        Sampling(**{name: value})


def test_the_last_bits_do_not_come_from_the_graphs_sum():
    logits = np.random.default_rng(0).normal(0, 3, (2, 279)).astype(np.float32)
    logits[1] = logits[0]
    given = answer(logits, 5)
    sums = np.array([5.0, 6.0], np.float32)  # of a kernel that sums rows in two ways
    given = Answer(given.candidates, given.candidate_logits, sums, logits)
    first, second = (Logprob.of(given, row, 7, 3) for row in (0, 1))
    assert first == second
    whole, best = logits[0].astype(np.float64), given.candidates[0, :3].tolist()
    expected = whole[[7, *best]] - np.log(np.exp(whole).sum())
    values = [first.logprob, *(value for _, value in first.top)]
    assert values == pytest.approx(expected)
    assert [token for token, _ in first.top] == best


IDS = np.random.default_rng(4).integers(0, 288, 20).tolist()
LOGITS = np.array([[2.0, -1.0, 0.5, 3.0], [1.0, 1.0, -2.0, 0.0]], np.float32)


def process(penalties, rows, context, prompt):
    logits = np.vstack([LOGITS, LOGITS[:1]])[: len(rows)]
    return PenaltyProcessor(penalties, prompt).process(answer(logits, 3), rows, context)


@cases(
    "penalty, expected",
    ({"repetition_penalty": 2.0}, [[1, -1, 0.5, 1.5], [0.5, 0.5, -2, 0]]),
    ({"presence_penalty": 1.0}, [[2, -1, 0.5, 2], [1, 0, -2, -1]]),
    ({"frequency_penalty": 1.0}, [[2, -1, 0.5, 1], [1, 0, -2, -2]]),
    ({"logit_bias": {2: 10.0}}, [[2, -1, 10.5, 3], [1, 1, 8, 0]]),
)
def test_each_rule_by_hand(penalty, expected):
    """Prompt 0, then 3 twice; the row below the root carries 1."""
    result = process(Penalties(**penalty), Rows.chain([3, 1]), [0, 3, 3], [0])
    np.testing.assert_allclose(result.logits, expected)


def test_candidates_and_their_sum_follow():
    biased = process(Penalties({2: 10.0}), Rows.chain([3, 1]), [0, 3], [0])
    np.testing.assert_array_equal(biased.candidates, [[2, 3, 0], [2, 0, 1]])
    np.testing.assert_allclose(biased.candidate_logits[0], [10.5, 3.0, 2.0])
    expected = np.log(np.exp(biased.logits.astype(float)).sum(1))
    np.testing.assert_allclose(biased.logsumexp, expected, rtol=1e-6)


def test_siblings_see_only_their_own_path():
    tree = Rows([3, 1, 0], [-1, 0, 0])
    penalized = process(Penalties(presence_penalty=1.0), tree, [2, 3], [2]).logits
    np.testing.assert_allclose(penalized[1], LOGITS[1] - [0, 1, 0, 1])
    np.testing.assert_allclose(penalized[2], LOGITS[0] - [1, 0, 0, 1])


@cases(
    "way",
    *({"repetition_penalty": 1.3}, {"presence_penalty": 1.5}),
    *({"frequency_penalty": 0.7}, {"logit_bias": {7: 5.0, 40: -9.0, 41: 3.0}}),
    ids=str,
)
def test_a_penalty_changes_the_text_and_no_draft_does(model, way):
    """`test_conformance.py` has all methods, with all penalties together."""
    options = {"token_ids": IDS, "max_new_tokens": 50, "ignore_eos": True, "seed": 5}
    options |= {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02}
    plain = model.generate(method="none", **options, **way)
    assert plain.token_ids != model.generate(method="none", **options).token_ids
    found = model.generate(method="draft", num_draft_tokens=4, **options, **way)
    assert found.token_ids == plain.token_ids
    drawn = {"tree": "k-ary", "branching": [1, 1, 1], "siblings": "with-replacement"}
    drawn |= {"verifier": "rejection"}
    found = model.generate(
        method="draft", drafting=drawn, exact=False, **options, **way
    )
    assert len(found.token_ids) == 50


def test_a_ban_is_kept_and_a_wish_is_granted(model):
    options = {"token_ids": IDS, "max_new_tokens": 50, "ignore_eos": True}
    common = model.generate(**options).token_ids[0]
    banned = model.generate(**options, logit_bias={common: -100.0}).token_ids
    assert common not in banned
    assert set(model.generate(**options, logit_bias={9: 100.0}).token_ids) == {9}
