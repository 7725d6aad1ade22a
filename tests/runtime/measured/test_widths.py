import json
import threading
import time
from dataclasses import asdict, replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.contracts.tensors import WIDEST
from jetdraft.runtime import claim
from jetdraft.runtime.claim import StoppedError
from jetdraft.runtime.measured import survey as surveys
from jetdraft.runtime.measured import widths
from jetdraft.runtime.measured.cost_model import MAX_MS, Curve, LinearFit, RoundCosts
from jetdraft.runtime.measured.stats import GuessRates, MethodStats, Round, Stats
from jetdraft.runtime.measured.survey import FIRST_WIDTHS, Survey, pass_times
from jetdraft.runtime.measured.widths import Profiles, Widths
from tests import cases

IDS = np.random.default_rng(5).integers(0, 288, 12).tolist() * 3
PASSES = {"passes": {1: 20.0, 4: 26.0}, "trees": {2: 23.0}, "ended": {2: 24.0}}
DRAFTS = {"drafts": {"draft": 3.1, "lookup": 0.0}, "drafter": 3.0, "probed": {2: 30.0}}
EXPERTS = {"experts": {1: 4.0, 4: 10.0}, "expert": 0.5}
CURVE = Curve(**PASSES, **DRAFTS, **EXPERTS, compaction=0.5, probe=0.1, kept_row=0.5)
NAN, INFINITY = float("nan"), float("inf")
PRIORS = [[0.2, 0.1], [0.1, 0.1]]


@pytest.fixture(scope="module")
def measured(bundle):
    parts = jetdraft.load(bundle, threads=1).parts
    survey = Survey(parts.target, parts.drafter)
    survey.measure_again()
    return survey


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(surveys, "FIRST_MS", 0.0)


def lying(graph, width):
    run = graph.run

    def tampered(tokens, *args, **options):
        answer = run(tokens, *args, **options)
        if max(len(tokens), options.get("width", 0)) == width:
            answer.logits[:] = np.nextafter(answer.logits, np.float32(np.inf))
        return answer

    return tampered


@pytest.mark.parametrize("skipped", [0, 1, 4])
def test_rows_that_skip_slots_are_compared_with_a_chain(measured, skipped, monkeypatch):
    graph, run = measured.target, measured.target.run_branches

    def tampered(tokens, depths, *args, **options):
        answer = run(tokens, depths, *args, **options)
        if len(tokens) == 8 and list(depths).count(1) == 1 + skipped:
            answer.logits[-1] = np.nextafter(answer.logits[-1], np.float32(np.inf))
        return answer

    assert measured.widths.skips_agree
    monkeypatch.setattr(graph, "run_branches", tampered)
    survey = Survey(graph, None)
    survey.finish()
    # Not proven to agree in passes of 8 rows, that width has a class of its own.
    assert (8 in survey.widths.exact) == (skipped == 0)
    assert survey.widths.skips_agree


def test_every_width_is_in_one_class(measured):
    widths = sorted(w for members in measured.widths.classes for w in members)
    assert widths == list(range(1, WIDEST + 1))
    assert sorted(measured.curve.passes) == sorted(measured.widths.gaps) == widths
    assert all(ms > 0 for ms in measured.curve.passes.values())
    assert measured.curve.drafter > 0
    assert measured.widths.untried == ()
    assert measured.steps_left == 0
    for members in measured.widths.classes:
        gaps = {measured.widths.gaps[width] for width in members}
        if sorted(members) == measured.widths.exact:
            assert gaps == {0.0}
        else:
            assert min(gaps) > 0


@pytest.mark.parametrize("width", [1, 5])
def test_the_measurement_sees_a_difference(model, monkeypatch, width):
    target = model.parts.target
    monkeypatch.setattr(target, "run", lying(target, width))
    survey = Survey(target, None)
    survey.finish()
    assert [width] in survey.widths.classes
    assert width not in survey.widths.exact
    assert survey.widths.gaps[width] > 0


def test_a_width_that_lies_is_never_used(own, slow, monkeypatch):
    model = jetdraft.load(own, threads=1)
    target = model.parts.target
    monkeypatch.setattr(target, "run", lying(target, 4))
    how = {"token_ids": IDS, "max_new_tokens": 30, "ignore_eos": True}
    verify = Mock(side_effect=target.verify)
    monkeypatch.setattr(target, "verify", verify)
    plain = model.generate(method="none", **how).token_ids
    exact = model.parts.widths.exact
    assert exact in ([1, 2], [2, 8])  # on some processors one row is outside
    assert model.generate(method="lookup", num_draft_tokens=3, **how).token_ids == plain
    assert {call.args[1] for call in verify.mock_calls} == {*exact}
    model.parts.survey.finish()
    assert 4 not in model.parts.widths.exact
    assert model.generate(method="auto", **how).token_ids == plain
    assert 4 not in {call.args[1] for call in verify.mock_calls}


