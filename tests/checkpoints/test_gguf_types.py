"""Blocks of each type of a GGUF file stand for what the gguf library dequantizes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from jetdraft.checkpoints.gguf_types import TYPES
from tests.ggufs import random_bytes


@pytest.mark.parametrize("name", TYPES)
def test_integers_stand_for_what_gguf_dequantizes(name):
    """Exactly, or within half a step of the finer grid."""
    kind = Type[name]
    data = random_bytes(kind, (6, 512), seed=1)
    expected = quants.dequantize(data, kind)
    blocks = TYPES[name].read(data)
    assert blocks.rows == 512
    if TYPES[name].form.endswith("exact"):
        np.testing.assert_array_equal(blocks.floats.T, expected)
        return
    steps = np.abs(blocks.scales).repeat(blocks.block_size, 1)
    errors = np.abs(blocks.floats.T - expected)
    assert (errors <= 0.501 * steps).all()
    assert np.median(errors) < 0.01 * expected.std()


@pytest.mark.parametrize("minimum", [-0.5, -0.07, -0.0401, 0.0, 0.25])
def test_a_minimum_that_is_no_multiple_of_the_step(minimum):
    """All weights below 0, weights of both signs, and all above."""
    data = random_bytes(Type.Q4_1, (4, 32), seed=2)
    data[:, :4] = np.array([0.01, minimum], "<f2").view(np.uint8)
    expected = quants.dequantize(data, Type.Q4_1)
    blocks = TYPES["Q4_1"].read(data)
    most = np.abs(expected).max() / 255 if minimum > 0 else 0.01 / 18
    assert np.abs(blocks.floats.T - expected).max() <= 0.501 * most


def test_each_block_has_the_best_of_all_grids():
    """With the finest grid for all, the median would be 0.015 of a step."""
    data = random_bytes(Type.Q4_1, (500, 32), seed=3)
    minima = np.random.default_rng(0).uniform(-0.14, -0.01, 500).astype("<f2")
    data[:, 0:2] = np.array([0.01], "<f2").view(np.uint8)
    data[:, 2:4] = minima[:, None].view(np.uint8)
    expected = quants.dequantize(data, Type.Q4_1)
    errors = np.abs(TYPES["Q4_1"].read(data).floats.T - expected)
    assert np.median(errors) < 0.006 * 0.01


def test_a_block_of_one_value():
    """Its step is 0, so no zero point could stand for the minimum."""
    data = np.zeros((1, 20), np.uint8)
    for minimum in (0.0, 0.25, -0.25):
        data[0, 2:4] = np.array([minimum], "<f2").view(np.uint8)
        assert (TYPES["Q4_1"].read(data).floats == minimum).all()
