"""Published Hydra heads become the drafter of a bundle, and change no text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.checkpoints.heads import reference
from tests.checkpoints.heads.layouts import hydra, write
from tests.export.head_passes import TOKENS, graphs
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint

HEADS = 3
PROMPT = " the self"
NONE = Recipe.parse("none", 32)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hydra-target") / "target"
    config = llama_config(num_hidden_layers=2, tie_word_embeddings=False)
    return str(save_checkpoint(folder, config))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """The tensors of random heads, and the folder that has them."""
    torch.manual_seed(3)
    config, tensors = hydra(HEADS)
    folder = tmp_path_factory.mktemp("hydra") / "head"
    return tensors, write(folder, config, tensors, "hydra_lm_head.pt")


@pytest.fixture(scope="module")
def bundle(source, heads, tmp_path_factory):
    options = ExportOptions(NONE, NONE, capacity=64, max_width=16)
    output = tmp_path_factory.mktemp("hydra") / "bundle"
    return export(source, output, options=options, head=heads[1])


def test_each_head_reads_the_guesses_before_it(source, bundle, heads):
    """The path is the next token, and then the likeliest token of every head."""
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
            wanted = reference.hydra(heads[0], head, state, embedded)[0].numpy()
            np.testing.assert_allclose(answer.logits[head], wanted, atol=2e-4)
            path.append(int(wanted.argmax()))
        logits = answer.logits.copy()
        again = graph.run([TOKENS[row] ^ 1], features=features[row : row + 1])
        changed += bool(np.ptp(again.logits[1] - logits[1]) > 0.01)
    assert changed == 8, "the second head must see the token after the features"


def test_its_drafts_change_no_text(bundle):
    with jetdraft.load(bundle.path, threads=1) as model:
        assert "medusa" in model.methods
        for way in ({}, {"temperature": 1.0, "seed": 4, "top_p": 0.95}):
            how = {"max_new_tokens": 30, "ignore_eos": True, **way}
            plain = model.generate(PROMPT, method="none", **how)
            assert len(set(plain.token_ids)) > 3, "too dull to prove anything"
            for drafting in (
                {"num_draft_tokens": 3},
                {"drafting": {"tree": "best"}},
                {"drafting": {"tree": "k-ary", "branching": (2, 2)}},
            ):
                drafted = model.generate(PROMPT, method="medusa", **how, **drafting)
                assert drafted.token_ids == plain.token_ids, drafting
                assert drafted.stats.drafted_tokens > 20
            for method in ("medusa,lookup", "auto"):
                drafted = model.generate(PROMPT, method=method, **how)
                assert drafted.token_ids == plain.token_ids, method


def test_the_embedding_stays_in_the_targets_file(bundle, heads):
    own = sum(tensor.numel() for tensor in heads[0].values())
    assert bundle.drafter.parameters == own


def test_its_vocabulary_is_cut(source, heads, tmp_path):
    """Later heads read the tokens of the rows, not the rows."""
    options = ExportOptions(NONE, NONE, capacity=64, max_width=16, draft_vocab=100)
    cut = export(source, tmp_path / "bundle", options=options, head=heads[1])
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
            logits = reference.hydra(heads[0], head, state, embedded)[0].numpy()[ids]
            path.append(int(ids[logits.argmax()]))
            best = np.sort(logits)[::-1][: answer.candidates.shape[1]]
            np.testing.assert_allclose(answer.candidate_logits[head], best, atol=2e-4)
        assert answer.candidates[:, 0].tolist() == path[1:]
    with jetdraft.load(cut.path, threads=1) as model:
        how = {"max_new_tokens": 30, "ignore_eos": True}
        plain = model.generate(PROMPT, method="none", **how)
        for drafting in ({"num_draft_tokens": 3}, {"drafting": {"tree": "best"}}):
            drafted = model.generate(PROMPT, method="medusa", **how, **drafting)
            assert drafted.token_ids == plain.token_ids
