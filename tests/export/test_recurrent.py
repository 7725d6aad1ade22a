"""Families with recurrent states, or with layers that share keys and values, against
transformers through the real path."""

import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes import common

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.constants import WIDEST
from jetdraft.export.fusing import fill_packets
from jetdraft.export.seams import check_seams
from jetdraft.runtime.measured.survey import randomized
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.session import StepSessions, open_session
from tests.checkpoints.heads.test_mtp import edit
from tests.export import test_architectures as architectures
from tests.tiny import HYBRIDS, SHARING, VOCAB_SIZE, save_checkpoint

TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 500)
DRAFT = 5
FAMILIES = {**HYBRIDS, **SHARING}
of_states = pytest.mark.parametrize("case", HYBRIDS, indirect=True)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    """One family, traced once: its graph, and what transformers says of its weights.

    Gated delta rules are computed by transformers' function for decoding, row by row.
    Its function for prompts sums chunks of 64 rows: its logits are up to 2.5e-4 away
    from float64, more than the tolerance, and row by row they are up to 0.9e-4 away.
    """
    config, folder = FAMILIES[request.param](), tmp_path_factory.mktemp("family")
    checkpoint = architectures.load(config, folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        scope = sys.modules[type(checkpoint.model).__module__]
        by_row = getattr(scope, "torch_recurrent_gated_delta_rule", None)
        patch.setattr(scope, "torch_chunk_gated_delta_rule", by_row, raising=False)
        weights = checkpoint.model.state_dict()
        expected = architectures.transformers_logits(config, weights, TOKENS)
    contract = architectures.contract_of(checkpoint, 512)
    check_seams(checkpoint.model, contract)
    ir.save(architectures.traced(checkpoint, contract), folder / "step.onnx")
    graph = Graph(StepSessions(open_session(folder / "step.onnx", "cpu"), contract))
    return SimpleNamespace(graph=graph, expected=expected)


def restart(graph: Graph, tokens=()) -> None:
    graph.cache.rewind(0)
    if len(tokens):
        graph.run(tokens, last_only=True)
        graph.cache.advance(len(tokens))


def states(graph: Graph) -> list[bytes]:
    return [state.tobytes() for state in graph.cache.copy_states().values()]


def settled_states(graph: Graph) -> list[bytes]:
    """The states without kept rows, after a pass that has taken up all before it."""
    copies = [x for x in graph.cache.copy_states().values() if x.ndim]
    return [(x if x.ndim == 4 else x[:, :-WIDEST]).tobytes() for x in copies]


@pytest.mark.parametrize("length", [1, 63, 500])
def test_a_prompt_in_chunks_equals_transformers(case, length):
    """In passes of 32 rows, the last of which is filled up where they are many."""
    graph, expected = case.graph, case.expected
    # Otherwise this, and everything below, would prove little.
    assert expected.std(axis=-1).min() > 0.1
    restart(graph)
    for start in range(0, length, 32):
        end = min(length, start + 32)
        logits = graph.run(TOKENS[start:end], width=32 if length > 400 else 0).logits
        architectures.assert_close(logits, expected[start:end])
        np.testing.assert_array_equal(logits.argmax(-1), expected[start:end].argmax(-1))
        graph.cache.advance(end - start)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_half_precision_are_converted_in_every_layer(name, tmp_path):
    """A layer that convolves with weights of bfloat16 rounds its rows to it."""
    save_checkpoint(tmp_path, FAMILIES[name](), tokenizer=False)
    edit(tmp_path, lambda own: {n: t.bfloat16() for n, t in own.items()})
    checkpoint = Checkpoint.load(str(tmp_path), torch.float32)
    check_seams(checkpoint.model, architectures.contract_of(checkpoint))


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
    following = graph.run([7], width=width).logits.copy()
    by_row = settled_states(graph)

    restart(graph, prompt)
    draft = [*true[: accepted + 1], *((true + 1) % VOCAB_SIZE)[accepted + 1 :]]
    for _ in range(2):  # a pass that nobody commits leaves no trace
        logits = graph.run(draft).logits.copy()
    graph.cache.advance(accepted + 1)
    np.testing.assert_array_equal(logits[: accepted + 1], rows)
    np.testing.assert_array_equal(graph.run([7], width=width).logits, following)
    assert settled_states(graph) == by_row


@of_states
def test_ways_back(case):
    """Lead to the beginning and to the states that were marked, nowhere else."""
    graph, cache = case.graph, case.graph.cache
    restart(graph, TOKENS[:20])
    cache.mark()
    before, stored = states(graph), cache.copy_rows(20)
    graph.run(TOKENS[20:30])
    cache.advance(7)
    assert [cache.resumable(n) for n in (99, 27, 26, 20, 19)] == [27, 27, 20, 20, 0]
    with pytest.raises(ValueError, match="cannot rewind from 27 rows to 26"):
        cache.rewind(26)
    with pytest.raises(ValueError, match="states are of 27 rows, not of 20"):
        cache.copy_rows(20)
    cache.rewind(20)
    assert states(graph) == before
    cache.rewind(0)
    assert not any(map(any, states(graph)))
    cache.restore(stored, 20)
    assert states(graph) == before
    assert cache.resumable(20) == 20


@of_states
def test_rows_that_cannot_be_committed(case):
    """Rows that no pass has run, and a part of a wide pass, which keeps no rows."""
    restart(case.graph, TOKENS[:4])
    with pytest.raises(ValueError, match="cannot commit 1 rows of a pass over 0"):
        case.graph.cache.advance(1)
    case.graph.run(TOKENS[4:9], width=32)
    with pytest.raises(ValueError, match="cannot commit 2 rows of a pass over 5"):
        case.graph.cache.advance(2)
    # The states have rows that nobody has committed, also after a survey.
    assert case.graph.cache.resumable(4) == 0
    restart(case.graph)
    case.graph.run(TOKENS[:20])
    with randomized(case.graph):
        case.graph.run(TOKENS[:3])
    case.graph.cache.rewind(0)
    assert not any(map(any, states(case.graph)))


@pytest.mark.parametrize("name", ["Softplus", "Cos", "Sin"])
def test_functions_give_a_row_the_same_bits_beside_others(name, tmp_path):
    """They compute otherwise what is left over of a packet."""
    head = '<ir_version: 10, opset_import: ["": 22]> graph (float[n, 2] x) => '
    text = f"{head} (float[n, 2] y) {{ z = {name}(x) y = Neg(z) }}"
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    fill_packets(model.graph)
    common.RemoveUnusedNodesPass()(model)
    ir.save(model, tmp_path / "g.onnx")
    session = open_session(tmp_path / "g.onnx", "cpu")
    rows = np.random.default_rng(0).standard_normal((512, 2)).astype(np.float32)
    (whole,) = session.run(None, {"x": rows})
    alone = [session.run(None, {"x": row[None]})[0][0] for row in rows]
    np.testing.assert_array_equal(alone, whole)
