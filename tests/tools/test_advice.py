import json
from dataclasses import replace

import pytest

from jetdraft.devices.plan import Question
from tests.devices.planning.test_plan import CONFIG, SMALL
from tests.programs import assert_refused, jetdraft
from tools.advice import Advisor, excess_loss, main


@pytest.fixture
def advisor(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return Advisor(Question(file, "orin-nx-16gb", provider="cuda"))


def test_at_20_tokens_a_weight_both_halves_of_the_loss_are_equal():
    assert excess_loss(1e6, 20e6) == pytest.approx(2 * excess_loss(1e6, 1e30), rel=1e-3)


def test_the_advised_drafter_is_the_fastest_of_its_neighbours(advisor):
    best = advisor.best()
    others = (advisor.predict(*shape, 200) for shape in advisor.shapes())
    speeds = [one.choice.tokens_per_second for one in others]
    assert best.choice.tokens_per_second == max(speeds)
    assert best.choice.speedup > 1.0
    assert best.tokens == 200 * best.weights


def test_more_tokens_raise_the_acceptance_and_never_the_cost(advisor):
    best = advisor.best()
    shape = best.layers, best.hidden_size
    some, many = (advisor.predict(*shape, n) for n in (20, 2000))
    assert some.acceptance < best.acceptance < many.acceptance < 1.0
    assert some.draft_ms == best.draft_ms == many.draft_ms
    assert some.choice.tokens_per_second < many.choice.tokens_per_second


def test_a_drafter_that_is_given_has_the_acceptance(advisor, tmp_path):
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**SMALL, "hidden_size": 512}))
    given = replace(advisor.question, drafter=file, acceptance=0.7)
    best = Advisor(given).best()
    assert Advisor(replace(given, acceptance=0.8)).best().acceptance > best.acceptance


def test_a_draft_vocabulary_makes_steps_cheap_and_misses_what_it_lacks(advisor):
    whole, cut = advisor.best(), replace(advisor, draft_vocab=8192).best()
    assert cut.choice.tokens_per_second > whole.choice.tokens_per_second
    covered = replace(advisor, draft_vocab=8192, coverage=0.5).best()
    assert covered.acceptance <= 0.5
    assert covered.choice.tokens_per_second < cut.choice.tokens_per_second


def test_the_program_says_size_and_budgets(advisor):
    how = (advisor.question.target, "--device", "orin-nx-16gb")
    first, *budgets = jetdraft(*how, command=main).stdout.splitlines()
    best = advisor.best()
    assert f"width {best.hidden_size}, layers: {best.layers}" in first
    assert len(budgets) == 3
    for line, tokens in zip(budgets, (20, 200, 2000), strict=True):
        assert f"({tokens} a weight)" in line
    given = ("--draft-vocab", 8192, "--coverage", 0.5, "--json")
    fields = json.loads(jetdraft(*how, *given, command=main).stdout)
    cut = replace(advisor, draft_vocab=8192, coverage=0.5).best()
    assert fields[0] == cut.to_json()


def test_a_device_that_is_unknown_is_one_line(advisor):
    refused = jetdraft(advisor.question.target, "--device", "nano", command=main)
    assert_refused(refused, "unknown device 'nano'")
