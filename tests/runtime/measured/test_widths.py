import json
import shutil

import numpy as np
import pytest

from jetdraft.bundle import Bundle
from jetdraft.contract import WIDEST
from jetdraft.runtime.measured import profiles as kept
from jetdraft.runtime.measured.profiles import Profiles
from jetdraft.runtime.measured.widths import Widths, measure, pass_times


@pytest.fixture
def measured(model):
    return measure(model.parts.target, model.parts.drafter)


def test_every_width_is_in_one_class(measured):
    found, curve = measured
    widths = sorted(width for members in found.classes for width in members)
    assert widths == list(range(1, WIDEST + 1))
    assert sorted(curve.passes) == sorted(found.gaps) == widths
    assert all(ms > 0 for ms in curve.passes.values())
    assert curve.drafter > 0


def test_members_of_a_class_agree_bit_by_bit_and_others_do_not(measured):
    found, _ = measured
    for members in found.classes:
        gaps = {found.gaps[width] for width in members}
        if members == found.exact:
            assert gaps == {0.0}
        else:
            assert min(gaps) > 0


def test_the_measurement_sees_a_difference(model, monkeypatch):
    """A width whose rows differ in the last bit must leave the class."""
    run = model.parts.target.run

    def tampered(tokens, **options):
        answer = run(tokens, **options)
        if len(tokens) == 5:
            answer.logits[:] = np.nextafter(answer.logits, np.float32(np.inf))
        return answer

    monkeypatch.setattr(model.parts.target, "run", tampered)
    found, _ = measure(model.parts.target)
    assert [5] in found.classes
    assert found.gaps[5] > 0


def test_the_largest_class_is_used():
    found = Widths([[1], [2, 3, 5], [4]], dict.fromkeys(range(1, 6), 0.0))
    assert found.exact == [2, 3, 5]
    assert found.allowed(exact=True) == [2, 3, 5]
    assert found.allowed(exact=False) == [1, 2, 3, 4, 5]
    assert Widths([[1], [2]], {}).exact == [1]


def test_widths_are_read_as_they_were_written(measured):
    stored = json.loads(json.dumps(measured[0].to_json()))
    assert Widths.from_json(stored) == measured[0]
    stored["classes"][0] = stored["classes"][0][1:]
    with pytest.raises(ValueError, match="every measured width once"):
        Widths.from_json(stored)


@pytest.fixture
def profiles(bundle, tmp_path):
    """Profiles of a bundle that nobody has measured; opened again by each call."""
    own = shutil.copytree(bundle, tmp_path / "own")
    shutil.rmtree(own / "profiles", ignore_errors=True)
    return lambda: Profiles(Bundle.open(own), "cpu", 1)


def test_kept_for_this_machine_only(model, profiles, measured, monkeypatch):
    graphs, runs = (model.parts.target, model.parts.drafter), []
    monkeypatch.setattr(kept, "measure", lambda *g: runs.append(g) or measured)
    assert profiles().measured(*graphs) == measured
    assert profiles().measured(*graphs) == measured
    assert runs == [graphs], "the second load reads what the first measured"
    profiles().measured(*graphs, again=True)
    assert len(runs) == 2
    other = profiles()
    other.machine["processor"] = "other"
    assert other.measured(*graphs) == measured
    assert len(runs) == 3
    assert profiles().measured(*graphs) == measured
    assert len(runs) == 4, "the other machine's replaced it"


@pytest.mark.parametrize("damage", ["", "{", '{"machine": 5}', "[]", "whole"])
def test_a_damaged_measurement_is_made_again(
    model, profiles, measured, monkeypatch, damage
):
    graphs, runs = (model.parts.target, model.parts.drafter), []
    monkeypatch.setattr(kept, "measure", lambda *g: runs.append(g) or measured)
    first = profiles()
    first.measured(*graphs)
    if damage == "whole":
        damage = json.dumps({"machine": first.machine})
    first.file.write_text(damage)
    assert profiles().measured(*graphs) == measured
    assert len(runs) == 2


def test_measuring_leaves_the_caches_empty(model):
    target, drafter = model.parts.target, model.parts.drafter
    measure(target, drafter)
    assert target.cache.length == drafter.cache.length == 0
    assert sorted(pass_times(drafter, [1, 4])) == [1, 4]
    assert drafter.cache.length == 0
