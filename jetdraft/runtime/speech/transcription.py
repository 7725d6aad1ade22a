"""A transcription under way: a sound in windows, each of which is a generation."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp
from statistics import fmean

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import HOP, SAMPLE_RATE, Speech
from jetdraft.contracts.tensors import Float32s
from jetdraft.errors import OptionError
from jetdraft.options import declared
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.generation import Generation
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.planning.planner import Planner
from jetdraft.runtime.planning.registry import NONE
from jetdraft.runtime.sampling.processors import LogitsProcessor, Mask, apply_changes
from jetdraft.runtime.speech.segments import SLOT_SECONDS, Segment, Transcript, Window
from jetdraft.runtime.speech.sound import MIN_SECONDS, log_mel
from jetdraft.runtime.stream import Stream
from jetdraft.runtime.text.stops import CANCELLED, LENGTH, STOP

TRANSCRIBE = "transcribe"  # Or "translate".
Scores = tuple[float | None, float | None]  # Mean logprob, and P(no speech).
_SAMPLES_PER_SLOT = round(SLOT_SECONDS * SAMPLE_RATE)


@dataclass(frozen=True)
class TranscribeOptions:
    """How to transcribe a sound.

    language: The language that is spoken, for example "de"; default: detect it.
    task: transcribe, or translate into English.
    timestamps: Let the model write timestamps; windows of a long file then end where a
        sentence ends.
    """

    language: str | None = declared("prompt", None)
    task: str = declared("prompt", TRANSCRIBE)
    timestamps: bool = declared("prompt", True)

    def check(self, speech: Speech) -> None:
        """Raise `OptionError` for a language or a task that the model does not have."""
        for name, wanted, known in (
            ("language", self.language, list(speech.languages)),
            ("task", self.task, list(speech.tasks) or [TRANSCRIBE]),
        ):
            if wanted is not None and wanted not in known:
                more = ", ..." if len(known) > 12 else ""
                fix = f"choose {', '.join(known[:12])}{more}"
                if not known:
                    fix = "it has one language, so leave language out"
                raise OptionError(f"the model has no {name} {wanted!r}; {fix}", name)


# A transcript with timestamps, in the detected language.
DEFAULT_TRANSCRIPT = TranscribeOptions()


def check_speech(parts: LoadedBundle) -> Speech:
    """Return the bundle's `Speech`; raises `OptionError` for a model without it."""
    if parts.bundle.speech is None:
        fact = "the bundle's model reads text and hears nothing"
        fix = "export a checkpoint of Whisper, or use jetdraft generate"
        raise OptionError(f"{fact}; {fix}", "file")
    return parts.bundle.speech


