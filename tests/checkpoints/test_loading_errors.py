"""Other libraries' messages in one line."""

from __future__ import annotations

import pytest

from jetdraft.checkpoints.reading.loading_errors import first_line

SENTENCE = "The checkpoint has model type `nonsense`, which is not known"


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("one\ntwo", "one"),
        ("wrong:\n  two\nthree", "wrong: two"),
        (f"{SENTENCE}. It is new", f"{SENTENCE}. It is new"),
        (f"{SENTENCE}. {'This could be. ' * 20}", SENTENCE),
        ("", "ValueError"),
    ],
)
def test_of_a_long_line_the_first_sentence_is_left(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line