def test_the_first_generation_measures_a_few_widths(own, slow, monkeypatch):
    monkeypatch.setattr(claim, "QUIET_SECONDS", 20.0)  # on a busy machine too
    model = jetdraft.load(own, threads=1)
    survey = model.parts.survey
    assert model.parts.profiles.read_survey() is None, "nothing is measured at load"
    model.generate(token_ids=IDS, max_new_tokens=3)
    with model.parts.claim.held():  # nothing runs in the background
        pass
    assert sorted(survey.widths.gaps) == list(FIRST_WIDTHS)
    assert survey.widths.exact == list(FIRST_WIDTHS)
    assert survey.widths.allowed(exact=False) == list(range(1, WIDEST + 1))
    assert not model.generate(token_ids=IDS, max_new_tokens=3).stats.reused_tokens
    later = jetdraft.load(own, threads=1).parts.survey
    assert later.widths == survey.widths, "the profile grows"
    model.close()  # or it still measures while idle
    left = later.steps_left
    assert later.step()
    assert later.steps_left == left - 1
    assert jetdraft.load(own, threads=1).parts.survey.widths == later.widths
    later.finish()
    assert not later.step()
    assert later.widths.prefills_agree
    assert len(later.widths.exact) > len(FIRST_WIDTHS)


def test_the_rest_is_measured_while_nobody_generates(own, slow):
    others = set(threading.enumerate())  # models of other tests may measure still
    model = jetdraft.load(own, threads=1)
    how = {"token_ids": IDS, "max_new_tokens": 20, "ignore_eos": True}
    text = model.generate(**how).token_ids
    until = time.monotonic() + 60
    while model.parts.survey.steps_left and time.monotonic() < until:
        assert model.generate(**how).token_ids == text
        time.sleep(0.4)
    assert not model.parts.survey.steps_left
    model.close()
    own_threads = set(threading.enumerate()) - others
    assert "jetdraft-idle" not in {thread.name for thread in own_threads}


def test_idle_work_leaves_the_rows_of_the_last_text(own, slow):
    model = jetdraft.load(own, threads=1)
    survey = model.parts.survey
    survey.finish()
    how = {"max_new_tokens": 5, "ignore_eos": True}
    longer = [*IDS, *model.generate(token_ids=IDS, **how).token_ids]
    expected = jetdraft.load(own, threads=1).generate(token_ids=longer, **how)
    with model.parts.claim.held():
        pass
    survey._widths = replace(survey.widths, untried=(7,), prefills_agree=None)
    survey.finish()
    after = model.generate(token_ids=longer, **how)
    assert after.stats.reused_tokens >= len(IDS)
    assert after.token_ids == expected.token_ids


def test_a_step_stops_between_two_passes(model):
    target = model.parts.target
    survey = Survey(target, None)
    survey.finish()
    survey._widths = replace(survey.widths, prefills_agree=None)
    before = target.passes, target.cache.length
    with pytest.raises(StoppedError):
        survey.step(lambda: True)
    assert survey.steps_left == 1, "the step must be repeated"
    assert (target.passes, target.cache.length) == before
    survey.finish()
    assert survey.steps_left == 0


def test_the_largest_class_is_used_if_there_is_no_base():
    found = Widths([[1], [2, 3, 5], [4]], dict.fromkeys(range(1, 6), 0.0))
    assert found.exact == [2, 3, 5]
    assert found.allowed(exact=True) == [2, 3, 5]
    assert found.allowed(exact=False) == [1, 2, 3, 4, 5]
    assert Widths([[1], [2]], {}).exact == [1]
    assert replace(found, base=4).exact == [4]


def test_widths_are_read_as_they_were_written(measured):
    stored = json.loads(json.dumps(asdict(measured.widths)))
    assert Widths.from_json(stored) == measured.widths
    with pytest.raises(ValueError, match=r"do not fit the classes|must be 1 to"):
        Widths.from_json({**stored, "base": 99})
    with pytest.raises(ValueError, match=r"do not fit the classes|must be 1 to"):
        Widths.from_json({**stored, "untried": [2]})
    stored["classes"][0] = stored["classes"][0][1:]
    with pytest.raises(ValueError, match="every measured width once"):
        Widths.from_json(stored)


@pytest.fixture
def profiles(own):
    return lambda: Profiles(Bundle.open(own), "cpu", 1)


