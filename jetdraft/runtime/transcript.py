"""What a transcription gives: the result of its windows, and their segments."""

from __future__ import annotations

from dataclasses import dataclass, field

from jetdraft.runtime.hearing.segments import Segment
from jetdraft.runtime.measured.stats import Stats
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

    @classmethod
    def joined(
        cls,
        results: list[Result],
        segments: list[Segment],
        language: str,
        seconds: float,
        stats: Stats,
    ) -> Transcript:
        """The transcript of these windows; `stats` says why it ended."""
        logprobs = [entry for result in results for entry in result.logprobs or []]
        return cls(
            text="".join(segment.text for segment in segments).strip(),
            token_ids=[token for result in results for token in result.token_ids],
            prompt_tokens=stats.prompt_tokens,
            finish_reason=stats.finish_reason,
            stats=stats,
            from_draft=[flag for result in results for flag in result.from_draft],
            logprobs=logprobs or None,
            language=language,
            seconds=seconds,
            segments=segments,
        )
