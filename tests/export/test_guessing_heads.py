"""Published heads of Medusa and Hydra become the drafter of a bundle."""

import numpy as np
import onnx
import torch
from torch.nn import functional as F

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.cli.check import describe_bundle
from tests.checkpoints.heads import reference
from tests.checkpoints.heads.layouts import H
from tests.export.head_passes import TOKENS, drafts_of, graphs
from tests.tiny import VOCAB_SIZE

HEADS = 3
PROMPT = " the self"


def test_the_graph_does_what_the_module_does(made):
    """One row of features gives the guesses of all heads, whichever row it was."""
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
    """And are seldom right."""
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
    """There is no cache to fill, and no graph of a tree."""
    entry = made("medusa").bundle.drafter
    assert entry.contract.kv_shapes == ()
    assert entry.contract.guesses == HEADS
    assert entry.tree_file is entry.compaction_file is None
    assert entry.parameters == HEADS * (H * H + H + VOCAB_SIZE * H)


def test_check_says_what_the_heads_are(made):
    lines = describe_bundle(made("medusa").bundle).split("\ndrafter")[1]
    assert "guesses       3 tokens from one row" in lines
    assert "features of width 64" in lines
    assert "KV" not in lines
    assert "trees" not in lines


def test_a_tree_is_the_product_of_the_best_of_each_head(made):
    """All rows of a depth have the same children: the ranks of the next head."""
    bundle = made("medusa").bundle
    with jetdraft.load(bundle.path, threads=1) as model:
        drafts = []
        verify = model.parts.target.verify

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


def test_each_head_of_hydra_reads_the_guesses_before_it(made):
    """The path is the next token, and then the likeliest token of every head."""
    bundle, source, _, tensors = made("hydra")
    target, graph = graphs(bundle)
    features = target.run(TOKENS[:8]).features.copy()
    model = Checkpoint.load(source, torch.float32).model
    embedding = model.get_input_embeddings().weight.detach()
    changed = 0
    for row in range(8):
        state, path = torch.tensor(features[row : row + 1]), [TOKENS[row + 1]]
        answer = graph.run([TOKENS[row + 1]], features=features[row : row + 1])
        assert answer.logits.shape == (HEADS, VOCAB_SIZE)
        for head in range(HEADS):
            embedded = F.embedding(torch.tensor([path]), embedding)
            wanted = reference.hydra(tensors, head, state, embedded)[0].numpy()
            np.testing.assert_allclose(answer.logits[head], wanted, atol=2e-4)
            path.append(int(wanted.argmax()))
        logits = answer.logits.copy()
        again = graph.run([TOKENS[row] ^ 1], features=features[row : row + 1])
        changed += bool(np.ptp(again.logits[1] - logits[1]) > 0.01)
    assert changed == 8, "the second head must see the token after the features"
    own = sum(tensor.numel() for tensor in tensors.values())
    assert bundle.drafter.parameters == own, "the embedding is the target's"


def test_the_vocabulary_of_hydra_is_cut(made):
    """Later heads read the tokens of the rows, not the rows."""
    cut, source, _, tensors = made("hydra", draft_vocab=100)
    ids = cut.draft_vocabulary()
    assert len(ids) == 100
    target, graph = graphs(cut)
    features = target.run(TOKENS[:8]).features.copy()
    embedding = Checkpoint.load(source, torch.float32).model.get_input_embeddings()
    for row in range(8):
        state, path = torch.tensor(features[row : row + 1]), [TOKENS[row + 1]]
        answer = graph.run([TOKENS[row + 1]], features=features[row : row + 1])
        for head in range(HEADS):
            embedded = embedding(torch.tensor([path])).detach()
            logits = reference.hydra(tensors, head, state, embedded)[0].numpy()[ids]
            path.append(int(ids[logits.argmax()]))
            best = np.sort(logits)[::-1][: answer.candidates.shape[1]]
            np.testing.assert_allclose(answer.candidate_logits[head], best, atol=2e-4)
        assert answer.candidates[:, 0].tolist() == path[1:]


def test_the_small_tensors_are_in_the_drafter_alone(made):
    """Its matrices are its own; none is the target's."""
    bundle = made("medusa").bundle
    model = onnx.load(bundle.path / bundle.drafter.file, load_external_data=False)
    files = {e.value for t in model.graph.initializer for e in t.external_data}
    assert not any("target" in value for value in files)
