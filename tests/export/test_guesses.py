"""Drafters that guess several tokens at once: blocks, and heads of Medusa and Hydra."""

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
from tests import same_text
from tests.checkpoints.heads import reference
from tests.checkpoints.heads.layouts import BLOCK, H
from tests.export.conftest import TOKENS, check_blocks, drafts_of, graphs
from tests.tiny import VOCAB_SIZE

PROMPT = " the self"
HEADS = 3
MASKS = {"dflash": BLOCK - 1, "diffusion": BLOCK, "speculators-dflash": BLOCK - 1}
DSPARK = ["authors-dspark", "nested-dspark", "speculators-dspark"]
LAYOUTS = [*MASKS, *DSPARK]


def in_torch(drafter, features, count, known=(), tokens=TOKENS):
    """The logits of the block behind `count` rows, from all rows at once."""
    size = drafter.block_rows
    block = [*known, *[VOCAB_SIZE] * (size - drafter.reads.anchored - len(known))]
    if drafter.reads_text:
        context = torch.tensor([tokens[:count]])
        mask = torch.ones(count + size, count + size, dtype=torch.bool).tril()
        mask[count:] = True
    else:
        context, mask = torch.tensor(features)[None, :count], None
        block = [tokens[count], *block]
    positions, rows = torch.arange(count + size)[None], torch.tensor([block])
    with torch.no_grad():
        states = drafter(context, rows, positions, masked_attention(mask))
        return drafter.logits(states, rows)[0].numpy()


def in_graph(graph, features, start, end, known=()):
    """The answer of a pass over the context rows from `start` to `end`."""
    graph.cache.rewind(start)
    if not graph.contract.feature_input:
        return graph.run(TOKENS[start:end], last_only=True, block=known)
    rows = features[start:end]
    return graph.run(TOKENS[start + 1 : end + 1], True, features=rows, block=known)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_graph_does_what_the_module_does(made, layout):
    bundle, source, folder, _ = made(layout)
    graph, features = graph_and_features(bundle)
    drafter = load_head(folder, Checkpoint.load(source, torch.float32), torch.float32)
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


@pytest.mark.parametrize("layout", ["dflash", "diffusion", *DSPARK[1:]])
def test_untrained_drafters_draft_what_the_module_guesses(made, layout):
    bundle, source, folder, _ = made(layout)
    drafter = load_head(folder, Checkpoint.load(source, torch.float32), torch.float32)
    target, _ = graphs(bundle)
    method = layout if layout == "diffusion" else "dflash"
    drafts, stats = drafts_of(bundle, method, confidence=0.0)
    for context, drafted in drafts:
        features = target.run(context[:-1]).features
        count = len(context) - (not drafter.reads_text)
        wanted = in_torch(drafter, features, count, tokens=context)
        best = torch.tensor(wanted[: len(drafted)].argmax(-1))
        assert drafted == (best if drafter.ids is None else drafter.ids[best]).tolist()
    assert stats.drafted_tokens > 12
    assert stats.tokens_per_pass < 1.5


def graph_and_features(bundle):
    target, graph = graphs(bundle)
    features = target.run(TOKENS[:14]).features
    return graph, None if features is None else features.copy()