def test_kept_for_this_machine_only(model, profiles):
    graphs = model.parts.target, model.parts.drafter
    first = Survey(*graphs, profiles())
    first.begin()
    second = Survey(*graphs, profiles())
    second.announce = lambda: pytest.fail("the first survey's results were not read")
    assert second.widths == first.widths
    assert second.curve == first.curve
    other = profiles()
    other.machine["processor"] = "other"
    assert other.read_survey() is None
    Survey(*graphs, other).begin()
    assert profiles().read_survey() is None, "the other machine's replaced it"


def test_kept_for_these_instructions_only(model, profiles, monkeypatch):
    graphs = model.parts.target, model.parts.drafter
    Survey(*graphs, profiles()).begin()
    monkeypatch.setattr(widths, "isa", lambda: "others")
    assert profiles().read_survey() is None
    Survey(*graphs, profiles()).begin()
    assert '"isa": "others"' in profiles().file.read_text()


@pytest.mark.parametrize("damage", ["{", '{"machine": 5}', "whole"])
def test_a_damaged_measurement_is_made_again(model, profiles, damage):
    first = profiles()
    Survey(model.parts.target, None, first).begin()
    assert first.read_survey() is not None
    if damage == "whole":
        damage = json.dumps({"machine": first.machine})
    first.file.write_text(damage)
    assert profiles().read_survey() is None
    Survey(model.parts.target, None, profiles()).begin()
    assert profiles().read_survey() is not None


def test_measuring_leaves_the_caches_empty(model):
    target, drafter = model.parts.target, model.parts.drafter
    model.forget()
    target.cache.rewind(0)
    Survey(target, drafter).measure_again()
    assert target.cache.length == drafter.cache.length == 0
    assert sorted(pass_times(drafter, [1, 4])) == [1, 4]
    assert drafter.cache.length == 0


def test_measuring_anew_proves_the_class_that_it_ends_with(model, monkeypatch):
    """Odd and even widths differ; the even widths came first, the odd ones win."""
    monkeypatch.setattr(Survey, "_measure_gap", lambda _, a, b: float((a - b) % 2))
    monkeypatch.setattr(Survey, "_may_join", lambda *_: True)
    monkeypatch.setattr(
        Survey, "_compare_prefills", lambda self: iter([self.widths.exact[0] == 2])
    )
    monkeypatch.setattr(Survey, "_agrees", lambda self, width, ways: width % 2 == 0)
    survey = Survey(model.parts.target, None)
    survey.finish()
    assert survey.widths.exact[:2] == [2, 4]
    assert survey.widths.prefills_agree
    assert survey.widths.trees_agree
    survey.measure_again()
    assert survey.widths.exact[:2] == [1, 3]
    assert not survey.widths.prefills_agree
    assert not survey.widths.trees_agree


def test_nobody_gets_widths_while_the_buffers_are_measured(model, monkeypatch):
    survey, inside = Survey(model.parts.target, None), threading.Event()

    def slow_step():
        inside.set()
        time.sleep(0.3)
        survey._widths = replace(survey.widths, untried=(), prefills_agree=True)

    monkeypatch.setattr(survey, "_do_next_step", slow_step)
    beginning = threading.Thread(target=survey.begin)
    beginning.start()
    assert inside.wait(30)
    assert survey.widths.untried == (), "the other thread was still measuring"
    beginning.join()


def test_a_cancelled_stream_lets_the_survey_go_on(own, slow):
    model = jetdraft.load(own, threads=1)
    stream = model.stream(token_ids=IDS, max_new_tokens=50, ignore_eos=True)
    next(iter(stream))
    stream.close()
    until = time.monotonic() + 60
    while model.parts.survey.steps_left and time.monotonic() < until:
        time.sleep(0.1)
    assert not model.parts.survey.steps_left
    model.close()


def written(**changes):
    return {**json.loads(json.dumps(asdict(CURVE))), **changes}


def test_what_is_written_is_read():
    assert Curve.from_json(written()) == CURVE
    bare = Curve({1: 20.0})
    assert Curve.from_json(json.loads(json.dumps(asdict(bare)))) == bare


def refuse(**changes):
    words = r"its times are missing or out of range|must be"
    with pytest.raises(ValueError, match=words):
        Curve.from_json(written(**changes))


WIDE = ("passes", "trees", "probed", "ended")
OTHERS = ("compaction", "probe", "drafter", "drafts", "kept_row", "expert")


