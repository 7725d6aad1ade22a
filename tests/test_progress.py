from __future__ import annotations

from jetdraft.terminal import progress
from jetdraft.terminal.progress import ProgressBars


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch, capsys):
    now = iter([0.0, 4.0, 11.0, 15.0, 22.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    bars = ProgressBars()
    for done in range(1, 5):
        bars("measure layers", done, 30)
    error = capsys.readouterr().err
    assert error == "measure layers: 2 of 30\nmeasure layers: 4 of 30\n"
