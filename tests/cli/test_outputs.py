"""What cannot be written is refused before anything is read."""

from __future__ import annotations

import os

import click
import pytest

from tests.cli.running import assert_refused, jetdraft
from tests.cli.test_help import COMMANDS, options

WRITTEN = {"--output", "--cache"}
PLACES = [
    (words, flag)
    for words, command in COMMANDS.items()
    for option in options(command)
    for flag in WRITTEN & {*option.opts}
]


def given(words, flag, bundle, nothing):
    """The arguments that a command needs, of which only a bundle is there."""
    for param in COMMANDS[words].params:
        value = bundle if param.name == "bundle" else nothing
        if isinstance(param, click.Argument):
            yield value
        elif param.required and flag not in param.opts:
            yield from (param.opts[-1], value)


def test_there_are_such_options():
    verbs = {words.split()[0] for words, _ in PLACES}
    assert verbs == {"export", "bench", "train"}
    assert len([flag for words, flag in PLACES if "train" in words]) >= 13


@pytest.mark.parametrize(("words", "flag"), PLACES)
@pytest.mark.parametrize("place", ["/proc/out", "file/out"])
def test_it_is_refused_first(words, flag, place, bundle, tmp_path, monkeypatch):
    """Before it says that the target is missing, which would be read first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("precious")
    needed = list(given(words, flag, bundle, "nothing"))
    if flag == "--cache":
        needed += ["-o", "out"]
    result = jetdraft(*words.split(), *needed, flag, place)
    assert_refused(result, place, "choose another" if place[0] == "/" else "")
    assert os.listdir(tmp_path) == ["file"]