@pytest.mark.parametrize("layout", ["dflash", "diffusion"])
def test_rows_of_a_block_are_no_context(made, layout):
    graph, features = graph_and_features(made(layout).bundle)
    check_blocks(graph, lambda *place: in_graph(graph, features, *place))
    graph.cache.rewind(5)
    in_graph(graph, features, 5, 6)
    graph.cache.advance(1 + 2)  # a mistake: two rows of the block stay
    wrong = in_graph(graph, features, 8, 9).logits.copy()
    graph.cache.rewind(5)
    in_graph(graph, features, 5, 8)
    graph.cache.advance(3)
    assert np.abs(in_graph(graph, features, 8, 9).logits - wrong).max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_bundle_says(made, layout):
    bundle = made(layout).bundle
    entry = bundle.drafter
    kind = "diffusion" if layout == "diffusion" else "dflash"
    guesses = MASKS.get(layout, BLOCK)
    assert entry.contract.block == entry.contract.guesses == guesses
    assert entry.contract.kv_shapes == ((2, 16),) * 2
    assert entry.tree_file is entry.compaction_file is None
    lines = describe_bundle(bundle).split("\ndrafter")[1]
    assert f"guesses       {guesses}\n  block         {guesses}\n" in lines
    assert "sliding" not in lines
    assert ("feature_input 64\n" in lines) == (kind == "dflash")
    assert bundle.target.contract.feature_size == (64 if kind == "dflash" else 0)
    if layout == "dflash":
        measured = made(layout, fast=False).bundle.drafter.quantization
        assert len(measured["acceptance"]["by_position"]) == 4


def test_the_targets_matrices_are_read_from_its_file(made):
    bundle = made("dflash", recipe="int8").bundle
    model = onnx.load(bundle.path / bundle.drafter.file, load_external_data=False)
    shared = [
        tensor
        for tensor in model.graph.initializer
        if any("target" in entry.value for entry in tensor.external_data)
    ]
    sizes = {tuple(tensor.dims) for tensor in shared}
    assert any(dims[0] == VOCAB_SIZE for dims in sizes), sizes


@pytest.mark.parametrize("layout", ["dflash", "nested-dspark"])
def test_only_some_lm_heads_can_be_cut(made, layout):
    bundle = made(layout, recipe="int4", draft_vocab=50).bundle
    assert bundle.drafter.contract.draft_vocab == 50
    with jetdraft.load(bundle.path, threads=1) as model:
        drafts = [{"method": "dflash", "num_draft_tokens": 4}]
        same_text(model, drafts, prompt=PROMPT, max_new_tokens=20)
    with pytest.raises(OptionError, match="leave --draft-vocab out"):
        made("diffusion", draft_vocab=50)


def test_one_row_gives_the_guesses_of_all_heads(made):
    bundle, source, folder, _ = made("medusa")
    target, heads = graphs(bundle)
    features = target.run(TOKENS[:8]).features.copy()
    module = load_head(folder, Checkpoint.load(source, torch.float32), torch.float32)
    with torch.no_grad():
        logits = module.logits(module(torch.tensor(features)[None]))[0].numpy()
    assert logits.shape == (8, HEADS, VOCAB_SIZE)
    for row in range(8):
        answer = heads.run([TOKENS[row + 1]], features=features[row : row + 1])
        assert answer.candidates.shape == (HEADS, 64)
        np.testing.assert_allclose(answer.logits, logits[row], atol=2e-4)
        best = np.argsort(-logits[row], axis=1)[:, :5]
        assert np.array_equal(answer.candidates[:, :5], best)
    assert np.ptp(logits) > 1, "too flat to prove anything"


def test_random_heads_draft_what_the_module_guesses(made):
    bundle, source, folder, _ = made("medusa")
    module = load_head(folder, Checkpoint.load(source, torch.float32), torch.float32)
    (target, _), (drafts, stats) = graphs(bundle), drafts_of(bundle, "medusa")
    for context, drafted in drafts:
        features = target.run(context[:-1]).features[-1:]
        with torch.no_grad():
            logits = module.logits(module(torch.tensor(features)[None]))
        assert drafted == logits[0, 0, : len(drafted)].argmax(-1).tolist()
    assert stats.drafted_tokens > 12
    assert stats.tokens_per_pass < 1.5


