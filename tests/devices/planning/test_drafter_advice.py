"""The advised drafter: the law's shape, and the device's weight in it."""

import json
from dataclasses import replace

import pytest

from jetdraft.devices.planning.drafter_advice import Advisor, excess_loss
from jetdraft.devices.planning.plan import Question
from tests.cli.running import jetdraft
from tests.devices.planning.test_plan import CONFIG, SMALL


@pytest.fixture
def advisor(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return Advisor(Question(file, "orin-nx-16gb", provider="cuda"))


def test_at_20_tokens_a_weight_both_halves_of_the_loss_are_equal():
    endless = 1e30
    assert excess_loss(1e6, 20e6) == pytest.approx(
        2 * excess_loss(1e6, endless), rel=1e-3
    )


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
    same_size = replace(given, acceptance=0.8)
    assert Advisor(same_size).best().acceptance > best.acceptance


def test_a_draft_vocabulary_makes_steps_cheap_and_misses_what_it_lacks(advisor):
    whole, cut = advisor.best(), replace(advisor, draft_vocab=8192).best()
    assert cut.choice.tokens_per_second > whole.choice.tokens_per_second
    covered = replace(advisor, draft_vocab=8192, coverage=0.5).best()
    assert covered.acceptance <= 0.5
    assert covered.choice.tokens_per_second < cut.choice.tokens_per_second


def test_the_command_says_size_and_budgets(advisor):
    flags = ("--device", "orin-nx-16gb", "--provider", "cuda")
    lines = jetdraft("plan", advisor.question.target, *flags)
    at = lines.stdout.splitlines()
    first = next(i for i, line in enumerate(at) if line.startswith("advice"))
    assert [f"({n} a weight)" in at[first + 1 + i] for i, n in enumerate((200, 20))]
    best = advisor.best()
    assert f"width {best.hidden_size}, layers: {best.layers}" in at[first]
