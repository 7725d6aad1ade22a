"""The log-mel spectrum that Whisper's encoder reads (2212.04356, section 2.2)."""

from __future__ import annotations

from functools import cache

import numpy as np

from jetdraft.runtime.drafts.arrays import Float32s, Float64s
from jetdraft.speech.speech_tokens import HOP, SAMPLE_RATE, WINDOW

_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0
"""Slaney's scale: linear to 1000 Hz, which are 15 mels, logarithmic above."""

_OCTAVE = np.log(6.4) / 27.0
_FLOOR, _RANGE = 1e-10, 8.0


def log_mel(samples: Float32s, bins: int, frames: int) -> Float32s:
    """Samples at 16,000 a second as float32 [bins, frames], a frame each 10 ms.

    What lies behind the frames is cut off, and silence is added before them.

        log_mel(read_sound("question.wav"), bins=80, frames=3000)
    """
    size = frames * HOP
    padded = np.zeros(size, np.float32)
    padded[: min(size, len(samples))] = samples[:size]
    # A frame's middle is at its time, so the first one sees the sound mirrored.
    mirrored = np.pad(padded, WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(mirrored, WINDOW)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    spectrum = np.fft.rfft(windows[: frames * HOP : HOP] * hann)
    mels = np.abs(spectrum) ** 2 @ _filters(bins)
    logarithms = np.log10(np.maximum(mels, _FLOOR))
    loud = np.maximum(logarithms, logarithms.max() - _RANGE)
    return np.ascontiguousarray(((loud + 4) / 4).T, np.float32)


@cache
def _filters(bins: int) -> Float64s:
    """Triangles [frequencies, bins] of equal area, equally wide in mels."""
    hertz = np.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)[:, None]
    corners = _hertz(np.linspace(0, _mels(SAMPLE_RATE / 2), bins + 2))
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    rising, falling = (hertz - low) / (middle - low), (high - hertz) / (high - middle)
    return np.asarray(np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low))


def _mels(hertz: float) -> float:
    """A frequency above the linear part, in mels."""
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_HERTZ) / _OCTAVE)


def _hertz(mels: Float64s) -> Float64s:
    linear = mels * _LINEAR_HERTZ / _LINEAR_MELS
    curved = _LINEAR_HERTZ * np.exp(_OCTAVE * (mels - _LINEAR_MELS))
    return np.asarray(np.where(mels < _LINEAR_MELS, linear, curved))