def test_heads_keep_no_rows(made):
    entry = made("medusa").bundle.drafter
    assert entry.contract.kv_shapes == ()
    assert entry.contract.guesses == HEADS
    assert entry.tree_file is entry.compaction_file is None
    assert entry.parameters == HEADS * (H * H + H + VOCAB_SIZE * H)
    lines = describe_bundle(made("medusa").bundle).split("\ndrafter")[1]
    assert "guesses       3\n" in lines
    assert "feature_input 64\n" in lines
    assert "KV" not in lines
    assert "trees" not in lines


def test_a_tree_is_the_product_of_the_best_of_each_head(made):
    with jetdraft.load(made("medusa").bundle.path, threads=1) as model:
        drafts, verify = [], model.parts.target.verify

        def spy(rows, width, probing):
            drafts.append(rows)
            return verify(rows, width, probing)

        model.parts.target.verify = spy
        tree = {"tree": "k-ary", "branching": (2, 2, 1)}
        how = {"max_new_tokens": 20, "ignore_eos": True, "drafting": tree}
        model.generate(PROMPT, method="medusa", **how)
        wide = [rows for rows in drafts if len(rows) == 1 + 2 + 4 + 4]
        assert len(wide) > 5
        for rows in wide:
            children = {}
            for token, parent, depth in zip(
                rows.tokens[1:], rows.parents[1:], rows.depths[1:], strict=True
            ):
                children.setdefault((depth, parent), []).append(token)
            for depth, count in ((1, 1), (2, 2), (3, 4)):
                sets = [set(c) for (d, _), c in children.items() if d == depth]
                assert len(sets) == count
                assert all(one == sets[0] for one in sets)


def hydra_rows(target, graph, source, tensors, ids):
    """Features, answer, likeliest path of 8 rows; the reference's logits of `ids`."""
    features = target.run(TOKENS[:8]).features.copy()
    embedding = Checkpoint.load(source, torch.float32).model.get_input_embeddings()
    for row in range(8):
        state, path, logits = features[row : row + 1], [TOKENS[row + 1]], []
        answer = graph.run(path[:], features=state)
        for head in range(HEADS):
            embedded = embedding(torch.tensor([path])).detach()
            of_head = reference.hydra(tensors, head, torch.tensor(state), embedded)
            logits.append(of_head[0].numpy()[ids])
            path.append(int(ids[logits[-1].argmax()]))
        yield state, answer, path, logits


def test_each_head_of_hydra_reads_the_guesses_before_it(made):
    bundle, source, _, tensors = made("hydra")
    target, graph = graphs(bundle)
    changed, every = 0, np.arange(VOCAB_SIZE)
    rows = hydra_rows(target, graph, source, tensors, every)
    for row, (state, answer, _, wanted) in enumerate(rows):
        assert answer.logits.shape == (HEADS, VOCAB_SIZE)
        np.testing.assert_allclose(answer.logits, wanted, atol=2e-4)
        logits = answer.logits.copy()
        again = graph.run([TOKENS[row] ^ 1], features=state)
        changed += bool(np.ptp(again.logits[1] - logits[1]) > 0.01)
    assert changed == 8, "the second head must see the token after the features"
    own = sum(tensor.numel() for tensor in tensors.values())
    assert bundle.drafter.parameters == own, "the embedding is the target's"


def test_the_vocabulary_of_hydra_is_cut(made):
    cut, source, _, tensors = made("hydra", draft_vocab=100)
    ids = cut.draft_vocabulary()
    assert len(ids) == 100
    for _, answer, path, logits in hydra_rows(*graphs(cut), source, tensors, ids):
        best = np.sort(logits)[:, ::-1][:, : answer.candidates.shape[1]]
        np.testing.assert_allclose(answer.candidate_logits, best, atol=2e-4)
        assert answer.candidates[:, 0].tolist() == path[1:]


def test_the_small_tensors_are_in_the_drafter_alone(made):
    bundle = made("medusa").bundle
    model = onnx.load(bundle.path / bundle.drafter.file, load_external_data=False)
    files = {e.value for t in model.graph.initializer for e in t.external_data}
    assert not any("target" in value for value in files)
