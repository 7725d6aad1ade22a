import struct
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from jetdraft.errors import OptionError
from jetdraft.runtime.speech import sound
from jetdraft.runtime.speech.segments import Segment, Window, srt, vtt
from jetdraft.runtime.speech.sound import MAX_SECONDS, log_mel, read_sound, resample
from tests import cases, whispers
from tests.programs import refused_option

T = 100
"""The id of the timestamp 0.00."""


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_is_read(width, longer, tmp_path):
    """Also under the long name of PCM, as sox writes 24 bits a sample."""
    samples, file = whispers.sound(0.3), tmp_path / "sound.wav"
    data = whispers.wav(samples, width=width)
    file.write_bytes(whispers.extensible(data) if longer else data)
    for given in (file, file.read_bytes()):
        found = read_sound(given)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, samples, atol=2.0 ** (2 - 8 * width) + 1e-6)
    with pytest.raises(OptionError, match="not a WAV file of PCM"):
        read_sound(whispers.extensible(whispers.wav(samples), kind=3))  # short floats


def part(name: bytes, data: bytes, size: int | None = None) -> bytes:
    size = len(data) if size is None else size
    return name + size.to_bytes(4, "little") + data + bytes(len(data) % 2)


def riff(*parts: bytes, kind: bytes = b"RIFF", size: int | None = None) -> bytes:
    return part(kind, b"WAVE" + b"".join(parts), size)


def form(samples: np.ndarray, kind: int) -> bytes:
    channels, width = samples.reshape(len(samples), -1).shape[1], samples.itemsize
    frame = width * channels
    fields = kind, channels, 16_000, 16_000 * frame, frame, 8 * width
    return part(b"fmt ", struct.pack("<HHIIHH", *fields))


SHORT = (whispers.sound(0.3) * 32768).astype("<i2")
WANTED = SHORT.astype(np.float32) / 32768
PCM, DATA = form(SHORT, 1), SHORT.tobytes()
NOTE = part(b"LIST", b"INFOISFT\x05\0\0\0Lavf\0")  # of an odd size
FAR = 2**32 - 1


def long_sizes(data: int) -> bytes:
    return part(b"ds64", struct.pack("<QQQI", 0, data, 0, 0))


@pytest.mark.parametrize("type_", ["<f4", "<f8"])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("longer", [False, True])
def test_floats_are_read(type_, channels, longer):
    samples = np.stack([whispers.sound(0.3), whispers.sound(0.3, hertz=300.0)], 1)
    samples = samples[:, :channels].astype(type_)
    samples[5:9] *= 1e30  # as loud as a file can hold
    data = riff(form(samples, 3), part(b"data", samples.tobytes()))
    found = read_sound(whispers.extensible(data, 3) if longer else data)
    wanted = samples.clip(-1, 1).mean(1, dtype=np.float32)
    np.testing.assert_allclose(found, wanted, atol=1e-7)
    samples[100] = np.nan
    with pytest.raises(OptionError, match="samples that are not numbers"):
        read_sound(riff(form(samples, 3), part(b"data", samples.tobytes())))


@cases(
    "data",
    riff(NOTE, PCM, NOTE, part(b"data", DATA), NOTE),
    riff(PCM, part(b"data", DATA), size=0),
    riff(PCM, part(b"data", DATA, 0), size=0),
    riff(PCM, part(b"data", DATA, FAR), size=FAR),
    riff(PCM, part(b"data", DATA, 2**31 - 2**12), size=2**31 - 2**12 + 36),
    riff(long_sizes(len(DATA)), PCM, part(b"data", DATA, FAR), NOTE, kind=b"RF64"),
    riff(long_sizes(0), PCM, part(b"data", DATA, FAR), kind=b"BW64", size=FAR),
    riff(long_sizes(2**64 - 1), PCM, part(b"data", DATA, FAR), kind=b"RF64"),
    riff(part(b"JUNK", bytes(28)), PCM, part(b"data", DATA), kind=b"RF64"),
    ids=["parts", "no size", "no sizes", "pipe", "sox", "RF64", "BW64", "far", "short"],
)
def test_the_sound_is_found(data, tmp_path, recwarn):
    file = tmp_path / "sound.wav"
    file.write_bytes(data)
    np.testing.assert_array_equal(read_sound(data), WANTED)
    np.testing.assert_array_equal(read_sound(file), WANTED)
    assert not recwarn


