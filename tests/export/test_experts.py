"""Families with experts through the real path, against transformers' own loop."""

import sys
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch

from jetdraft.export.seams import check_seams
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.session import StepSessions, open_session
from tests.export import test_architectures as architectures
from tests.tiny import MIXTURES, VOCAB_SIZE

TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 200)


@pytest.fixture(scope="module", params=MIXTURES)
def case(request, tmp_path_factory):
    """One family, traced once: its graph, and what transformers says of its weights.

    Gated delta rules are computed row by row, see `test_recurrent.case`.
    """
    config, folder = MIXTURES[request.param](), tmp_path_factory.mktemp("mixture")
    config._experts_implementation = "eager"
    checkpoint = architectures.load(config, folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        scope = sys.modules[type(checkpoint.model).__module__]
        by_row = getattr(scope, "torch_recurrent_gated_delta_rule", None)
        patch.setattr(scope, "torch_chunk_gated_delta_rule", by_row, raising=False)
        weights = checkpoint.model.state_dict()
        expected = architectures.transformers_logits(config, weights, TOKENS)
    contract = architectures.contract_of(checkpoint, 256)
    check_seams(checkpoint.model, contract)
    ir.save(architectures.traced(checkpoint, contract), folder / "step.onnx")
    sessions = StepSessions(open_session(folder / "step.onnx", "cpu"), contract)
    return SimpleNamespace(graph=Graph(sessions), expected=expected)


@pytest.mark.parametrize("length", [1, 63, 200])
def test_a_prompt_in_chunks_equals_transformers(case, length):
    graph, expected = case.graph, case.expected
    # Otherwise this would prove little.
    assert expected.std(axis=-1).min() > 0.1
    graph.cache.rewind(0)
    for start in range(0, length, 32):
        end = min(length, start + 32)
        logits = graph.run(TOKENS[start:end]).logits
        architectures.assert_close(logits, expected[start:end])
        np.testing.assert_array_equal(logits.argmax(-1), expected[start:end].argmax(-1))
        graph.cache.advance(end - start)
