"""Reads a WAV file as the sound that a model hears: one channel, 16,000 samples/s."""

from __future__ import annotations

import io
import warnings
import wave
from math import gcd
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.arrays import Float32s
from jetdraft.speech.speech_tokens import SAMPLE_RATE
from jetdraft.untrusted.printable import printable

SHORTEST, LONGEST = 0.1, 2 * 3600.0
"""Seconds of a sound that is read."""

_UNKNOWN = 2**31 - 2**16
"""Bytes of sound; a header that is written before the sound says more than these."""

_HEADER = 4096
"""Bytes in which the format of a sound lies."""

_EXTENSIBLE = b"\xfe\xff"

_RATES = range(1000, 768_001)
_ADVICE = "convert it with ffmpeg -i IN -ac 1 -ar 16000 -c:a pcm_s16le OUT.wav"
_ZEROS = 16
"""Zero crossings of the resampling filter on each side."""

_MOST_WEIGHTS = 100_000
"""The most weights of all filters of a rate; 44,100 samples/s need 14,400."""


def read_sound(file: str | Path | bytes) -> Float32s:
    """The samples of a WAV file, or of its bytes: float32 [samples] within -1 and 1.

    The file must hold PCM of 8 to 32 bits. Several channels become their mean, and
    rates other than 16,000 samples/s are resampled. Warns of a file that was cut off.
    Raises `OptionError` for anything else, for a rate that is in no simple ratio to
    16,000, and for a sound shorter than 0.1 s or longer than two hours.

        read_sound("question.wav")
    """
    if isinstance(file, bytes):
        return _read("the file", io.BytesIO(file))
    name = printable(file, 1000)
    try:
        if Path(file).is_dir():
            raise _refusal(f"{name} is a folder; give a WAV file")
        if not Path(file).is_file():
            raise _refusal(f"there is no file {name}; give a WAV file")
        with Path(file).open("rb") as opened:
            return _read(name, opened)
    except OSError as error:
        raise _refusal(
            f"{name} cannot be read ({error.strerror}); give a WAV file"
        ) from error


def _read(name: str, opened: IO[bytes]) -> Float32s:
    header = opened.read(_HEADER)
    if not header:
        raise _refusal(f"{name} is empty; give a WAV file")
    place = header.find(b"fmt ") + 8
    if header[place : place + 2] == _EXTENSIBLE:
        # The kind of sound has a longer name, which Python 3.11 does not know.
        short = header[:place] + header[place + 24 : place + 26] + header[place + 2 :]
        opened = io.BytesIO(short + opened.read())
    opened.seek(0)
    try:
        with wave.open(opened) as reader:
            return _samples(name, reader)
    except (wave.Error, EOFError, RuntimeError) as error:
        # A RuntimeError without words: a part claims to be larger than the file.
        reason = str(error) or "it ends too early"
        raise _refusal(
            f"{name} is not a WAV file of PCM ({reason}); {_ADVICE}"
        ) from error


def check_sound(samples: object) -> Float32s:
    """Samples as `read_sound` gives them; raises `OptionError` for other arrays.

    check_sound(np.zeros(16_000))
    """
    array = np.asarray(samples)
    if array.ndim != 1 or array.dtype.kind not in "f" or not np.isfinite(array).all():
        raise _refusal(
            "a sound is a WAV file, or finite floats [samples] of one channel at "
            f"{SAMPLE_RATE} samples a second; give one of them"
        )
    _check_seconds("the sound", len(array) / SAMPLE_RATE)
    return array.astype(np.float32)


