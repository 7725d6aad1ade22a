"""Decides when a generation ends, and how much of its text may be shown until then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event

from jetdraft.errors import OptionError
from jetdraft.ranges import Range, check_flags, check_ranges
from jetdraft.runtime.text.codec import TextStream

STOP, LENGTH = "stop", "length"
CANCELLED, DEADLINE, INTERRUPTED = "cancelled", "deadline", "interrupted"
EARLY_STOP = "early stop"
"""Why a generation ended: values of `finish_reason`."""


_RANGES = {
    "max_new_tokens": Range(lambda count: count >= 1, "1 or more", integer=True),
    "max_seconds": Range(lambda s: s > 0, "more than 0", optional=True),
}


@dataclass(frozen=True)
class Ending:
    """When a text ends; raises `OptionError` for options that cannot be used.

    The text ends after `max_new_tokens`, before any of the texts in `stop`, after
    `max_seconds`, or with an end-of-text token unless `ignore_eos`.

        Ending(max_new_tokens=64, stop=("\\n\\n",))
    """

    max_new_tokens: int = 128
    stop: str | Sequence[str] | None = None
    max_seconds: float | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        check_flags(self, "ignore_eos")
        listed = isinstance(self.stop, (str, list, tuple, type(None)))
        if not listed or not all(isinstance(stop, str) for stop in self.stops):
            raise OptionError(
                f"stop {self.stop!r} is not a list of texts; give texts", "stop"
            )
        if "" in self.stops:
            raise OptionError(
                "a stop string is empty; give at least one character", "stop"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts in `stop`."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class StopWatcher:
    """Watches one generation for end-of-text, stop strings, a deadline and `cancelled`.

    It looks for stop strings token by token, so the text ends at the same token
    whatever was drafted. It never shows a stop string, what follows it, or a text that
    may become a stop string. The time limit `seconds` counts from the construction.
    `reason` is "" while the generation goes on.

        watcher = StopWatcher(codec.stream(prompt), eos_token_ids, ["\\n\\n"])
        watcher.keep([5, 8, 9])         # the tokens before the end
        watcher.take()                  # the text that is certain so far
    """

    def __init__(
        self,
        text: TextStream,
        eos_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        seconds: float | None = None,
    ) -> None:
        self.reason = ""
        self.cancelled = Event()
        self._text = text
        self._eos = frozenset(eos_token_ids)
        self._stop = tuple(stop)
        self._held = ""
        self._shown = ""
        self._deadline = None if seconds is None else time.perf_counter() + seconds

    def must_end(self) -> bool:
        """Whether the generation must end before another pass."""
        if self.cancelled.is_set():
            self.reason = CANCELLED
        elif self._deadline is not None and time.perf_counter() >= self._deadline:
            self.reason = DEADLINE
        return bool(self.reason)

    def end(self, reason: str) -> None:
        """End for this reason, unless there was one before."""
        self.reason = self.reason or reason

    def keep(self, tokens: list[int]) -> list[int]:
        """The tokens up to and including the token that ends the text, or all."""
        if not self._stop:
            end = next((i for i, t in enumerate(tokens, 1) if t in self._eos), None)
            self.reason = self.reason if end is None else STOP
            kept = tokens[:end]
            self._shown += self._text.push(kept)
            return kept
        for end, token in enumerate(tokens, start=1):
            self._hold(self._text.push([token]))
            if token in self._eos:
                self.reason = STOP
            if self.reason:
                return tokens[:end]
        return tokens

    def take(self) -> str:
        """The text that became certain since the last call."""
        shown, self._shown = self._shown, ""
        return shown

    def rest(self) -> str:
        """All text that was not taken yet, when no more tokens come."""
        self._hold(self._text.rest())
        shown, self._held = self._shown + self._held, ""
        self._shown = ""
        return shown

    def _hold(self, text: str) -> None:
        """Show all text but an ending that may become a stop string."""
        held = self._held + text
        starts = [at for stop in self._stop if (at := held.find(stop)) >= 0]
        if starts:
            self.reason = STOP
            self._shown, self._held = self._shown + held[: min(starts)], ""
            self._text = _EMPTY
            return
        unsure = max((_overlap(held, stop) for stop in self._stop), default=0)
        cut = len(held) - unsure
        self._shown, self._held = self._shown + held[:cut], held[cut:]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest ending of a text that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


_EMPTY = TextStream(None, [])
"""Gives no text."""
