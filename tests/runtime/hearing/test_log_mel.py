"""The spectrum is that of transformers."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from jetdraft.runtime.hearing.log_mel import log_mel
from tests import whispers


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.1, 2.345, 31.0])
def test_it_is_that_of_transformers(bins, seconds):
    samples = whispers.sound(seconds)
    extractor = WhisperFeatureExtractor(feature_size=bins)
    wanted = extractor(samples, sampling_rate=16_000)["input_features"][0]
    found = log_mel(samples, bins, 3000)
    assert found.dtype == np.float32
    assert found.shape == (bins, 3000)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_silence_has_no_spectrum():
    assert np.ptp(log_mel(np.zeros(1600, np.float32), 80, 100)) == 0
