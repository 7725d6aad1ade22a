"""The driver of long runs, and the subjects that need a process of their own."""

from __future__ import annotations

import pytest

from tests.fuzz import SUBJECTS, driver, subject_named
from tests.fuzz.driver import Report, supervise
from tests.fuzz.faults import Faults
from tests.fuzz.soak import Soak


def test_kills_and_full_disks_leave_old_or_new(capsys):
    report = supervise(Faults, 0, 30, light=True)
    assert not report.faults, capsys.readouterr().out
    assert report.tried == 30
    assert report.facts["kills"] > 10


def test_nothing_grows(capsys):
    report = supervise(Soak, 0, 24, light=True)
    assert not report.faults, capsys.readouterr().out
    assert "MB of the process at last" in report.facts


def test_faults_name_the_command_that_repeats_them(capsys):
    report = Report(Faults, tried=3)
    for number in (7, 8, 9, 10):
        report.fault("ValueError at here.py:1", "the traceback", 5, number)
    printed = capsys.readouterr().out
    assert "scripts/fuzz --case faults:7\n" in printed
    assert "--case faults:5-9" in printed
    assert "faults:10" not in printed
    assert report.line().endswith("4 faults")


@pytest.mark.parametrize("case", ["nothing:1", "faults", "faults:x", "faults:1-x"])
def test_a_case_that_is_none_is_refused(case, capsys):
    with pytest.raises(SystemExit) as ended:
        driver.main(["--case", case])
    assert ended.value.code == 2
    assert "give, for example" in capsys.readouterr().err


def test_words_and_options_may_come_in_any_order(capsys, monkeypatch):
    asked = []

    def noted(*arguments):
        asked.append(arguments)
        return Report(arguments[0])

    monkeypatch.setattr(driver, "supervise", noted)
    assert driver.main(["25", "--first", "3", "faults", "soak"]) == 0
    assert asked == [(Faults, 3, 10**9, 25.0), (Soak, 3, 10**9, 25.0)]
    assert driver.main(["--count", "2500", "soak"]) == 0
    assert asked[-1] == (Soak, 0, 3, float("inf"))


@pytest.mark.parametrize("name", SUBJECTS)
def test_all_subjects_have_their_name(name):
    assert subject_named(name).name == name
