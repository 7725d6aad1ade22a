"""Segments as subtitles: SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.runtime.hearing.segments import Segment


def srt(segments: Sequence[Segment]) -> str:
    """SubRip text.

    srt([Segment(0.0, 2.4, " Good morning.", [])])
    """
    return "".join(
        f"{number}\n{_lines(segment, ',')}\n"
        for number, segment in enumerate(segments, start=1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """WebVTT text.

    vtt([Segment(0.0, 2.4, " Good morning.", [])])
    """
    return "WEBVTT\n\n" + "".join(f"{_lines(part, '.')}\n" for part in segments)


def _lines(segment: Segment, mark: str) -> str:
    # An arrow would be read as the line of times, and an empty line as the end.
    text = " ".join(segment.text.split()).replace("-->", "->")
    return f"{clock(segment.start, mark)} --> {clock(segment.end, mark)}\n{text}\n"


def clock(seconds: float, mark: str = ".") -> str:
    """A time as hours, minutes, seconds and thousandths after `mark`.

    clock(62.5)    # "00:01:02.500"
    """
    thousandths = round(1000 * seconds)
    minutes, rest = divmod(thousandths, 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, part = divmod(rest, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{mark}{part:03}"
