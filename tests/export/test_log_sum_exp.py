"""The logsumexp of a row has the same bits whatever rows stand beside it."""

from __future__ import annotations

import numpy as np
import onnxruntime
import torch

from jetdraft.export.step import log_sum_exp

ROWS, VOCABULARY, TRIALS = 16, 384, 60


class Sum(torch.nn.Module):
    def forward(self, logits):
        return log_sum_exp(logits, logits.amax(-1, keepdim=True))[..., 0]


def test_no_bit_depends_on_the_number_of_rows(tmp_path):
    file, rows = tmp_path / "sum.onnx", torch.export.Dim("n")
    example = torch.zeros(1, 3, VOCABULARY)
    torch.onnx.export(
        Sum().eval(),
        (example,),
        file,
        dynamo=True,
        dynamic_shapes=({1: rows},),
        verbose=False,
    )
    session = onnxruntime.InferenceSession(file)
    [name] = (value.name for value in session.get_inputs())
    random = np.random.default_rng(1)
    for _ in range(TRIALS):
        spread = random.choice([1, 4, 8])
        logits = random.normal(size=(1, ROWS, VOCABULARY)).astype(np.float32) * spread
        logits = logits.astype(np.float32)
        [whole] = session.run(None, {name: logits})
        truth = np.log(np.exp(logits[0].astype(np.float64)).sum(-1))
        np.testing.assert_allclose(whole[0], truth, rtol=1e-6)
        for width in range(1, ROWS):
            [part] = session.run(None, {name: logits[:, :width]})
            assert np.array_equal(part[0], whole[0, :width]), width
