"""What a bundle says of a model that hears: the tokens that lead and bound its text."""

from __future__ import annotations

from dataclasses import dataclass

from jetdraft.parsing import Count

SAMPLE_RATE = 16_000
"""Samples a second of the sound that a model hears."""

HOP, WINDOW = 160, 400
"""Samples between two frames of the spectrum, and samples of a frame."""


@dataclass(frozen=True)
class Speech:
    """Token ids of Whisper (2212.04356, section 2.3), from its generation_config.json.

    `languages` maps codes such as "en" to ids, and `tasks` "transcribe" and
    "translate"; both are empty for a model of one language. A text without timestamps
    begins with `no_timestamps`; the ids after it are timestamps. Tokens in `suppressed`
    are never written, tokens in `suppressed_first` not as the first token, and the
    first timestamp is at most the one with number `latest_first`; 0 for any.
    """

    no_timestamps: Count
    languages: dict[str, Count]
    tasks: dict[str, Count]
    suppressed: tuple[Count, ...]
    suppressed_first: tuple[Count, ...]
    latest_first: Count

    @property
    def no_speech(self) -> int:
        """The id whose probability says that nobody speaks; it is never written."""
        return self.no_timestamps - 1

    @property
    def first_timestamp(self) -> int:
        """The id of the timestamp 0.00; each next one is later by a slot."""
        return self.no_timestamps + 1

    def fits(self, vocab_size: int) -> bool:
        """Whether all ids are in the vocabulary, and languages have tasks."""
        named = {*self.languages.values(), *self.tasks.values()}
        ids = {self.no_timestamps, *named, *self.suppressed, *self.suppressed_first}
        return max(ids) < vocab_size and bool(self.languages) == bool(self.tasks)

    def prompt(
        self, start: tuple[int, ...], language: str, task: str, timestamps: bool
    ) -> list[int]:
        """The tokens that a text begins with, after those of `start`."""
        named = [self.languages[language], self.tasks[task]] if self.languages else []
        return [*start, *named, *([] if timestamps else [self.no_timestamps])]
