"""JSON of strangers: what is read, and what is refused in one line."""

import time

import pytest

from jetdraft.errors import printable
from jetdraft.parsing import JsonError, read_json


def test_reads_what_json_can_hold():
    text = '{"a": [1, -2.5, true, null, "x]}[{"], "é": {"b\\\\": "\\ud83d\\ude00"}}'
    value = {"a": [1, -2.5, True, None, "x]}[{"], "é": {"b\\": "😀"}}
    for data in (text, text.encode(), bytearray(text.encode())):
        assert read_json(data) == value
    assert read_json("18446744073709551615") == 2**64 - 1
    assert read_json("-9223372036854775808") == -(2**63)
    assert read_json(f"[{10**3999}]", exact=True) == [10**3999]


def test_exact_integers_have_a_limit_too():
    with pytest.raises(JsonError, match="integer has 100000 digits"):
        read_json("9" * 100_000, exact=True)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("", "no valid JSON"),
        ("[1,]", "no valid JSON"),
        ('{"a": "x', "no valid JSON"),
        ("\ufeff{}", "no valid JSON"),
        ("[NaN]", "NaN"),
        ("[-Infinity]", "Infinity"),
        ("[1e999]", "too large"),
        ("[-1e999]", "too large"),
        ("18446744073709551616", "64 bits"),
        ("-9223372036854775809", "64 bits"),
        ("9" * 100_000, "64 bits"),
        ('"\\ud800"', "surrogate"),
        ('["\\uDFFF\\ud83d"]', "surrogate"),
        ('{"\\ud800": 1}', "surrogate"),
        ('"\ud800"', "UTF-8"),
        (b'"\xff"', "UTF-8"),
        ('{"a": 1, "a": 2}', "twice"),
        ("[" * 65 + "]" * 65, "deeper than 64"),
        ('{"a":' * 65 + "1" + "}" * 65, "deeper than 64"),
        ("[" * 500_000, "deeper than 64"),
        ('"\\""' + "[" * 65, "deeper than 64"),
        (b"1" + b" " * 1_000_000, "bytes"),
        ('"' + "é" * 600_000 + '"', "bytes"),
    ],
)
def test_refuses_the_rest(data, why):
    with pytest.raises(JsonError, match=why) as refused:
        read_json(data)
    message = str(refused.value)
    assert len(message) < 120
    assert message.isprintable()


def test_limits_are_the_callers():
    assert read_json("[[1]]", most_depth=2) == [[1]]
    with pytest.raises(JsonError, match="deeper than 1"):
        read_json("[[1]]", most_depth=1)
    assert read_json("[1]", most_bytes=3) == [1]
    with pytest.raises(JsonError, match="more than 2 bytes"):
        read_json("[1]", most_bytes=2)
    with pytest.raises(JsonError, match="nested too deeply"):
        read_json("[" * 200_000, most_depth=10**6)


def test_brackets_in_strings_are_no_depth():
    assert read_json('["' + "[{" * 1000 + '\\"[[["]') == ["[{" * 1000 + '"[[[']


def test_takes_time_in_proportion():
    """A text of a megabyte, whatever it holds, is read or refused in a moment."""
    texts = ['"' + "\\" * 999_998, '["' * 333_333, "[]," * 333_333, '"\\"' * 333_333]
    start = time.monotonic()
    for text in texts:
        with pytest.raises(JsonError):
            read_json(text)
    assert time.monotonic() - start < 10


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
