"""Cuts a window's tokens at its timestamps (2212.04356, 3.8); writes transcripts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jetdraft.runtime.piece import Result

SLOT_SECONDS = 0.02  # A slot of the encoder; a step between timestamps.


@dataclass(frozen=True)
class Segment:
    """A part of a transcript: `text` from second `start` to `end` of the sound.

    Its window begins at second `window`. With log probabilities, `avg_logprob` is the
    mean of the window's tokens, and `no_speech_prob` the chance that nobody speaks.
    """

    start: float
    end: float
    text: str
    token_ids: list[int]
    window: float = 0.0
    avg_logprob: float | None = None
    no_speech_prob: float | None = None


@dataclass(frozen=True)
class Window:
    """A window's segments, (start slot, end slot, ids), and the next window's slot."""

    spans: list[tuple[int, int, list[int]]]
    slots: int

    @classmethod
    def of(cls, tokens: Sequence[int], first_timestamp: int, slots: int) -> "Window":
        """Cut the tokens of a window of `slots` slots at pairs of timestamps."""
        times = [token - first_timestamp for token in tokens]
        ends = [i for i in range(1, len(times)) if times[i - 1] >= 0 <= times[i]]
        closed = len(times) > 1 and times[-1] >= 0 > times[-2]
        if not ends:
            said = [time for time in times if time > 0]
            words = [t for t in tokens if t < first_timestamp]
            last = min(said[-1], slots) if said else slots
            return cls([(0, last, words)] if words else [], slots)
        spans = []
        for begin, end in pairwise([0, *ends, *([len(times)] if closed else [])]):
            words = [t for t in tokens[begin:end] if t < first_timestamp]
            if words:
                start = max(times[begin], 0)
                spans.append((start, max(start, times[end - 1]), words))
        rest = times[ends[-1] - 1]
        return cls(spans, slots if closed or not 0 < rest <= slots else rest)


def srt(segments: Sequence[Segment]) -> str:
    """The segments as a SubRip text."""
    numbered = enumerate(segments, start=1)
    return "".join(f"{number}\n{_cue(part, ',')}\n" for number, part in numbered)


def vtt(segments: Sequence[Segment]) -> str:
    """The segments as a WebVTT text."""
    return "WEBVTT\n\n" + "".join(f"{_cue(part, '.')}\n" for part in segments)


def _cue(segment: Segment, mark: str) -> str:
    """The times and the text of a subtitle; `mark` is before the thousandths."""
    # An arrow would be read as the line of times, and an empty line as the end.
    text = " ".join(segment.text.split()).replace("-->", "->")
    return f"{clock(segment.start, mark)} --> {clock(segment.end, mark)}\n{text}\n"


def clock(seconds: float, mark: str = ".") -> str:
    """A time as hours, minutes, seconds and thousandths after `mark`."""
    minutes, rest = divmod(round(1000 * seconds), 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, part = divmod(rest, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{mark}{part:03}"


@dataclass(frozen=True)
class Transcript(Result):
    """What is said in a sound of `seconds` seconds; `stats` adds up its windows.

    `segments` are the parts between timestamps, or the windows of a text without them.
    `language` is a code such as "en", "" for a model of one language. `finish_reason`
    is "length" if the text of a window was too long; all of the sound was heard.

        model.transcribe("question.wav").text
    """

    language: str = ""
    seconds: float = 0.0
    segments: list[Segment] = field(default_factory=list)
