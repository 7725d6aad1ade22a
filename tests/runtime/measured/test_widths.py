import json

import numpy as np
import pytest

from jetdraft.contract import WIDEST
from jetdraft.runtime.measured import widths as calibration
from jetdraft.runtime.measured.widths import Calibration, measure


@pytest.fixture
def measured(model):
    return measure(model.parts.target, model.parts.drafter)


def test_every_width_is_in_one_class(measured):
    widths = sorted(width for members in measured.classes for width in members)
    assert widths == list(range(1, WIDEST + 1))
    assert sorted(measured.target_ms) == widths
    assert sorted(measured.drafter_ms) == widths
    assert all(ms > 0 for ms in measured.target_ms.values())


def test_members_of_a_class_agree_bit_by_bit_and_others_do_not(measured):
    for members in measured.classes:
        gaps = {measured.gaps[width] for width in members}
        if members == measured.exact_widths:
            assert gaps == {0.0}
        else:
            assert min(gaps) > 0


def test_the_measurement_sees_a_difference(model, monkeypatch):
    """A width whose rows differ in the last bit must leave the class."""
    run = model.parts.target.run

    def tampered(tokens, last_only=False):
        answer = run(tokens, last_only)
        if len(tokens) == 5:
            answer.logits[:] = np.nextafter(answer.logits, np.float32(np.inf))
        return answer

    monkeypatch.setattr(model.parts.target, "run", tampered)
    found = measure(model.parts.target, None)
    assert [5] in found.classes
    assert found.gaps[5] > 0


def test_the_largest_class_is_used():
    found = Calibration([[1], [2, 3, 5], [4]], {}, {}, {})
    assert found.exact_widths == [2, 3, 5]
    assert Calibration([[1], [2]], {}, {}, {}).exact_widths == [1]


def test_kept_for_this_machine_only(tmp_path, measured):
    file, machine = tmp_path / "profiles" / "cpu-1.json", {"processor": "this"}
    calibration.store(file, machine, measured)
    assert calibration.load(file, machine) == measured
    assert calibration.load(file, {"processor": "other"}) is None
    file.write_text(json.dumps({"machine": machine}))
    assert calibration.load(file, machine) is None


def test_measuring_leaves_the_caches_empty(model):
    measure(model.parts.target, model.parts.drafter)
    assert model.parts.target.cache.length == model.parts.drafter.cache.length == 0
