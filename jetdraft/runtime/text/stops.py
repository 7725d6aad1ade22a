"""Decides when a generation ends, and what of its text is shown: thoughts, answer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from threading import Event
from typing import Annotated

from jetdraft.errors import OptionError
from jetdraft.options import Checked, Range, at_least
from jetdraft.runtime.text.codec import TextCodec, TextStream

# Why a generation ended: values of `finish_reason`.
STOP, LENGTH = "stop", "length"
CANCELLED, DEADLINE, INTERRUPTED = "cancelled", "deadline", "interrupted"
_ABOVE_0 = Range(lambda s: s > 0, "more than 0")


@dataclass(frozen=True)
class Ending(Checked):
    """When a text ends; raises `OptionError` for options that cannot be used.

    The text ends after `max_new_tokens`, before any of the texts in `stop`, after
    `max_seconds`, or with an end-of-text token unless `ignore_eos`. In a chat a thought
    ends after `max_thinking_tokens`: then the marks that end it are written.

        Ending(max_new_tokens=64, stop=("\\n\\n",))
    """

    max_new_tokens: Annotated[int, at_least(1)] = 128
    stop: str | Sequence[str] | None = None
    max_seconds: Annotated[float | None, _ABOVE_0] = None
    ignore_eos: bool = False
    max_thinking_tokens: Annotated[int | None, at_least(0)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = isinstance(self.stop, (str, list, tuple, type(None)))
        fact = ""
        if not listed or not all(isinstance(stop, str) for stop in self.stops):
            fact = f"stop {self.stop!r} is not a list of texts; give texts"
        elif "" in self.stops:
            fact = "a stop string is empty; give at least one character"
        if fact:
            raise OptionError(fact, "stop")

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
    has the text that each token of the last `read` completed. With `thoughts` that
    reader finds thoughts, which have no stop strings, and their `thought_tokens` count.
    """

    def __init__(
        self,
        text: TextStream,
        ends: Sequence[int],
        stop: Sequence[str] = (),
        seconds: float | None = None,
        thoughts: "ThoughtReader | None" = None,
    ) -> None:
        self.reason, self.thought_tokens = "", 0
        self.texts: list[str] = []
        self.cancelled = Event()
        self._text, self._ends, self._stop = text, frozenset(ends), tuple(stop)
        # Text that may become a stop string, and whether each character may be shown.
        self._held, self._may_show = "", bytearray()
        self._shown, self._is_cut = "", False
        self._thoughts, self._thought = thoughts, ""
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
            self.thought_tokens += bool(self._thoughts and self._thoughts.in_thought)
            self._read_text(self._text.special(token), False)
            self._read_text(self.texts[-1])
            if token in self._ends:
                self.reason = STOP
            if self.reason:
                return tokens[:end]
        return tokens

    def take(self) -> str:
        """Return the text that may be shown and was not taken yet."""
        shown, self._shown = self._shown, ""
        return shown

    def take_thought(self) -> str:
        """Return the thought that was not taken yet."""
        thought, self._thought = self._thought, ""
        return thought

    def rest(self) -> str:
        """All text that was not taken yet, when no more tokens come."""
        if not self._is_cut:
            self._read_text(self._text.rest())
            if self._thoughts is not None:
                self._add_part(*self._thoughts.rest())
            self._show_held(len(self._held))
        return self.take()

    def _read_text(self, text: str, may_show: bool = True) -> None:
        """Add text to the answer or to the thought, without the marks of thoughts."""
        flags = bytes([may_show]) * len(text)
        if self._thoughts is None:
            self._add_part(text, flags)
        elif text:
            for part in self._thoughts.read(text, flags):
                self._add_part(*part)

    def _add_part(self, text: str, flags: bytes, is_thought: bool = False) -> None:
        """Add text and show it, except for an ending that may become a stop string."""
        if is_thought:
            self._thought += "".join(compress(text, flags))
        if is_thought or self._is_cut:
            return
        self._held += text
        self._may_show += flags
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
        self._shown += "".join(compress(self._held[:count], self._may_show))
        self._held = self._held[count:]
        del self._may_show[:count]