def _samples(name: str, reader: wave.Wave_read) -> Float32s:
    rate, width = reader.getframerate(), reader.getsampwidth()
    if rate not in _RATES or not 1 <= width <= 4:
        raise _refusal(
            f"{name} has {rate} samples a second of {8 * width} bits, which cannot be "
            f"speech; {_ADVICE}"
        )
    if _weights(rate) > _MOST_WEIGHTS:
        raise _refusal(
            f"{name} has {rate} samples a second, which cannot be resampled to "
            f"{SAMPLE_RATE} in few steps; {_ADVICE}"
        )
    # The header counts what a damaged file may not have.
    most = int(LONGEST * rate) + 1
    data = reader.readframes(min(reader.getnframes(), most))
    size = width * reader.getnchannels()
    whole = np.frombuffer(data, np.uint8)[: len(data) // size * size]
    _check_seconds(name, len(whole) / size / rate)
    if len(whole) < size * reader.getnframes() < _UNKNOWN:
        warnings.warn(
            f"{name} is cut off: its header says {reader.getnframes() / rate:.2f} s of "
            f"sound, and it has {len(whole) / size / rate:.2f}; record it again",
            stacklevel=2,
        )
    channels = _floats(whole, width).reshape(-1, reader.getnchannels())
    return resampled(channels.mean(1, dtype=np.float32), rate)


def _check_seconds(name: str, seconds: float) -> None:
    if seconds < SHORTEST:
        raise _refusal(
            f"{name} has {seconds:.2f} s of sound, at least {SHORTEST:g} are needed; "
            "give a longer one"
        )
    if seconds > LONGEST:
        raise _refusal(
            f"{name} is longer than {LONGEST / 3600:g} hours; cut it into shorter files"
        )


def _floats(data: npt.NDArray[np.uint8], width: int) -> Float32s:
    """Integers of `width` bytes, the lowest first, as float32 within -1 and 1."""
    if width == 1:  # the only width without a sign
        floats = data.astype(np.float32)
        floats -= 128
    elif width == 3:
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = data.reshape(-1, 3)
        floats = padded.view("<i4")[:, 0].astype(np.float32)
        width = 4
    else:
        floats = data.view(f"<i{width}").astype(np.float32)
    floats *= np.float32(2.0 ** (1 - 8 * width))
    return floats


def _filters(rate: int) -> tuple[int, int, int]:
    """How many filters a rate needs, the step between them, and the samples before
    and behind a place that a filter reads.
    """
    common = gcd(rate, SAMPLE_RATE)
    reach = int(np.ceil(_ZEROS * max(1.0, rate / SAMPLE_RATE)))
    return SAMPLE_RATE // common, rate // common, reach


def _weights(rate: int) -> int:
    """The weights of all filters of a rate."""
    places, _, reach = _filters(rate)
    return places * 2 * reach


def resampled(samples: Float32s, rate: int) -> Float32s:
    """Samples at `rate` as samples at 16,000 a second, by a windowed sinc.

    Each new sample lies at one of few places between two old ones, so the filters of
    all places are made once.

        resampled(samples, 44_100)
    """
    if rate == SAMPLE_RATE:
        return samples
    places, step, reach = _filters(rate)
    # Below the lower of both rates, or sounds would come back as others.
    cutoff = min(1.0, SAMPLE_RATE / rate)
    taps = np.arange(-reach + 1, reach + 1)
    distance = taps - np.arange(places)[:, None] / places
    window = 0.5 + 0.5 * np.cos(np.pi * np.clip(distance / reach, -1, 1))
    filters = (cutoff * np.sinc(cutoff * distance) * window).astype(np.float32)
    padded = np.pad(samples, (reach - 1, reach + 1))
    count = len(samples) * SAMPLE_RATE // rate
    result = np.empty(count, np.float32)
    for place in range(min(places, count)):
        own = result[place::places]
        starts = place * step // places + step * np.arange(len(own))
        # A place is where it falls between two samples, so the filters are in turn.
        filter_ = filters[place * step % places]
        for tap, weight in enumerate(filter_):
            if tap:
                own += weight * padded[starts + tap]
            else:
                own[:] = weight * padded[starts]
    return result


def _refusal(problem: str) -> OptionError:
    return OptionError(problem, "file")