@cases(
    "field, ms",
    *product((*WIDE, *OTHERS), (MAX_MS, NAN, INFINITY)),
    *product(WIDE, (0.0, -1.0)),
    *product(OTHERS, (-0.1,)),
)
def test_times_that_cannot_be(field, ms):
    of_one = {"1": 2.0, "2": ms} if field in WIDE else {"lookup": ms}
    refuse(**{field: of_one if field in (*WIDE, "drafts") else ms})


def test_a_curve_without_passes_is_refused():
    refuse(passes={}, trees={})
    refuse(passes={})
    with pytest.raises(ValueError, match="passes is missing"):
        Curve.from_json({"trees": {"2": 12.0}})


@pytest.mark.parametrize("field", sorted(asdict(CURVE)))
def test_a_malformed_field_is_refused(field):
    for value in ("soon", None):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            Curve.from_json(written(**{field: value}))


def test_careful_times_replace_quick_ones():
    curve = Curve({1: 10.0, 2: 11.0}, drafter=2.0, probe=0.3, drafts={"a": 1.0})
    curve.adopt(Curve({2: 9.0, 3: 9.5, 17: 30.0}, {2: 12.0}, 0.7, drafts={"b": 4.0}))
    assert curve == Curve(
        {1: 10.0, 2: 9.0, 3: 9.5}, {2: 12.0}, 0.7, 0.3, 2.0, drafts={"a": 1.0, "b": 4.0}
    )


def test_branches_never_cost_less_than_chains():
    curve = Curve({2: 5.0, 4: 9.0}, {4: 8.0}, compaction=1.0)
    assert curve.tree_ms(4, ends_at_gap=True) == 9.0
    assert curve.tree_ms(2, ends_at_gap=False) == 6.0


def test_a_pass_costs_the_experts_that_it_touches():
    curve = Curve.from_json(written(drafts={}))
    assert curve.pass_ms(2) == 22.0
    curve.touched = {1: 4, 2: 10, 4: 4}
    assert [curve.pass_ms(w) for w in (1, 2, 4)] == [20.0, 24.0, 23.0]
    curve.learn(Round("none", 4, 0, [], 23.0 / 1e3, 0.0, experts=4))
    assert curve.passes[4] == pytest.approx(26.0)
    curve.learn(Round("none", 4, 0, [], 33.0 / 1e3, 0.0, experts=4))
    assert curve.passes[4] > 26.0


def test_the_first_probe_costs_more_than_the_others():
    """Here three streams: 3 probes on the last row, or 3 on each of 2 or 4 rows."""
    curve = Curve({2: 5.0, 4: 7.0}, probe=0.1)
    assert curve.probed_ms(2, 6, streams=3) == pytest.approx(5.6)
    curve.ended, curve.probed = {2: 8.0, 4: 10.0}, {2: 8.6, 4: 12.7}
    assert curve.probed_ms(4, 0, streams=3) == 7.0
    assert curve.probed_ms(4, 3, streams=3) == 10.0
    assert curve.probed_ms(4, 12, streams=3) == pytest.approx(12.7)
    assert curve.probed_ms(2, 4, streams=3) == pytest.approx(8.2)
    assert curve.probed_ms(3, 3, streams=3) == pytest.approx(9.0)


def pass_ms(rows: int, probes: int) -> float:
    return 1.0 + 0.2 * rows + 0.1 * probes


def round_of(drafted: int, probes: int, longer: float, outside_ms: float) -> Round:
    target = 1e-3 * longer * pass_ms(1 + drafted, probes)
    seconds = target + 1e-3 * outside_ms
    return Round("ppd", 8, drafted, [], target, 0.0, probes, seconds=seconds)


def test_rounds_say_how_much_longer_passes_are_and_what_lies_outside():
    costs = RoundCosts(pass_ms)
    assert costs.round_ms(4, 6) == pass_ms(4, 6)
    for drafted in (0, 3, 7, 3, 0):
        costs.learn(round_of(drafted, 2, 1.5, 0.4 + 0.1 * drafted))
    assert costs.round_ms(16, 9) == pytest.approx(1.5 * pass_ms(16, 9) + 0.4 + 1.5)
    costs.forget()
    assert costs.round_ms(16, 9) == pass_ms(16, 9)


def test_rounds_of_one_size_do_not_hide_what_smaller_rounds_take():
    """After rounds of 7 rows a plan tries a smaller tree, and learns what it takes."""
    costs = RoundCosts(pass_ms)
    for _ in range(5):
        costs.learn(round_of(7, 0, 1.0, 0.7))
    assert costs.round_ms(8, 0) == pytest.approx(pass_ms(8, 0) + 0.7)
    assert costs.round_ms(1, 0) < pass_ms(1, 0) + 0.1