class Transcription(Iterator[Segment]):
    """An iterator of `Segment`, with `stats` that fill up; any thread may `cancel` it.

    Each window of the sound is a generation; where timestamps cut off its last segment,
    the next window begins there. The language is detected in the first window. The time
    limit counts from `started`, in seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        parts: LoadedBundle,
        planner: Planner,
        samples: Float32s,
        wanted: TranscribeOptions,
        options: Options,
        started: float,
    ) -> None:
        self._speech = check_speech(parts)
        wanted.check(self._speech)
        # What would cut or change a window's text.
        ending, constraint = options.ending, options.constraint
        values = constraint, ending.stops, ending.ignore_eos, options.images
        names = "constraint", "stop", "ignore_eos", "images"
        for name, value in zip(names, values, strict=True):
            if value:
                raise OptionError(f"a transcript has no {name}; leave it out", name)
        self._parts, self._planner = parts, planner
        self._ends = parts.bundle.eos_token_ids
        self._samples, self._wanted, self._options = samples, wanted, options
        self._started = started
        self.stats = options.stats(0)
        self.language = wanted.language or ""
        self._pieces: list[Piece] = []
        self._window_pieces: list[Piece] = []
        self._past_segments: list[Segment] = []
        self._stream: Stream | None = None
        self._cancelled = False
        self._segments = self._transcribe()

    def __next__(self) -> Segment:
        return next(self._segments)

    def cancel(self) -> None:
        """End at the next round, with finish reason "cancelled"."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def close(self, reason: str = CANCELLED) -> None:
        """End now, with this finish reason; the model is free again."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.close(reason)
        self._set_finish_reason(reason)

    def result(self) -> Transcript:
        """Run the transcription to its end; returns all segments as a transcript."""
        for _ in self._segments:
            pass
        return replace(
            Transcript.of(self._pieces, self.stats, self._options.logprobs is not None),
            text="".join(segment.text for segment in self._past_segments).strip(),
            language=self.language,
            seconds=len(self._samples) / SAMPLE_RATE,
            segments=self._past_segments,
        )

    def _set_finish_reason(self, reason: str) -> None:
        self.stats.finish_reason = self.stats.finish_reason or reason

    def _transcribe(self) -> Iterator[Segment]:
        """Yield the segments window by window, until the sound or the time is over."""
        contract = self._parts.target.contract
        sizes = contract.source_bins, contract.frames
        begin, ending = 0, STOP
        least = round(MIN_SECONDS * SAMPLE_RATE)
        while len(self._samples) - begin >= least:
            if self._cancelled:
                return self._set_finish_reason(CANCELLED)
            features = log_mel(self._samples[begin : begin + sizes[1] * HOP], *sizes)
            if self._speech.languages and not self.language:
                reason = self._detect_language(features)
                if not self.language:
                    return self._set_finish_reason(reason)
            result = self._write_window(features)
            self._pieces += self._window_pieces
            tokens = [token for token in result.token_ids if token not in self._ends]
            first = self._speech.first_timestamp
            window = Window.of(tokens, first, contract.source_slots)
            scores = self._score_window(features, result)
            for segment in self._cut(window, begin, scores):
                self._past_segments.append(segment)
                yield segment
            if result.finish_reason not in (STOP, LENGTH):
                return self._set_finish_reason(result.finish_reason)
            if result.finish_reason == LENGTH:
                ending = LENGTH
            begin += window.slots * _SAMPLES_PER_SLOT
        self._set_finish_reason(ending)

    def _detect_language(self, features: Float32s) -> str:
        """Set `language` to the likeliest, if any; returns the finish reason."""
        codes = {id: code for code, id in self._speech.languages.items()}
        result = self._write_first_token(features, list(codes))
        self.language = codes[result.token_ids[0]] if result.token_ids else ""
        return result.finish_reason

    def _score_window(self, features: Float32s, result: Result) -> Scores:
        """Mean log probability and no-speech probability; None if not asked for."""
        if not result.logprobs or result.finish_reason not in (STOP, LENGTH):
            return None, None
        silence = self._write_first_token(features, [self._speech.no_speech]).logprobs
        mean = fmean(entry.logprob for entry in result.logprobs)
        return mean, exp(silence[0].logprob) if silence else None

    def _write_first_token(self, features: Float32s, ids: Sequence[int]) -> Result:
        """Write one token, the likeliest of `ids`, about a window; with its logprob."""
        options = Options.of(
            max_new_tokens=1, method=NONE, logprobs=0, max_seconds=self._seconds_left
        )
        start = list(self._parts.bundle.start_token_ids)
        return self._generate(features, start, options, OneOf(ids))

    @property
    def _seconds_left(self) -> float | None:
        """The seconds left until the limit, above 0; None without a limit."""
        seconds = self._options.ending.max_seconds
        if seconds is None:
            return None
        return max(seconds - (time.perf_counter() - self._started), 1e-9)

    def _write_window(self, features: Float32s) -> Result:
        ending = replace(self._options.ending, max_seconds=self._seconds_left)
        start, wanted = self._parts.bundle.start_token_ids, self._wanted
        ids = self._speech.prompt(start, self.language, wanted.task, wanted.timestamps)
        end = min(self._ends, default=self._speech.no_timestamps)
        rules = SpeechRules(self._speech, len(ids), end, wanted.timestamps)
        options = replace(self._options, ending=ending)
        result = self._generate(features, ids, options, rules)
        self.stats.merge(result.stats)
        if not self._pieces:
            self.stats.time_to_first_token = result.stats.time_to_first_token
            self.stats.plain_ms = result.stats.plain_ms
        return result

    def _generate(
        self,
        sound: Float32s,
        prompt: list[int],
        options: Options,
        rules: LogitsProcessor,
    ) -> Result:
        given = self._parts, self._planner, prompt, options, True, sound, [rules]
        generation = Generation(*given)
        self._stream, self._window_pieces = Stream(generation), generation.pieces
        if self._cancelled:
            self._stream.cancel()
        return self._stream.result()

    def _cut(self, window: Window, begin: int, scores: Scores) -> Iterator[Segment]:
        """A window's segments with their text, in seconds of the whole sound."""
        offset, seconds = begin / SAMPLE_RATE, len(self._samples) / SAMPLE_RATE
        for first, last, tokens in window.spans:
            ends = (offset + slot * SLOT_SECONDS for slot in (first, last))
            start, end = (round(min(place, seconds), 2) for place in ends)
            text = self._parts.text.stream([])
            said = text.push(tokens) + text.rest()
            yield Segment(start, end, said, tokens, offset, *scores)


