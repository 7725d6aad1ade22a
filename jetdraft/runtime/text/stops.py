"""Decides when a generation ends, and how much of its text may be shown until then."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from threading import Event

from jetdraft.errors import OptionError
from jetdraft.options import Range, check_flags, check_ranges
from jetdraft.runtime.text.codec import TextStream

# Why a generation ended: values of `finish_reason`.
STOP, LENGTH = "stop", "length"
CANCELLED, DEADLINE, INTERRUPTED = "cancelled", "deadline", "interrupted"


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

    It reads token by token, so the text ends at the same token whatever was drafted. It
    looks for stop strings in the text that is shown, and in the text with its special
    tokens; it never shows one, what follows it, or what may become one. The limit of
    `seconds` counts from the construction. `reason` is "" until the text ends. `texts`
    has the text that each token of the last `keep` completed.
    """

    def __init__(
        self,
        text: TextStream,
        ends: Sequence[int],
        stop: Sequence[str] = (),
        seconds: float | None = None,
    ) -> None:
        self.reason = ""
        self.texts: list[str] = []
        self.cancelled = Event()
        self._text = text
        self._ends = frozenset(ends)
        self._stop = tuple(stop)
        # Text that may become a stop string, and whether each character may be shown.
        self._held, self._may_show = "", bytearray()
        self._shown, self._is_cut = "", False
        self._deadline = None if seconds is None else time.perf_counter() + seconds

    def must_end(self) -> bool:
        """Whether the generation must end before another pass; sets `reason` then."""
        if self.cancelled.is_set():
            self.reason = CANCELLED
        elif self._deadline is not None and time.perf_counter() >= self._deadline:
            self.reason = DEADLINE
        return bool(self.reason)

    def end(self, reason: str) -> None:
        """Set `reason`, unless the generation has a reason already."""
        self.reason = self.reason or reason

    def read(self, tokens: list[int]) -> list[int]:
        """Read tokens; returns them up to the token that ends the text, or all."""
        self.texts = []
        for end, token in enumerate(tokens, start=1):
            self.texts.append(self._text.push([token]))
            self._add_text(self._text.special(token), False)
            self._add_text(self.texts[-1])
            if token in self._ends:
                self.reason = STOP
            if self.reason:
                return tokens[:end]
        return tokens

    def take(self) -> str:
        """Return the text that may be shown and was not taken yet."""
        shown, self._shown = self._shown, ""
        return shown

    def rest(self) -> str:
        """All text that was not taken yet, when no more tokens come."""
        if not self._is_cut:
            self._add_text(self._text.rest())
            self._show_held(len(self._held))
        return self.take()

    def _add_text(self, text: str, may_show: bool = True) -> None:
        """Add text and show it, except for an ending that may become a stop string."""
        self._held += text
        self._may_show += bytes([may_show]) * len(text)
        starts, unsure = [], [len(self._held)]
        views: list[tuple[str, Sequence[int]]] = [(self._held, range(len(self._held)))]
        if not all(self._may_show):  # also without the special tokens
            shown = [at for at, may_show in enumerate(self._may_show) if may_show]
            views.append(("".join(self._held[at] for at in shown), shown))
        for seen, places in views:
            for stop in self._stop:
                if (at := seen.find(stop)) >= 0:
                    starts.append(places[at])
                if begun := overlap(seen, stop):
                    unsure.append(places[-begun])
        self._show_held(min(starts or unsure))
        if starts:
            self.reason, self._is_cut = STOP, True
            self._held, self._may_show = "", bytearray()

    def _show_held(self, count: int) -> None:
        """Move the first `count` characters of the held text to the shown text."""
        self._shown += "".join(compress(self._held[:count], self._may_show))
        self._held = self._held[count:]
        del self._may_show[:count]


def overlap(text: str, stop: str) -> int:
    """The length of the longest ending of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
