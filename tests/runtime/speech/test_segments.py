"""Timestamps cut a window's tokens, and say where the next window begins."""

import pytest

from jetdraft.runtime.speech.segments import Segment, Window, srt, vtt

T = 100
"""The id of the timestamp 0.00."""


@pytest.mark.parametrize(
    ("tokens", "spans", "slots"),
    [
        # A segment that was cut off is left to the next window.
        ([T, 5, 6, T + 50, T + 50, 7, 8], [(0, 50, [5, 6])], 50),
        # A closed window is taken whole.
        ([T, 5, T + 40, T + 45, 7, T + 90], [(0, 40, [5]), (45, 90, [7])], 1500),
        # One segment ends at its timestamp, or with the window.
        ([T, 5, T + 40], [(0, 40, [5])], 1500),
        ([T, 5], [(0, 1500, [5])], 1500),
        ([5, 6], [(0, 1500, [5, 6])], 1500),
    ],
)
def test_timestamps_cut_a_window(tokens, spans, slots):
    assert Window.of(tokens, T, 1500) == Window(spans, slots)


def test_every_window_moves_on():
    """Also after timestamps that never grow, and without any word."""
    for tokens in ([T, T], [T, 5, T, T, 6], [], [T], [T, T, T]):
        assert Window.of(tokens, T, 50).slots > 0
    assert Window.of([T, T], T, 50).spans == []


def test_subtitles():
    segments = [
        Segment(0.0, 2.4, " Hi -->\n\n you.", []),
        Segment(3661.5, 3662.0, "x", []),
    ]
    assert srt(segments) == (
        "1\n00:00:00,000 --> 00:00:02,400\nHi -> you.\n\n"
        "2\n01:01:01,500 --> 01:01:02,000\nx\n\n"
    )
    assert vtt(segments[:1]) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.400\nHi -> you.\n\n"
    )
