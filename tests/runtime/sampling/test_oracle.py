"""A slow sampler that visits every token must choose what the fast one chooses."""

from __future__ import annotations

import numpy as np
import pytest

from jetdraft.runtime.drafts.noise import gumbel
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.sampling.processors import (
    Penalties,
    PenaltyProcessor,
    best_ids,
    changed,
)
from jetdraft.runtime.text.constraint import NEVER, Mask

VOCABULARIES = (64, 300, 5_000, 50_000)
SPREADS = (0.01, 1.0, 4.0)
ROWS = 6
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 100},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
]
PENALTIES = Penalties(
    {3: 2.5, 11: -4.0, 60: 1.0}, repetition_penalty=1.3, frequency_penalty=0.4
)
PROMPT, OUTPUT = [1, 5, 8, 60], [9, 9, 12, 5]
DRAFT = [5, 9, 20, 20, 21]


def answer(logits):
    """What a graph gives: 64 candidates, equal logits in the order of their ids."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :64]
    best = np.take_along_axis(logits, order, 1)
    shifted = np.exp(logits.astype(np.float64) - best[:, :1])
    total = best[:, 0] + np.log(shifted.sum(1)).astype(np.float32)
    return Answer(order, best, total, logits)


def penalized(logits):
    """Every rule over the whole vocabulary, row by row."""
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


def slow(logits, sampling, positions):
    """Sort everything, filter, add noise to everything."""
    chosen = []
    for row, position in zip(logits, positions, strict=True):
        order = np.argsort(-row, kind="stable")
        if sampling.temperature == 0:
            chosen.append(int(order[0]))
            continue
        scaled = row[order].astype(np.float64) / sampling.temperature
        kept = min(sampling.top_k or len(row), len(row))
        p = np.exp(scaled[:kept] - scaled[0])
        if sampling.top_p < 1:
            below = np.cumsum(p) < sampling.top_p * p.sum()
            kept = min(kept, int(np.count_nonzero(below)) + 1)
        if sampling.min_p > 0:
            passes = scaled >= scaled[0] + np.log(sampling.min_p)
            kept = min(kept, int(np.count_nonzero(passes)))
        noise = gumbel(sampling.seed, np.array([[position]]), order[None, :kept])[0]
        chosen.append(int(order[:kept][np.argmax(scaled[:kept] + noise)]))
    return chosen


def cases(spread, seed):
    generator = np.random.default_rng(seed)
    for vocab in VOCABULARIES:
        logits = generator.normal(size=(ROWS, vocab)) * spread
        # Rounded so that some logits are equal.
        yield vocab, logits.round(3).astype(np.float32)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("spread", SPREADS)
def test_filters(spread, temperature, options):
    for seed, (_, logits) in enumerate(cases(spread, 1)):
        sampling = Sampling(temperature, seed=seed, **options)
        positions = range(100 * seed, 100 * seed + ROWS)
        chosen = Chooser(sampling).choose(answer(logits), positions)
        assert chosen == slow(logits, sampling, positions)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spread", SPREADS)
def test_penalties(spread, temperature, options):
    for seed, (_, logits) in enumerate(cases(spread, 2)):
        chooser = Chooser(
            Sampling(temperature, seed=seed, **options),
            [PenaltyProcessor(PENALTIES, PROMPT)],
        )
        rows = Rows.chain([OUTPUT[-1], *DRAFT])
        processed = chooser.process(answer(logits), rows, PROMPT + OUTPUT)
        positions = range(8, 8 + ROWS)
        expected = penalized(logits)
        assert chooser.choose(processed, positions) == slow(
            expected, chooser.sampling, positions
        )
        np.testing.assert_allclose(processed.logits, expected, rtol=1e-6)


def test_penalties_before_any_output():
    """Nothing is changed yet, and a flat row lets any token win."""
    ((_, logits),) = [case for case in cases(0.01, 5) if case[0] == 5_000]
    sampling = Sampling(1.0)
    chooser = Chooser(
        sampling, [PenaltyProcessor(Penalties(presence_penalty=1.0), PROMPT)]
    )
    processed = chooser.process(answer(logits[:1]), Rows.chain([PROMPT[-1]]), PROMPT)
    assert chooser.choose(processed, [4]) == slow(logits[:1], sampling, [4])


def packed(allowed):
    """The mask of these tokens, bool [vocab]."""
    bits = np.packbits(allowed, bitorder="little")
    return Mask(bits, len(allowed), np.count_nonzero(allowed))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spread", SPREADS)
def test_masks(spread, temperature, share):
    """The share of allowed tokens decides how the best of them are found."""
    for seed, (vocab, logits) in enumerate(cases(spread, 3)):
        generator = np.random.default_rng(seed)
        allowed = generator.random((ROWS, vocab)) < share
        allowed[np.arange(ROWS), generator.integers(0, vocab, ROWS)] = True
        masked = changed(answer(logits), [packed(row) for row in allowed])
        sampling = Sampling(temperature, seed=seed)
        expected = np.where(allowed, logits, NEVER)
        chosen = Chooser(sampling).choose(masked, range(ROWS))
        assert chosen == slow(expected, sampling, range(ROWS))
        assert allowed[np.arange(ROWS), chosen].all()


def test_the_whole_is_computed_only_if_it_is_read():
    """A pass of 150,000 tokens must not be copied for a few penalties."""
    ((_, logits),) = [case for case in cases(4.0, 4) if case[0] == 50_000]
    processed = PenaltyProcessor(PENALTIES, PROMPT).process(
        answer(logits), Rows.chain([OUTPUT[-1], *DRAFT]), PROMPT + OUTPUT
    )
    chooser = Chooser(Sampling(0.3, top_k=20))
    chooser.choose(processed, range(ROWS))
    assert processed._source is not None
    assert not processed._source.is_filled
    assert np.array_equal(processed.logits, penalized(logits))


def test_of_equal_logits_the_lowest_ids_are_best():
    """Also where the equal logits end the list."""
    random = np.random.default_rng(3)
    for spread in (0.0, 0.3, 3.0):
        row = (random.standard_normal(2000) * spread).astype(np.float16)
        row = row.astype(np.float32)
        whole = np.argsort(-row, kind="stable")
        for count in (1, 64, 100, 1999, 2000):
            assert best_ids(row, count).tolist() == whole[:count].tolist()
