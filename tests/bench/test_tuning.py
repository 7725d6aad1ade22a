import json
import shutil
from types import SimpleNamespace

import pytest

import jetdraft
from jetdraft.bench import tuning
from jetdraft.bench.tuning import count_steps, tune
from jetdraft.runtime import loaded
from tests import cases

TUNED = "profiles/cpu-1-tuning.json"


@pytest.fixture(scope="module")
def tuned(bundle, tmp_path_factory):
    folder = shutil.copytree(bundle, tmp_path_factory.mktemp("tuned") / "bundle")
    model, ticks = jetdraft.load(folder, threads=1), []
    steps, curve = count_steps(model), tune(model, lambda: ticks.append(1))
    found = {"curve": curve, "ticks": len(ticks), "steps": steps}
    return SimpleNamespace(folder=folder, model=model, **found)


@pytest.fixture
def own(tuned, tmp_path):
    return shutil.copytree(tuned.folder, tmp_path / "own")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(tuning, "WIDEST_MEASURED", 2)
    monkeypatch.setattr(tuning, "TURNS", 1)


def test_everything_is_measured_and_kept(tuned):
    model, found = tuned.model, tuned.curve
    assert list(found.passes) == list(range(1, 33))
    assert list(found.trees) == list(range(2, 33))
    assert min(found.passes.values()) > 0
    assert min(found.trees.values()) > 0
    assert set(found.drafts) == set(model.planner.proposers())
    assert min(found.drafts.values()) > 0
    assert found.compaction > 0
    assert tuned.ticks == tuned.steps  # as many as were left before
    assert model.parts.target.cache.length == 0
    again = jetdraft.load(tuned.folder, threads=1).parts
    for curve in (model.parts.curve, again.curve):
        assert curve.drafts == pytest.approx(found.drafts)
        assert curve.trees == pytest.approx(found.trees)
        assert curve.compaction == pytest.approx(found.compaction)
        assert curve.passes[4] == found.passes[4]
        assert max(curve.passes) == max(again.widths.gaps)


def test_a_tuned_model_writes_the_same(tuned, model):
    how = {"max_new_tokens": 40, "ignore_eos": True}
    plain = model.generate(" the self", method="none", **how)
    assert tuned.model.generate(" the self", **how).token_ids == plain.token_ids


def test_a_profile_of_another_machine_is_left_out(own, quick):
    file = own / TUNED
    stored = json.loads(file.read_text())
    stored["machine"]["processor"] = "Orin"
    stored["curve"]["drafts"]["lookup"] = 123.0
    file.write_text(json.dumps(stored))
    with pytest.warns(UserWarning, match="processor 'Orin' instead of"):
        model = jetdraft.load(own, threads=1)
    assert model.parts.curve.drafts.get("lookup", 0.0) < 100
    tune(model)
    assert json.loads(file.read_text())["machine"] == model.parts.profiles.machine


@pytest.mark.parametrize("content", ["", "{}", '{"machine": {}, "curve": 5}'])
def test_a_damaged_profile_is_left_out(own, content):
    (own / TUNED).write_text(content)
    (own / "profiles/cpu-1.json").unlink()  # an idle model may have kept prices there
    with pytest.warns(UserWarning, match="it is malformed"):
        model = jetdraft.load(own, threads=1)
    assert "lookup" not in model.parts.curve.drafts


PASSES = ({"1": 0.0, "2": 0.0}, {"1": 1e12}, {"1": float("nan")}, {})


@cases(
    "field, value",
    *(("passes", value) for value in PASSES),
    ("drafts", {"lookup": -100.0}),
    ("compaction", -1.0),
)
def test_times_that_cannot_be_are_left_out(own, field, value):
    stored = json.loads((own / TUNED).read_text())
    stored["curve"]["trees"] = {}
    stored["curve"][field] = value
    (own / TUNED).write_text(json.dumps(stored))
    with pytest.warns(UserWarning, match=r"its times are missing or out of range|NaN"):
        jetdraft.load(own, threads=1)


@pytest.mark.parametrize(("alone", "chosen"), [(1.0, 1), (3.0, 2)])
def test_the_drafter_gets_the_threads_that_shorten_a_round(
    own, quick, monkeypatch, alone, chosen
):
    """`alone` are the seconds of a round with one thread; with two it takes 2."""
    model = jetdraft.load(own, threads=2)
    assert model.parts.drafter_threads == 1, "it is small"
    seconds = {id(model.parts.drafter): alone}
    monkeypatch.setattr(
        tuning, "_round_seconds", lambda target, drafter: seconds.get(id(drafter), 2.0)
    )
    tune(model)
    again = jetdraft.load(own, threads=2)
    assert again.parts.drafter_threads == chosen
    how = {"max_new_tokens": 20, "ignore_eos": True, "method": "draft"}
    assert again.generate("a", **how).token_ids == model.generate("a", **how).token_ids
    assert jetdraft.load(own, threads=1).parts.drafter_threads == 1


def test_a_round_of_both_numbers_of_threads_is_timed(own, quick):
    file = own / "profiles" / "cpu-2-tuning.json"
    tune(jetdraft.load(own, threads=2))
    assert json.loads(file.read_text())["drafter_threads"] in (1, 2)


def test_a_large_drafter_gets_all_threads(own, monkeypatch):
    monkeypatch.setattr(loaded, "LARGE_DRAFTER_PARAMETERS", 1)
    model = jetdraft.load(own, threads=2)
    assert model.parts.drafter_threads == 2
    alone = jetdraft.load(own, threads=2, drafter_provider="off")
    assert alone.parts.drafter_threads == 1
    how = {"max_new_tokens": 20, "ignore_eos": True}
    plain = alone.generate("a", method="none", **how).token_ids
    assert model.generate("a", method="draft", **how).token_ids == plain
