import re
import time

from jetdraft.cli import console
from jetdraft.cli.console import ProgressBars


def test_without_a_terminal_there_are_lines_also_in_a_long_step(monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.02)
    printed, until = "", time.monotonic() + 60
    with ProgressBars() as bars:
        bars("measure layers", 2, 30)
        while printed.count("\n") < 2 and time.monotonic() < until:
            time.sleep(0.02)
            printed += capsys.readouterr().err
    first, second, *_ = printed.splitlines()
    assert re.fullmatch(r"after \d+ s: measure layers, 2 of 30", first)
    assert second.endswith("s: measure layers, 2 of 30")


def test_a_stage_that_printed_a_line_prints_its_end(monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.02)
    printed, until = "", time.monotonic() + 60
    with ProgressBars() as bars:
        bars("trace target", 0, 1)
        while not printed and time.monotonic() < until:
            time.sleep(0.02)
            printed += capsys.readouterr().err
        bars("trace target", 1, 1)
        bars("quantize target", 0, 9)
    printed += capsys.readouterr().err
    begun, ended = r"^after \d+ s: trace target$", r"^after \d+ s: trace target, done$"
    assert re.search(begun, printed, re.MULTILINE), "not 0 of 1"
    assert re.search(ended, printed, re.MULTILINE)


def test_a_short_command_prints_no_line(capsys):
    with ProgressBars() as bars:
        bars("measure layers", 2, 30)
    assert capsys.readouterr().err == ""