def overlap(text: str, stop: str) -> int:
    """The length of the longest ending of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True)
class Thinking:
    """The marks of a model's thoughts: a thought stands between `begin` and `end`.

    Before an `end` that is forced comes `lead`, between an end and the answer `rest`.
    `hidden` marks are no part of the text either. With `once` there is one thought at
    most, before the answer. A model that `always` thinks begins a text with `begin`.
    """

    begin: str
    end: str
    lead: str = ""
    rest: str = ""
    hidden: tuple[str, ...] = ()
    once: bool = False
    always: bool = False

    @classmethod
    def of(cls, template: str) -> "Thinking | None":
        """The marks in the source of a template; None for a model that never thinks."""
        return next((row for mark, row in _THINKING.items() if mark in template), None)

    def state(self, codec: TextCodec, prompt: Sequence[int]) -> bool | None:
        """Whether a prompt ends inside of a thought; None if a thought may begin."""
        tail = codec.decode(prompt[-_TAIL_TOKENS:]).rstrip()
        if tail.endswith(self.begin.rstrip()):
            return True
        return False if tail.endswith(self.end) else None


_TAIL_TOKENS = 32  # Of a prompt, which may end in a mark.
_TURN, _FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
_HIDDEN = (_TURN, _FINAL, "<|channel|>commentary<|message|>", "<|end|>")
# By the text in a template that tells the kind.
_THINKING = {
    "<|channel|>analysis": Thinking(  # harmony of gpt-oss
        *("<|channel|>analysis<|message|>", "<|end|>", "", _TURN + _FINAL, _HIDDEN),
        always=True,
    ),
    "<|channel>thought": Thinking("<|channel>thought\n", "<channel|>"),  # Gemma 4
    "[/THINK]": Thinking("[THINK]", "[/THINK]", once=True),  # Magistral
    # Qwen3, Qwen3.5, DeepSeek-R1, SmolLM3, Nemotron
    "</think>": Thinking("<think>", "</think>", lead="\n", rest="\n\n", once=True),
}


class ThoughtReader:
    """Tells thoughts from the answer in a text that comes in parts, marks left out.

    White space beside marks is left out too. What may become a mark is held back.
    `Thinking.state` gives the `state`.
    """

    def __init__(self, marks: Thinking, state: bool | None) -> None:
        self.in_thought = self._skips_space = bool(state)
        self._marks, self._has_answer = marks, state is False
        self._held, self._flags = "", b""

    def read(self, text: str, flags: bytes) -> list[tuple[str, bytes, bool]]:
        """Take more text, and a flag for each character.

        Returns parts that are no marks: text, flags, and whether it is a thought.
        """
        self._held, self._flags = self._held + text, self._flags + flags
        parts = []
        while found := self._find_mark():
            at, mark = found
            before = self._held[:at]
            kept = len(before.rstrip() if self.in_thought else before)
            parts.append(self._take(kept))
            self._take(at - kept)
            self._has_answer |= self.in_thought
            self._held, self._flags = self._held[len(mark) :], self._flags[len(mark) :]
            self.in_thought, self._skips_space = mark == self._marks.begin, True
        begun = max((overlap(self._held, mark) for mark in self._wanted), default=0)
        sure = len(self._held) - begun
        if self.in_thought:
            sure = len(self._held[:sure].rstrip())
        return [*parts, self._take(sure)]

    def rest(self) -> tuple[str, bytes, bool]:
        """The part that was held back, when no more text comes."""
        return self._take(len(self._held))

    @property
    def _wanted(self) -> tuple[str, ...]:
        if self.in_thought:
            return (self._marks.end,)
        may_think = not (self._marks.once and self._has_answer)
        return (self._marks.begin, *self._marks.hidden) if may_think else ()

    def _find_mark(self) -> tuple[int, str] | None:
        places = [(self._held.find(mark), mark) for mark in self._wanted]
        found = min((place for place in places if place[0] >= 0), default=None)
        is_late = found and not self.in_thought and self._held[: found[0]].strip()
        return None if is_late and self._marks.once else found

    def _take(self, count: int) -> tuple[str, bytes, bool]:
        """Remove the first `count` characters of the held text, and return the part."""
        text, flags = self._held[:count], self._flags[:count]
        self._held, self._flags = self._held[count:], self._flags[count:]
        if self._skips_space and (space := len(text) - len(text.lstrip())):
            text, flags = text[space:], flags[space:]
        self._skips_space &= not text
        self._has_answer |= not self.in_thought and bool(text.strip())
        return text, flags, self.in_thought
