"""Text of strangers in messages is one line without control characters."""

import pytest

from jetdraft.untrusted.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, é, 字", "plain, é, 字"),
        ("a\x1b[2Jb\n\t\x7f\x9b", "a\\x1b[2Jb\\n\\t\\x7f\\x9b"),
        ("\u202eevil\u2066\u200b", "\\u202eevil\\u2066\\u200b"),
        ("\ud800", "\\ud800"),
        ("\u2028x", "\\u2028x"),
        (ValueError("no\nway"), "no\\nway"),
        (None, "None"),
    ],
)
def test_shows_what_would_steer_the_terminal(text, shown):
    assert printable(text) == shown
    printable(text).encode("utf-8")


def test_shortens():
    assert printable("a" * 200) == "a" * 200
    assert printable("a" * 201) == "a" * 199 + "…"
    assert printable("abc\n\n", 5) == "abc\\…"
    assert len(printable("\n" * 10**6, 30)) == 30
