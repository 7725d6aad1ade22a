"""Drafters of blocks in a bundle: a block sees itself and its context."""

import numpy as np
import onnx
import pytest
import torch

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.blocks import masked_attention
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.cli.check import describe_bundle
from jetdraft.errors import OptionError
from tests.checkpoints.heads.layouts import BLOCK
from tests.export.head_passes import TOKENS, drafts_of, graphs
from tests.tiny import VOCAB_SIZE

PROMPT = " the self"
MASKS = {"dflash": BLOCK - 1, "diffusion": BLOCK}
LAYOUTS = ["dflash", "diffusion", "speculators-dflash"]


def in_torch(drafter, features, count, known=(), tokens=TOKENS):
    """The logits of the block behind `count` rows, from all rows at once."""
    slots = drafter.config.slots
    block = [*known, *[VOCAB_SIZE] * (slots - len(known))]
    size = drafter.block_rows
    if drafter.reads_text:
        context = torch.tensor([tokens[:count]])
        mask = torch.ones(count + size, count + size, dtype=torch.bool).tril()
        mask[count:] = True
    else:
        context, mask = torch.tensor(features)[None, :count], None
        block = [tokens[count], *block]
    positions = torch.arange(count + size)[None]
    with torch.no_grad():
        states = drafter(
            context, torch.tensor([block]), positions, masked_attention(mask)
        )
        return drafter.lm_head(drafter.mask_states(states))[0].numpy()


def in_graph(graph, features, start, end, known=()):
    """The answer of a pass over the context rows from `start` to `end`."""
    graph.cache.rewind(start)
    if not graph.contract.feature_input:
        return graph.run(TOKENS[start:end], last_only=True, block=known)
    rows = features[start:end]
    return graph.run(TOKENS[start + 1 : end + 1], True, features=rows, block=known)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_graph_does_what_the_module_does(made, layout):
    """Prompt, catch-up, one row, and blocks with known tokens; only context is kept."""
    bundle, source, folder, _ = made(layout)
    target, graph = graphs(bundle)
    features = target.run(TOKENS[:14]).features
    features = None if features is None else features.copy()
    checkpoint = Checkpoint.load(source, torch.float32)
    drafter = load_head(folder, checkpoint, torch.float32)
    compared = 0
    graph.cache.rewind(0)
    for start, end in ((0, 5), (5, 8), (8, 9), (9, 13)):
        for known in ((), (7, 3)):
            answer = in_graph(graph, features, start, end, known)
            wanted = in_torch(drafter, features, end, known)
            assert answer.candidates.shape[0] == drafter.config.slots
            if drafter.ids is None:
                np.testing.assert_allclose(answer.logits, wanted, atol=2e-4)
                ids = np.arange(VOCAB_SIZE)
            else:
                ids = drafter.ids.numpy()
            best = np.argsort(-wanted, axis=1)[:, :5]
            assert np.array_equal(answer.candidates[:, :5], ids[best])
            top = np.take_along_axis(wanted, best, axis=1)
            np.testing.assert_allclose(answer.candidate_logits[:, :5], top, atol=2e-4)
            sums = torch.logsumexp(torch.tensor(wanted), 1).numpy()
            np.testing.assert_allclose(answer.logsumexp, sums, atol=2e-4)
            assert np.ptp(wanted) > 1, "too flat to prove anything"
            compared += 1
        graph.cache.advance(end - start)
    assert compared == 8


@pytest.mark.parametrize("layout", ["dflash", "diffusion"])
def test_untrained_drafters_draft_what_the_module_guesses(made, layout):
    """And are seldom right."""
    bundle, source, folder, _ = made(layout)
    checkpoint = Checkpoint.load(source, torch.float32)
    drafter = load_head(folder, checkpoint, torch.float32)
    target, _ = graphs(bundle)
    drafts, stats = drafts_of(bundle, layout, confidence=0.0)
    for context, drafted in drafts:
        features = target.run(context[:-1]).features
        count = len(context) - (not drafter.reads_text)
        wanted = in_torch(drafter, features, count, tokens=context)
        assert drafted == wanted[: len(drafted)].argmax(-1).tolist()
    assert stats.drafted_tokens > 12
    assert stats.tokens_per_pass < 1.5