def test_a_pipe_of_24_bits_is_not_called_cut_off(recwarn):
    """The largest size is no multiple of its frames of three bytes."""
    samples = np.zeros((2000, 3), np.uint8)
    header = part(b"fmt ", struct.pack("<HHIIHH", 1, 1, 16_000, 48_000, 3, 24))
    data = riff(header, part(b"data", samples.tobytes(), FAR), size=FAR)
    np.testing.assert_array_equal(read_sound(data), np.zeros(2000))
    assert not recwarn


@contextmanager
def memory_of_at_most(limit):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def test_a_file_takes_the_memory_of_its_floats(tmp_path):
    """Also if it knows no length; a sound of two hours must not need it twice."""
    file = tmp_path / "sound.wav"
    file.write_bytes(riff(PCM, part(b"data", DATA, FAR), size=FAR))
    with memory_of_at_most(20 * len(DATA)):
        read_sound(file)
    data = whispers.wav(whispers.sound(30.0))
    for given in (data, whispers.extensible(data)):
        with memory_of_at_most(3.5 * 4 * 30 * 16_000):
            read_sound(given)


def test_channels_become_their_mean(tmp_path):
    left, right = whispers.sound(0.3), whispers.sound(0.3, hertz=300.0)
    file = tmp_path / "stereo.wav"
    file.write_bytes(whispers.wav(np.stack([left, right], 1)))
    np.testing.assert_allclose(read_sound(file), (left + right) / 2, atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_a_tone_stays_the_same_tone_at_other_rates(rate):
    def tone(rate):
        return np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)

    found = resample(tone(rate), rate)
    assert len(found) == 16_000
    # The ends lack neighbours.
    np.testing.assert_allclose(found[200:-200], tone(16_000)[200:-200], atol=2e-3)


def test_what_16_khz_cannot_hold_is_filtered_out():
    high = np.sin(2 * np.pi * 12_000 * np.arange(48_000) / 48_000)
    assert np.abs(resample(high.astype(np.float32), 48_000)[200:-200]).max() < 1e-2


def damaged(data: bytes, place: int, *values: int) -> bytes:
    return data[:place] + bytes(values) + data[place + len(values) :]


