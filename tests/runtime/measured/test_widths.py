import json
import threading
import time
from dataclasses import asdict, replace
from unittest.mock import Mock

import numpy as np
import pytest

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.contracts.constants import WIDEST
from jetdraft.runtime import claim
from jetdraft.runtime.claim import StoppedError
from jetdraft.runtime.measured import survey as surveys
from jetdraft.runtime.measured import widths
from jetdraft.runtime.measured.survey import FIRST_WIDTHS, Survey, pass_times
from jetdraft.runtime.measured.widths import Profiles, Widths

IDS = np.random.default_rng(5).integers(0, 288, 12).tolist() * 3


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
    """Let passes of a width differ in the last bit of every logit."""
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
    """A width whose rows differ in the last bit must leave the class."""
    target = model.parts.target
    monkeypatch.setattr(target, "run", lying(target, width))
    survey = Survey(target, None)
    survey.finish()
    assert [width] in survey.widths.classes
    assert width not in survey.widths.exact
    assert survey.widths.gaps[width] > 0


def test_a_width_that_lies_is_never_used(own, slow, monkeypatch):
    """Neither before the survey ends nor after, in any exact generation."""
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
    first = model.generate(token_ids=IDS, **how)
    expected = jetdraft.load(own, threads=1).generate(
        token_ids=[*IDS, *first.token_ids], **how
    )
    with model.parts.claim.held():
        pass
    survey._widths = replace(survey.widths, untried=(7,), prefills_agree=None)
    survey.finish()
    after = model.generate(token_ids=[*IDS, *first.token_ids], **how)
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
