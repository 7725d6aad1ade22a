"""From a WAV file to the log-mel spectrum that Whisper's encoder reads."""

import io
import struct
import warnings
from functools import cache
from math import gcd
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import HOP, SAMPLE_RATE, WINDOW
from jetdraft.contracts.tensors import Float32s, Float64s
from jetdraft.errors import OptionError, as_error, printable

MIN_SECONDS, MAX_SECONDS = 0.1, 2 * 3600.0  # Seconds of a sound that is read.
_UNKNOWN_SIZE = 2**62  # The header may not say the size, as from a pipe.
_MAX_CHUNKS = 1000  # The most chunks of a file before its sound.
# Formats of samples in a WAV header; the last has the format in another field.
_PCM, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE
_SAMPLE_BYTES = {_PCM: (1, 2, 3, 4), _FLOATS: (4, 8)}
_RATES = range(1000, 768_001)  # Samples a second of a file that is read.
_ADVICE = "convert it with ffmpeg -i IN -ac 1 -ar 16000 -c:a pcm_s16le OUT.wav"
_ZERO_CROSSINGS = 16  # Zero crossings of the resampling filter on each side.
_MAX_WEIGHTS = 100_000  # All filters of a rate; 44,100 samples/s need 14,400.
# Slaney's scale: linear to 1000 Hz, which are 15 mels, logarithmic above.
_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0
_LOG_STEP = np.log(6.4) / 27.0  # Above 1000 Hz 27 mels are a factor of 6.4.
_FLOOR, _RANGE = 1e-10, 8.0  # The least power; the powers of ten that are kept.


def read_sound(file: str | Path | bytes) -> Float32s:
    """The samples of a WAV file, or of its bytes: float32 [samples] within -1 and 1.

    The file must hold PCM of 8 to 32 bits, or floats of 32 or 64; it may be RF64, or
    state no length. Several channels become their mean, and other rates become
    16,000 samples/s. Warns of a file that was cut off. Raises `OptionError` for
    anything else, for a rate in no simple ratio to 16,000, and for a sound shorter than
    0.1 s or longer than two hours.

        read_sound("question.wav")
    """
    if isinstance(file, bytes):
        return _read_wav("the file", io.BytesIO(file))
    name = printable(file, 1000)
    fix = "give a WAV file"
    with as_error(OptionError, OSError, f"{name} cannot be read", fix, "file"):
        if Path(file).is_dir():
            raise _sound_error(f"{name} is a folder; give a WAV file")
        if not Path(file).is_file():
            raise _sound_error(f"there is no file {name}; give a WAV file")
        with Path(file).open("rb") as opened:
            return _read_wav(name, opened)


def _read_wav(name: str, opened: IO[bytes]) -> Float32s:
    """As `read_sound`, from an open file; `name` is for errors."""
    if not opened.read(1):
        raise _sound_error(f"{name} is empty; give a WAV file")
    opened.seek(0)
    try:
        header, size = _seek_data(opened)
        kind, channels, rate, bits = struct.unpack_from("<HHI6xH", header)
        if kind == _EXTENSIBLE:
            [kind] = struct.unpack_from("<H", header, 24)
        width = (bits + 7) // 8
        if width not in _SAMPLE_BYTES.get(kind, ()) or not channels:
            raise ValueError(f"format {kind}, {bits} bits, {channels} channels")
    except (struct.error, ValueError) as error:
        reason = error if isinstance(error, ValueError) else "a part is missing"
        fact = f"{name} is not a WAV file of PCM or floats ({reason}); {_ADVICE}"
        raise _sound_error(fact) from error
    places, _, reach = _filter_sizes(rate)
    if rate not in _RATES or places * 2 * reach > _MAX_WEIGHTS:
        fact = f"{name} has {rate} samples a second, which cannot be resampled to "
        fact += f"{SAMPLE_RATE} in few steps; {_ADVICE}"
        raise _sound_error(fact)
    data = _read_data(name, opened, size, width * channels, rate)
    samples = _to_floats(data, kind, width).reshape(-1, channels)
    if np.isnan(samples).any():
        raise _sound_error(f"{name} has samples that are not numbers; {_ADVICE}")
    return resample(samples.mean(1, dtype=np.float32), rate)


def _seek_data(opened: IO[bytes]) -> tuple[bytes, int]:
    """Seek to the sound; returns format chunk and stated size; raises `ValueError`."""
    kind, whole, form = struct.unpack("<4sI4s", opened.read(12))
    if kind not in (b"RIFF", b"RF64", b"BW64") or form != b"WAVE":
        raise ValueError("it begins otherwise")
    header, long_size = b"", 0
    for _ in range(_MAX_CHUNKS):
        part, size = struct.unpack("<4sI", opened.read(8))
        if part == b"data":
            is_known = size < 2**32 - 1 and size >> 16 != 2**15 - 1  # as sox says
            if size == 0:  # nothing, if other parts follow
                is_known = opened.tell() < whole + 8 < 2**32 - 1
            return header, size if is_known else long_size or _UNKNOWN_SIZE
        end = opened.tell() + size + size % 2
        if part == b"fmt ":
            header = opened.read(min(size, 40))
        elif part == b"ds64":
            [long_size] = struct.unpack("<8xQ", opened.read(16))
        opened.seek(end)
    raise ValueError(f"no sound after {_MAX_CHUNKS} parts")


