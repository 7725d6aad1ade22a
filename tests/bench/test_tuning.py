"""Measuring with care, for this machine only."""

from __future__ import annotations

import json
import shutil

import pytest

import jetdraft
from jetdraft.bench import tuning


@pytest.fixture
def own(bundle, tmp_path):
    """A bundle whose profiles may be changed."""
    return shutil.copytree(bundle, tmp_path / "own")


def test_everything_is_measured_and_kept(own):
    model, ticks = jetdraft.load(own, threads=1), []
    found = model.tune(tick=lambda: ticks.append(1))
    assert list(found.chain_ms) == list(range(1, 33))
    assert list(found.tree_ms) == list(range(2, 33))
    assert min(found.chain_ms.values()) > 0
    assert min(found.tree_ms.values()) > 0
    assert set(found.draft_ms) == set(model.planner.proposers)
    assert min(found.draft_ms.values()) > 0
    assert found.compaction_ms > 0
    assert len(ticks) == tuning.steps(model.planner.proposers)
    assert model.parts.target.cache.length == 0
    again = jetdraft.load(own, threads=1)
    assert again.planner.costs.draft == pytest.approx(found.draft_ms)
    assert again.planner.costs.target[4] == found.chain_ms[4]
    assert max(again.planner.costs.target) == max(again.planner.calibration.target_ms)


def test_a_tuned_model_writes_the_same(own, model):
    tuned = jetdraft.load(own, threads=1)
    tuned.tune()
    how = {"max_new_tokens": 40, "ignore_eos": True}
    plain = model.generate(" the self", method="none", **how)
    assert tuned.generate(" the self", **how).token_ids == plain.token_ids


def test_a_profile_of_another_machine_is_left_out(own):
    file = own / "profiles" / "cpu-1-tuning.json"
    jetdraft.load(own, threads=1).tune()
    stored = json.loads(file.read_text())
    stored["machine"]["processor"] = "Orin"
    stored["tuning"]["draft_ms"]["lookup"] = 123.0
    file.write_text(json.dumps(stored))
    with pytest.warns(UserWarning, match="processor 'Orin' instead of"):
        model = jetdraft.load(own, threads=1)
    assert model.planner.costs.draft["lookup"] < 100
    model.tune()
    assert json.loads(file.read_text())["machine"] == model.machine()


@pytest.mark.parametrize("content", ["", "{}", '{"machine": {}, "tuning": 5}'])
def test_a_damaged_profile_is_left_out(own, content):
    file = own / "profiles" / "cpu-1-tuning.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    with pytest.warns(UserWarning, match="it is malformed"):
        model = jetdraft.load(own, threads=1)
    assert model.planner.costs.draft["lookup"] == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chain_ms", {"1": 0.0, "2": 0.0}),
        ("chain_ms", {"1": 1e12}),
        ("chain_ms", {"1": float("nan")}),
        ("chain_ms", {}),
        ("draft_ms", {"lookup": -100.0}),
        ("compaction_ms", -1.0),
    ],
)
def test_times_that_cannot_be_are_left_out(own, field, value):
    file = own / "profiles" / "cpu-1-tuning.json"
    jetdraft.load(own, threads=1).tune()
    stored = json.loads(file.read_text())
    stored["tuning"]["tree_ms"] = {}
    stored["tuning"][field] = value
    file.write_text(json.dumps(stored))
    with pytest.warns(UserWarning, match="its times cannot be"):
        jetdraft.load(own, threads=1)


def test_the_curves_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    curves = Tuning({1: 2.0, 2: 2.5}, {2: 2.6}, {}, 0.0)
    assert tuning.draw(curves, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