Banned = npt.NDArray[np.bool_]


class SpeechRules:
    """Bans tokens by what was written before; a `LogitsProcessor`.

    With `timestamps` a text begins with a timestamp; they stand in pairs and never go
    back, and a timestamp must come where all together are likelier than the likeliest
    word (2212.04356, appendix; the rules of OpenAI's decoder). `start` is the length of
    the prompt; no word has an id of `end` or more.
    """

    def __init__(self, speech: Speech, start: int, end: int, timestamps: bool) -> None:
        self._speech, self._start, self._end = speech, start, end
        self._timestamps = timestamps
        self._never = np.zeros(0, bool)

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer without banned tokens; `context` ends with the root of `rows`."""
        if not len(self._never):
            self._never = np.zeros(answer.vocab_size, bool)
            self._never[list(self._speech.suppressed)] = True
            all_timestamps = slice(self._speech.first_timestamp, None)
            untimed = self._speech.no_timestamps
            self._never[untimed if self._timestamps else all_timestamps] = True
        written = list(context[self._start :])
        masks = [self._banned([*written, *path]) for path in rows.paths]
        if self._timestamps:
            self._prefer_timestamps(answer.logits, masks)
        return apply_changes(answer, [Mask.of(~banned) for banned in masks])

    def _banned(self, written: Sequence[int]) -> Banned:
        """Whether each token must not follow the tokens `written`, bool [vocab]."""
        banned, first = self._never.copy(), self._speech.first_timestamp
        if not written:
            banned[list(self._speech.suppressed_first)] = True
        if not self._timestamps:
            return banned
        if not written:
            banned[:first] = True
            if self._speech.latest_first:
                banned[first + self._speech.latest_first + 1 :] = True
            return banned
        ended = written[-1] >= first
        # The first timestamp stands alone, as if another one stood before it.
        paired = len(written) < 2 or written[-2] >= first
        if ended and paired:
            banned[first:] = True
        elif ended:
            banned[: self._end] = True
        times = [token for token in written if token >= first]
        if times:
            # A segment may begin where the last one ended, but not end where it begins.
            repeated = ended and not paired
            banned[first : times[-1] + (0 if repeated else 1)] = True
        return banned

    def _prefer_timestamps(self, logits: Float32s, masks: list[Banned]) -> None:
        """Ban all else in a row's mask where timestamps together are likelier."""
        first = self._speech.first_timestamp
        for row, mask in zip(logits, masks, strict=True):
            times = row[first:][~mask[first:]].astype(np.float64)
            others = row[:first][~mask[:first]]
            if not len(times) or not len(others):
                continue
            largest = times.max()
            if largest + np.log(np.exp(times - largest).sum()) > others.max():
                mask[:first] = True


class OneOf:
    """Bans all tokens but some; a `LogitsProcessor`."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    def process(self, answer: Answer, rows: Rows, context: Sequence[int]) -> Answer:
        """The answer with all tokens but these masked."""
        allowed = np.zeros(answer.vocab_size, bool)
        allowed[self._ids] = True
        return apply_changes(answer, [Mask.of(allowed)] * len(rows))
