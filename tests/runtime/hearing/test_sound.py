"""WAV files of all kinds become the same sound, and other files one clear line."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.hearing.sound import LONGEST, check_sound, read_sound, resampled
from tests import whispers


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_is_read(width):
    samples = whispers.sound(0.3)
    found = read_sound(whispers.wav(samples, width=width))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, samples, atol=2.0 ** (2 - 8 * width) + 1e-6)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_the_long_name_of_pcm_is_read(as_bytes, tmp_path):
    """As sox writes 24 bits a sample."""
    samples = whispers.sound(0.3)
    data = whispers.extensible(whispers.wav(samples, width=3))
    file = tmp_path / "sound.wav"
    file.write_bytes(data)
    found = read_sound(data if as_bytes else file)
    np.testing.assert_allclose(found, samples, atol=1e-6)
    assert file.read_bytes() == data
    with pytest.raises(OptionError, match="not a WAV file of PCM"):
        read_sound(whispers.extensible(whispers.wav(samples), kind=3))  # floats


@pytest.mark.parametrize("longer", [False, True])
def test_samples_take_the_memory_of_their_floats(longer):
    """A sound of two hours must not need twice its size for a moment."""
    data = whispers.wav(whispers.sound(30.0))
    data = whispers.extensible(data) if longer else data
    tracemalloc.start()
    try:
        size = read_sound(data).nbytes
        assert tracemalloc.get_traced_memory()[1] < 3.5 * size
    finally:
        tracemalloc.stop()


def test_channels_become_their_mean(tmp_path):
    left, right = whispers.sound(0.3), whispers.sound(0.3, hertz=300.0)
    file = tmp_path / "stereo.wav"
    file.write_bytes(whispers.wav(np.stack([left, right], 1)))
    np.testing.assert_allclose(read_sound(file), (left + right) / 2, atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_a_tone_stays_the_same_tone_at_other_rates(rate):
    def tone(rate):
        return np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)

    found = resampled(tone(rate), rate)
    assert len(found) == 16_000
    # The ends lack neighbours.
    np.testing.assert_allclose(found[200:-200], tone(16_000)[200:-200], atol=2e-3)


def test_what_16_khz_cannot_hold_is_filtered_out():
    high = np.sin(2 * np.pi * 12_000 * np.arange(48_000) / 48_000)
    found = resampled(high.astype(np.float32), 48_000)
    assert np.abs(found[200:-200]).max() < 1e-2


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
    "huge format": (damaged(GOOD, 16, 255, 255, 255, 127), "it ends too early"),
    "huge list": (
        damaged(GOOD, 12, *b"LIST", 0xF0, 255, 255, 255),
        "it ends too early",
    ),
    "header alone": (GOOD[:44], "0.00 s of sound, at least 0.1"),
    "too short": (whispers.wav(whispers.sound(0.05)), "0.05 s of sound"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_files_are_refused(name, tmp_path):
    data, said = BAD[name]
    file = tmp_path / "sound.wav"
    file.write_bytes(data)
    for place in (data, file):
        with pytest.raises(OptionError, match=said) as refused:
            read_sound(place)
        assert refused.value.field == "file"


def test_a_file_that_ends_early_is_read_as_far_as_it_goes():
    said = r"is cut off: its header says 0\.30 s of sound, and it has 0\.27;"
    with pytest.warns(UserWarning, match=said):
        assert len(read_sound(GOOD[:-1001])) == 4800 - 501


def test_a_header_that_was_written_before_the_sound_knows_no_length():
    """Programs that write into a pipe put the largest size there."""
    for size in (b"\xff\xff\xff\xff", b"\xdb\xff\xff\x7f"):
        assert len(read_sound(damaged(GOOD, 40, *size))) == 4800


def test_long_sounds_and_wrong_arrays_are_refused(tmp_path):
    slow = whispers.wav(np.zeros(1000 * int(LONGEST + 2), np.float32), 1000, width=1)
    with pytest.raises(OptionError, match="longer than 2 hours"):
        read_sound(slow)
    for wrong in ([[0.0]], [1, 2], np.full(1600, np.nan), "abc"):
        with pytest.raises(OptionError, match="a sound is a WAV file"):
            check_sound(wrong)
    for place, fact in (tmp_path, "is a folder"), (tmp_path / "a.wav", "no file"):
        with pytest.raises(OptionError, match=fact):
            read_sound(place)
