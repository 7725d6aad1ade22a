"""What a transcription gives: the result of its windows, and their segments."""

from __future__ import annotations

from dataclasses import dataclass, field

from jetdraft.runtime.hearing.segments import Segment
from jetdraft.runtime.piece import Result


@dataclass(frozen=True)
class Transcript(Result):
    """What is said in a sound of `seconds` seconds; `stats` adds up its windows.

    `segments` are the parts between timestamps, or the windows of a text without them.
    `language` is a code such as "en", given or detected; "" for a model of one
    language. `finish_reason` is "length" if the text of a window was too long, and all
    of the sound was heard.

        model.transcribe("question.wav").text
    """

    language: str = ""
    seconds: float = 0.0
    segments: list[Segment] = field(default_factory=list)