GOOD = whispers.wav(whispers.sound(0.3))
BAD = {
    "empty": (b"", "is empty"),
    "text": (b"hello, I am no sound", "is not a WAV file of PCM"),
    "cut header": (GOOD[:20], "is not a WAV file of PCM"),
    "float": (damaged(GOOD, 20, 3), "is not a WAV file of PCM"),
    "no channels": (damaged(GOOD, 22, 0, 0), "is not a WAV file of PCM"),
    "no rate": (damaged(GOOD, 24, 0, 0, 0, 0), "samples a second"),
    "strange rate": (damaged(GOOD, 24, 0xFF, 0xB7, 0x0B), "767999 samples a second"),
    "rate without ratio": (damaged(GOOD, 24, 1, 125), "32001 samples a second"),
    "a-law": (riff(form(SHORT, 6), part(b"data", DATA)), "format 6, 16 bits, 1 ch"),
    "big-endian": (riff(PCM, part(b"data", DATA), kind=b"RIFX"), "begins otherwise"),
    "no format": (riff(part(b"data", DATA), PCM), "a part is missing"),
    "only parts": (riff(PCM, NOTE * 1001, part(b"data", DATA)), "after 1000 parts"),
    "short format": (riff(part(b"fmt ", PCM[8:20]), part(b"data", DATA)), "is missing"),
    "huge format": (damaged(GOOD, 16, 255, 255, 255, 127), "a part is missing"),
    "huge list": (damaged(GOOD, 12, *b"LIST", 0xF0, 255, 255, 255), "is missing"),
    "header alone": (GOOD[:44], "0.00 s of sound, at least 0.1"),
    "nothing before a note": (
        riff(PCM, part(b"data", b""), part(b"LIST", bytes(40_000))),
        "has 0.00 s of sound",
    ),
    "too short": (whispers.wav(whispers.sound(0.05)), "0.05 s of sound"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_files_are_refused(name, tmp_path):
    data, said = BAD[name]
    file = tmp_path / "sound.wav"
    file.write_bytes(data)
    for place in (data, file):
        with refused_option(said, "file"):
            read_sound(place)


def test_a_file_that_ends_early_is_read_as_far_as_it_goes():
    said = r"is cut off: its header says 0\.30 s of sound, and it has 0\.27;"
    with pytest.warns(UserWarning, match=said):
        assert len(read_sound(GOOD[:-1001])) == 4800 - 501
    sizes = long_sizes(3 * 2**31)
    with pytest.warns(UserWarning, match=r"says 201326.59 s of sound, and it has 0.30"):
        found = read_sound(riff(sizes, PCM, part(b"data", DATA, FAR), kind=b"RF64"))
    np.testing.assert_array_equal(found, WANTED)
    # Programs that write into a pipe put the largest size into the header.
    for size in (b"\xff\xff\xff\xff", b"\xdb\xff\xff\x7f"):
        assert len(read_sound(damaged(GOOD, 40, *size))) == 4800


def test_long_sounds_and_wrong_arrays_are_refused(tmp_path):
    slow = whispers.wav(
        np.zeros(1000 * int(MAX_SECONDS + 2), np.float32), 1000, width=1
    )
    with pytest.raises(OptionError, match="longer than 2 hours"):
        read_sound(slow)
    for wrong in ([[0.0]], [1, 2], np.full(1600, np.nan), "abc"):
        with pytest.raises(OptionError, match="a sound is a WAV file"):
            sound.check_sound(wrong)
    for place, fact in (tmp_path, "is a folder"), (tmp_path / "a.wav", "no file"):
        with pytest.raises(OptionError, match=fact):
            read_sound(place)


@pytest.mark.parametrize(("bins", "seconds"), [(80, 0.1), (128, 2.345), (80, 31.0)])
def test_the_spectrum_of_transformers(bins, seconds):
    samples = whispers.sound(seconds)
    extractor = WhisperFeatureExtractor(feature_size=bins)
    wanted = extractor(samples, sampling_rate=16_000)["input_features"][0]
    found = log_mel(samples, bins, 3000)
    assert found.dtype == np.float32
    assert found.shape == (bins, 3000)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_silence_has_no_spectrum():
    assert np.ptp(log_mel(np.zeros(1600, np.float32), 80, 100)) == 0


@cases(
    "tokens, spans, slots",
    # A segment that was cut off is left to the next window.
    ([T, 5, 6, T + 50, T + 50, 7, 8], [(0, 50, [5, 6])], 50),
    # A closed window is taken whole.
    ([T, 5, T + 40, T + 45, 7, T + 90], [(0, 40, [5]), (45, 90, [7])], 1500),
    # One segment ends at its timestamp, or with the window.
    ([T, 5, T + 40], [(0, 40, [5])], 1500),
    ([T, 5], [(0, 1500, [5])], 1500),
    ([5, 6], [(0, 1500, [5, 6])], 1500),
)
def test_timestamps_cut_a_window(tokens, spans, slots):
    assert Window.of(tokens, T, 1500) == Window(spans, slots)


def test_every_window_moves_on():
    for tokens in ([T, T], [T, 5, T, T, 6], [], [T], [T, T, T]):
        assert Window.of(tokens, T, 50).slots > 0
    assert Window.of([T, T], T, 50).spans == []


def test_subtitles():
    segments = [
        Segment(0.0, 2.4, " Hi -->\n\n you.", []),
        Segment(3661.5, 3662.0, "x", []),
    ]
    assert (srt(segments), vtt(segments[:1])) == (
        "1\n00:00:00,000 --> 00:00:02,400\nHi -> you.\n\n"
        "2\n01:01:01,500 --> 01:01:02,000\nx\n\n",
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.400\nHi -> you.\n\n",
    )
