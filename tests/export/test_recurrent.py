"""Families with recurrent states through the real path, against transformers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.derived import make_replay_graph
from jetdraft.export.fusing import fuse
from jetdraft.export.seams import check_seams
from jetdraft.export.step import Step, buffer_sizes
from jetdraft.export.tracer import trace
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.session import StepSessions, open_session
from tests.export.test_architectures import load
from tests.hybrids import CONFIGS
from tests.tiny import VOCAB_SIZE

TOLERANCE = 1e-4
TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 500)
CAPACITY, WIDEST = 512, 64
DRAFT = 5


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    """One family, traced once: its graph, and what it should say."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = load(CONFIGS[request.param](), folder / "checkpoint")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "checkpoint", attn_implementation="eager"
    )
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        # As transformers decodes, row by row: its sums over chunks of rows are further
        # from float64 than TOLERANCE.
        scope = sys.modules[type(model).__module__]
        by_row = getattr(scope, "torch_recurrent_gated_delta_rule", None)
        if by_row is not None:
            patch.setattr(scope, "torch_chunk_gated_delta_rule", by_row)
        expected = model(torch.tensor(TOKENS)[None]).logits[0].numpy()
    sizes = buffer_sizes(checkpoint.model)
    contract = StepContract(
        vocab_size=checkpoint.vocab_size, capacity=CAPACITY, max_width=WIDEST,
        dtype="float32", spare_slots=1, **sizes,
    )  # fmt: skip
    check_seams(checkpoint.model, contract)
    traced = trace(Step(checkpoint.model, contract), checkpoint.weight_names())
    fuse(traced, contract)
    ir.save(traced, folder / "step.onnx")
    ir.save(make_replay_graph(contract), folder / "replay.onnx")
    step, replay = (
        open_session(folder / f"{n}.onnx", "cpu") for n in ("step", "replay")
    )
    graph = Graph(StepSessions(step, contract), replay)
    return SimpleNamespace(graph=graph, contract=contract, expected=expected)


def restart(graph: Graph, tokens=()) -> None:
    """Begin a text with these tokens, in one pass."""
    graph.cache.rewind(0)
    if len(tokens):
        graph.run(tokens, last_only=True)
        graph.cache.advance(len(tokens))


def states(graph: Graph) -> list[bytes]:
    return [state.tobytes() for state in graph.cache.copy_states().values()]


@pytest.mark.parametrize("length", [1, 63, 500])
def test_a_prompt_in_chunks_equals_transformers(case, length):
    graph, expected = case.graph, case.expected
    # Otherwise this, and everything below, would prove little.
    assert expected.std(axis=-1).min() > 0.1
    restart(graph)
    for start in range(0, length, WIDEST):
        end = min(length, start + WIDEST)
        part, wanted = TOKENS[start:end], expected[start:end]
        logits = graph.run(part, width=WIDEST if length > 400 else 0).logits
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(logits.argmax(-1), wanted.argmax(-1))
        graph.cache.advance(len(part))


@pytest.mark.parametrize("accepted", range(DRAFT + 1))
def test_the_state_after_every_outcome_is_that_of_row_by_row(case, accepted):
    """To the bit: of a pass whose last rows are wrong, and of the passes after it."""
    graph, width = case.graph, DRAFT + 1
    prompt, true = TOKENS[:21], TOKENS[21 : 21 + width]
    restart(graph, prompt)
    rows = []
    for token in true[: accepted + 1]:
        rows.append(graph.run([token], width=width).logits[0].copy())
        graph.cache.advance(1)
    by_row = states(graph)
    following = graph.run([7], width=width).logits.copy()

    restart(graph, prompt)
    wrong = (true + 1) % VOCAB_SIZE
    draft = [*true[: accepted + 1], *wrong[accepted + 1 :]]
    for _ in range(2):  # a pass that nobody commits leaves no trace
        logits = graph.run(draft).logits.copy()
    graph.cache.advance(accepted + 1)
    assert states(graph) == by_row
    np.testing.assert_array_equal(logits[: accepted + 1], rows)
    np.testing.assert_array_equal(graph.run([7], width=width).logits, following)


def test_ways_back(case):
    """Lead to the beginning and to the states that were kept, nowhere else."""
    graph, cache = case.graph, case.graph.cache
    restart(graph, TOKENS[:20])
    cache.keep()
    before = states(graph)
    graph.run(TOKENS[20:30])
    cache.advance(7)
    assert [cache.resumable(n) for n in (99, 27, 26, 20, 19)] == [27, 27, 20, 20, 0]
    with pytest.raises(ValueError, match="cannot rewind from 27 rows to 26"):
        cache.rewind(26)
    stored = cache.copy_rows(20)
    cache.rewind(20)
    assert states(graph) == before
    cache.rewind(0)
    assert not any(map(any, states(graph)))
    cache.restore(stored, 20)
    assert states(graph) == before
    assert cache.resumable(20) == 20


def test_rows_that_no_pass_has_run_cannot_be_committed(case):
    restart(case.graph, TOKENS[:4])
    with pytest.raises(ValueError, match="no pass has run the 1 rows"):
        case.graph.cache.advance(1)