def _read_data(
    name: str, opened: IO[bytes], size: int, frame: int, rate: int
) -> npt.NDArray[np.uint8]:
    """Read whole frames of `frame` bytes, at most `size` bytes; warns if cut off."""
    second = frame * rate
    place = opened.tell()
    rest = opened.seek(0, 2) - place  # memory is taken for all that is asked for
    opened.seek(place)
    data = opened.read(min(size, rest, int(MAX_SECONDS * second) + frame))
    data = data[: len(data) // frame * frame]
    _check_seconds(name, len(data) / second)
    if size < _UNKNOWN_SIZE and len(data) < size // frame * frame:
        fact = f"{name} is cut off: its header says {size / second:.2f} s of sound, "
        fact += f"and it has {len(data) / second:.2f}; record it again"
        warnings.warn(fact, stacklevel=2)
    return np.frombuffer(data, np.uint8)


def check_sound(samples: object) -> Float32s:
    """Return samples as `read_sound` does; raises `OptionError` for other arrays."""
    array = np.asarray(samples)
    if array.ndim != 1 or array.dtype.kind not in "f" or not np.isfinite(array).all():
        fact = "a sound is a WAV file, or finite floats [samples] of one channel at "
        fact += f"{SAMPLE_RATE} samples a second; give one of them"
        raise _sound_error(fact)
    _check_seconds("the sound", len(array) / SAMPLE_RATE)
    return array.astype(np.float32)


def _check_seconds(name: str, seconds: float) -> None:
    if seconds < MIN_SECONDS:
        fact = f"{name} has {seconds:.2f} s of sound, at least {MIN_SECONDS:g} are "
        fact += "needed; give a longer one"
        raise _sound_error(fact)
    if seconds > MAX_SECONDS:
        fact = f"{name} is longer than {MAX_SECONDS / 3600:g} hours"
        raise _sound_error(f"{fact}; cut it into shorter files")


def _to_floats(data: npt.NDArray[np.uint8], kind: int, width: int) -> Float32s:
    """Samples of `width` bytes, the lowest byte first, as float32 within -1 and 1."""
    if kind == _FLOATS:
        floats: Float32s = data.view(f"<f{width}").clip(-1, 1).astype(np.float32)
        return floats
    longer = np.zeros((len(data) // width, 4), np.uint8)
    longer[:, 4 - width :] = data.reshape(-1, width)
    if width == 1:  # the only width without a sign
        longer[:, 3] ^= 128
    floats = longer.view("<i4")[:, 0].astype(np.float32)
    floats *= np.float32(2.0**-31)
    return floats


def _filter_sizes(rate: int) -> tuple[int, int, int]:
    """How many filters a rate needs, the step between them, and their reach."""
    common = gcd(rate, SAMPLE_RATE)
    reach = int(np.ceil(_ZERO_CROSSINGS * max(1.0, rate / SAMPLE_RATE)))
    return SAMPLE_RATE // common, rate // common, reach


def resample(samples: Float32s, rate: int) -> Float32s:
    """Samples at `rate` as samples at 16,000 a second, by a windowed sinc."""
    if rate == SAMPLE_RATE:
        return samples
    places, step, reach = _filter_sizes(rate)
    # Below the lower of both rates, or sounds would come back as others.
    cutoff = min(1.0, SAMPLE_RATE / rate)
    taps = np.arange(-reach + 1, reach + 1)
    # A new sample lies at one of few places between two old ones.
    distance = taps - np.arange(places)[:, None] / places
    window = 0.5 + 0.5 * np.cos(np.pi * np.clip(distance / reach, -1, 1))
    filters = (cutoff * np.sinc(cutoff * distance) * window).astype(np.float32)
    padded = np.pad(samples, (reach - 1, reach + 1))
    count = len(samples) * SAMPLE_RATE // rate
    result = np.zeros(count, np.float32)
    for place in range(min(places, count)):
        own = result[place::places]
        starts = place * step // places + step * np.arange(len(own))
        for tap, weight in enumerate(filters[place * step % places]):
            own += weight * padded[starts + tap]
    return result


def _sound_error(problem: str) -> OptionError:
    return OptionError(problem, "file")


def log_mel(samples: Float32s, bins: int, frames: int) -> Float32s:
    """Whisper's spectrum (2212.04356, 2.2), float32 [bins, frames of 10 ms]."""
    size = frames * HOP
    padded = np.zeros(size, np.float32)
    padded[: min(size, len(samples))] = samples[:size]
    # A frame's middle is at its time, so the first one sees the sound mirrored.
    mirrored = np.pad(padded, WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(mirrored, WINDOW)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    spectrum = np.fft.rfft(windows[: frames * HOP : HOP] * hann)
    mels = np.abs(spectrum) ** 2 @ _mel_filters(bins)
    logarithms = np.log10(np.maximum(mels, _FLOOR))
    loud = np.maximum(logarithms, logarithms.max() - _RANGE)
    return np.ascontiguousarray(((loud + 4) / 4).T, np.float32)


@cache
def _mel_filters(bins: int) -> Float64s:
    """Triangles [frequencies, bins] of equal area, equally wide in mels."""
    hertz = np.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)[:, None]
    highest = _LINEAR_MELS + np.log(SAMPLE_RATE / 2 / _LINEAR_HERTZ) / _LOG_STEP
    mels = np.linspace(0, highest, bins + 2)
    linear = mels * _LINEAR_HERTZ / _LINEAR_MELS
    curved = _LINEAR_HERTZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    corners = np.where(mels < _LINEAR_MELS, linear, curved)
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
    return np.asarray(np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low))
