"""The operators compute what llama.cpp's types stand for, in passes of any width."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from jetdraft.quant.grids import GRIDS
from tests.native.operators import random_matrix, run, session

SHAPES = ((48, 512), (40, 200), (7, 31))


def rounded_to_int8(x):
    """Rows as the operator reads them: int8 in blocks of 32."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    integers = np.rint(blocks / np.where(scales == 0, 1, scales))
    return (integers * scales).reshape(len(x), -1)[:, : x.shape[1]].astype(np.float64)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("columns", "rows"), SHAPES)
def test_a_product_is_exact_but_for_rounded_rows(grid, columns, rows):
    matrix = random_matrix(grid, columns, rows)
    x = np.random.default_rng(1).standard_normal((19, rows)).astype(np.float32)
    x[3], x[5, : rows // 2] = 0, 0
    expected = rounded_to_int8(x) @ matrix.floats.astype(np.float64)
    found = run("MatMulPacked", matrix, x)
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("grid", GRIDS)
def test_a_row_has_the_same_bits_in_every_pass(grid):
    matrix = random_matrix(grid, 48, 512)
    x = np.random.default_rng(1).standard_normal((19, 512)).astype(np.float32)
    two, one = session("MatMulPacked", matrix), session("MatMulPacked", matrix)
    whole = two.run(None, {"x": x})[0]
    for width in range(1, 19):
        part = one.run(None, {"x": x[19 - width :]})[0]
        np.testing.assert_array_equal(part, whole[19 - width :])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads):
    matrix = random_matrix("Q4_K", 400, 512)
    x = np.random.default_rng(1).standard_normal((9, 512)).astype(np.float32)
    found = run("MatMulPacked", matrix, x, threads=threads)
    np.testing.assert_array_equal(found, run("MatMulPacked", matrix, x))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("columns", "rows"), SHAPES)
def test_a_column_is_gathered_exactly(grid, columns, rows):
    matrix = random_matrix(grid, columns, rows)
    ids = np.array([[0, columns - 1], [columns // 2, 0]])
    found = run("GatherPacked", matrix, ids)
    np.testing.assert_array_equal(found, matrix.floats.T[ids])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_itself_only(bad):
    matrix = random_matrix("Q4_0", 32, 64)
    x = np.ones((3, 64), np.float32)
    plain = run("MatMulPacked", matrix, x)
    x[1, 40] = bad
    found = run("MatMulPacked", matrix, x)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], plain[[0, 2]])


def test_a_pass_may_have_no_rows():
    found = run("MatMulPacked", random_matrix("Q8_0", 32, 64), np.ones((0, 64), "f4"))
    assert found.shape == (0, 32)


SHORT = np.zeros(8, np.uint8)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"integers": SHORT}, "another size"),
        ({"scales": SHORT}, "another size"),
        ({"integers": SHORT.astype(np.float32)}, "float"),
        ({"N": 64}, "another size"),
        ({"K": 60}, "another width"),
        ({"K": 96}, "another size"),
        ({"N": 2**62}, "out of range"),
        ({"K": 0}, "out of range"),
        ({"K": -32}, "out of range"),
        ({"format": len(GRIDS)}, "unknown format"),
        ({"format": -1}, "unknown format"),
        ({"layout": 2}, "packed in layout 2, and this version reads layout 1"),
    ],
)
def test_a_damaged_matrix_is_refused(changed, reason):
    matrix, x = random_matrix("Q4_0", 32, 64), np.ones((1, 64), "f4")
    with pytest.raises(Exception, match=reason):
        run("MatMulPacked", matrix, x, **changed)


@pytest.mark.parametrize("wrong", [-1, 32, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(wrong):
    matrix = random_matrix("Q4_0", 32, 64)
    said = f"the id {wrong} is not in the vocabulary of 32"
    with pytest.raises(Exception, match=said):
        run("GatherPacked", matrix, np.array([0, wrong]))


def run_isa(name):
    code = "from jetdraft import native; print(native.isa())"
    environment = {**os.environ, "JETDRAFT_ISA": name}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )


def test_the_environment_names_the_instructions():
    assert run_isa("portable").stdout == "portable\n"
    refused = run_isa("abacus")
    assert refused.returncode
    assert "JETDRAFT_ISA names; leave it out" in refused.stderr