def test_a_stall_says_little():
    costs = RoundCosts(pass_ms)
    for _ in range(20):
        costs.learn(round_of(3, 0, 1.0, 0.5))
    before = costs.round_ms(4, 0)
    costs.learn(round_of(3, 0, 100.0, 500.0))
    assert costs.round_ms(4, 0) < 1.2 * before


def test_a_line_never_falls_and_is_never_below_zero():
    line = LinearFit(memory=1.0)
    line.add(0.0, 2.0)
    line.add(4.0, 1.0)
    assert line.at(0.0) == line.at(9.0) == 1.5
    steep = LinearFit(memory=1.0)
    steep.add(1.0, 0.1)
    steep.add(2.0, 2.1)
    assert steep.at(0.0) == 0.0


def round_with(drafted, accepted):
    method = "draft" if drafted else "none"
    ranks = [(0, 1)] * accepted + [(1, 1)] * (accepted < drafted)
    return Round(method, drafted + 1, drafted, ranks, 0.0, 0.0)


def test_metrics_have_the_meaning_the_design_gives_them():
    stats = Stats("draft", exact=True, prompt_tokens=4)
    for drafted, accepted in ((3, 3), (3, 1), (3, 0), (0, 0)):
        stats.add(round_with(drafted, accepted), accepted + 1)
    # Evaluated: 3 of 3; the right and the wrong one; the wrong one; none.
    assert stats.evaluated_by_position == [3, 2, 1]
    assert stats.accepted_by_position == [2 / 3, 1 / 2, 1.0]
    assert stats.acceptance_rate == pytest.approx(4 / 6)
    assert stats.tokens_per_pass == pytest.approx(8 / 4)
    assert stats.new_tokens == stats.target_passes + stats.accepted_tokens
    assert stats.rounds_by_choice == {"draft:3": 3, "none": 1}


def test_nothing_drafted_has_no_rate():
    stats = Stats("none", exact=True, prompt_tokens=4)
    stats.add(round_with(0, 0), 1)
    assert stats.acceptance_rate is None
    assert stats.to_json()["accepted_by_position"] == []


def test_merge_adds_generations():
    one, two = (Stats("draft", exact=True, prompt_tokens=4) for _ in range(2))
    one.add(round_with(1, 1), 2)
    two.add(round_with(3, 3), 4)
    one.merge(two)
    assert one.evaluated_by_position == [2, 1, 1]
    assert one.new_tokens == 6
    assert one.rounds_by_choice == {"draft:1": 1, "draft:3": 1}


def test_what_each_method_did():
    stats = Stats("auto", exact=True, prompt_tokens=4, plain_ms=2.0)
    drafted = round_with(3, 2)._replace(target_seconds=0.004, draft_seconds=0.001)
    stats.add(drafted, 3)
    stats.add(drafted, 3)
    stats.add(round_with(0, 0)._replace(target_seconds=0.002, off="it rains"), 1)
    other = Stats("auto", exact=True, prompt_tokens=4, plain_ms=2.0)
    other.add(round_with(0, 0)._replace(target_seconds=0.003, off="it rains"), 1)
    stats.merge(other)
    assert stats.by_method["draft"] == MethodStats(2, 6, 4, 6, pytest.approx(2.0), 6)
    assert stats.by_method["none"] == MethodStats(2, 0, 0, 2, pytest.approx(-1.0))
    assert stats.off == {"it rains": 2}
    assert stats.to_json()["by_method"]["draft"]["saved_ms"] == pytest.approx(2.0)


def test_without_a_text_they_are_the_priors():
    assert GuessRates(PRIORS).ranks == [pytest.approx(of_depth) for of_depth in PRIORS]


def test_ranks_follow_the_text_whether_they_were_drafted_or_not():
    rates = GuessRates(PRIORS)
    for place in range(0, 400, 2):
        rates.add_guesses({place: [7, 3], place + 1: [7, 3]})
        rates.compare(place, [3, 9])
    assert rates.settled == 400
    (first, second), other = rates.ranks
    assert first < 0.05 < 0.85 < second
    assert max(other) < 0.05
    rates.forget()
    assert rates.ranks == [pytest.approx(of_depth) for of_depth in PRIORS]


def test_a_guess_waits_for_its_place():
    rates = GuessRates([[0.5], [0.5]])
    rates.add_guesses({10: [1], 11: [2]})
    rates.compare(9, [5, 1])
    assert rates.settled == 1
    rates.compare(11, [2])
    assert rates.settled == 2
    rates.add_guesses({12: [1], 13: [2]})
    rates.begin()
    rates.compare(12, [1, 2])
    assert rates.settled == 2
