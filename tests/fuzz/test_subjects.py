from unittest import mock

import pytest

from tests import cases
from tests.fuzz import BLOCK, SUBJECTS, case, driver, subject_named
from tests.fuzz.driver import Report, supervise
from tests.fuzz.faults import Faults
from tests.fuzz.soak import Soak


# numpy leaves a damaged npz open until it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@cases(
    "name, count, facts",
    ("same-text", 100, {"generations compared": 80, "drafted tokens": 300}),
    ("hybrids", 30, {"generations compared": 30, "drafted tokens": 300}),
    ("mixtures", 30, {"generations compared": 30, "drafted tokens": 300}),
    ("bundles", 100, {}),
    ("operators", 300, {}),
    ("server", 150, {}),
)
def test_an_attack_finds_nothing(tmp_path, name, count, facts):
    """Templates may compute for 0.3 s here, not 5: some never end."""
    with (
        mock.patch("jetdraft.runtime.text.sandbox.MAX_SECONDS", 0.3),
        subject_named(name)(tmp_path, light=True) as subject,
    ):
        for number in range(count):
            if number % BLOCK == 0:
                subject.refresh()
            try:
                subject.run(case(subject, number))
            except BaseException as error:
                error.add_note(f"scripts/fuzz --case {name}:{number}")
                raise
        subject.finish()
    assert all(subject.facts[what] > least for what, least in facts.items())


@cases(
    "subject, count, fact, least",
    (Faults, 12, "kills", 3),
    (Soak, 14, "MB of the process at last", 0),
)
def test_kills_leave_old_or_new_and_nothing_grows(capsys, subject, count, fact, least):
    report = supervise(subject, 0, count, light=True)
    assert not report.faults, capsys.readouterr().out
    assert report.tried == count
    assert report.facts[fact] > least


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
def test_other_cases_are_refused(case, capsys):
    with pytest.raises(SystemExit) as ended:
        driver.main(["--case", case])
    assert ended.value.code == 2
    assert "give, for example" in capsys.readouterr().err


def test_words_and_options_may_come_in_any_order(monkeypatch):
    asked = mock.Mock(side_effect=lambda subject, *_: Report(subject))
    monkeypatch.setattr(driver, "supervise", asked)
    assert driver.main(["25", "--first", "3", "faults", "soak"]) == 0
    assert driver.main(["--count", "2500", "soak"]) == 0
    faults, *soaks = [call.args for call in asked.call_args_list]
    assert faults == (Faults, 3, 10**9, 25.0)
    assert soaks == [(Soak, 3, 10**9, 25.0), (Soak, 0, 3, float("inf"))]
    assert {name: subject_named(name).name for name in SUBJECTS} == {
        name: name for name in SUBJECTS
    }