@pytest.mark.parametrize("layout", ["dflash", "diffusion"])
def test_rows_of_a_block_are_no_context(made, layout):
    """After a block the same context gives the same bits, as if it had not been."""
    bundle = made(layout).bundle
    target, graph = graphs(bundle)
    features = target.run(TOKENS[:14]).features
    features = None if features is None else features.copy()
    in_graph(graph, features, 0, 5)
    graph.cache.advance(5)
    first = in_graph(graph, features, 5, 8).logits.copy()
    in_graph(graph, features, 5, 8, known=(1, 2, 3, 4))
    assert np.array_equal(in_graph(graph, features, 5, 8).logits, first)
    kept = in_graph(graph, features, 5, 6)
    graph.cache.advance(1 + 2)  # a mistake: two rows of the block stay
    wrong = in_graph(graph, features, 8, 9).logits.copy()
    assert kept is not None
    graph.cache.rewind(5)
    in_graph(graph, features, 5, 8)
    graph.cache.advance(3)
    right = in_graph(graph, features, 8, 9).logits
    assert np.abs(right - wrong).max() > 1e-3


@pytest.mark.parametrize("layout", ["dflash", "diffusion"])
def test_the_last_tokens_of_a_block_change_the_first(made, layout):
    """Attention goes both ways: what is known behind a mask changes its guess."""
    bundle = made(layout).bundle
    target, graph = graphs(bundle)
    features = target.run(TOKENS[:14]).features
    features = None if features is None else features.copy()
    count = graph.contract.block
    unknown = [VOCAB_SIZE] * (count - 1)
    one, other = (
        in_graph(graph, features, 0, 5, [*unknown, token]).logits[0].copy()
        for token in (4, 9)
    )
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("layout", ["dflash", "diffusion"])
def test_a_block_takes_the_spare_slots(made, layout):
    """At the end of the buffers a block still fits behind the last row."""
    bundle = made(layout).bundle
    _, graph = graphs(bundle)
    contract = graph.contract
    assert contract.slots >= contract.capacity + 2 * contract.block
    width = contract.feature_input
    features = np.ones((16, width), np.float32) if width else None
    for _ in range(4):
        answer = graph.run([5] * 16, last_only=True, features=features)
        graph.cache.advance(16)
        assert np.isfinite(answer.logits).all()
    assert graph.cache.room == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_bundle_says(made, layout):
    bundle = made(layout).bundle
    entry = bundle.drafter
    kind = "diffusion" if layout == "diffusion" else "dflash"
    assert entry.contract.block == entry.contract.guesses == MASKS[kind]
    assert entry.contract.kv_shapes == ((2, 16),) * 2
    assert entry.tree_file is entry.compaction_file is None
    lines = describe_bundle(bundle).split("\ndrafter")[1]
    assert f"guesses       {MASKS[kind]} tokens in a block behind the last row" in lines
    assert "sliding" not in lines
    assert ("features of width 64" in lines) == (kind == "dflash")
    assert bundle.target.contract.feature_size == (64 if kind == "dflash" else 0)
    stored = entry.quantization["acceptance"]["by_position"]
    assert len(stored) == 4


def test_the_targets_matrices_are_read_from_its_file(made):
    """Embedding and LM head are not in the head's own weights."""
    bundle = made("dflash", recipe="int8").bundle
    model = onnx.load(bundle.path / bundle.drafter.file, load_external_data=False)
    shared = [
        tensor
        for tensor in model.graph.initializer
        if any("target" in entry.value for entry in tensor.external_data)
    ]
    sizes = {tuple(tensor.dims) for tensor in shared}
    assert any(dims[0] == VOCAB_SIZE for dims in sizes), sizes


def test_only_some_lm_heads_can_be_cut(made):
    """A DFlash head drafts fewer tokens; a diffusion drafter refuses."""
    bundle = made("dflash", draft_vocab=50).bundle
    assert bundle.drafter.contract.draft_vocab == 50
    with jetdraft.load(bundle.path, threads=1) as model:
        how = {"max_new_tokens": 20, "ignore_eos": True}
        drafted = model.generate(PROMPT, method="dflash", num_draft_tokens=4, **how)
        plain = model.generate(PROMPT, method="none", **how)
        assert drafted.token_ids == plain.token_ids
    with pytest.raises(OptionError, match="leave --draft-vocab out"):
        made("diffusion", draft_vocab=50)
