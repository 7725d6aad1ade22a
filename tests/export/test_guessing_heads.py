"""Published heads of Medusa and Hydra become the drafter of a bundle."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional as F

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.cli.check import describe
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.checkpoints.heads import reference
from tests.checkpoints.heads.layouts import H, hydra, medusa, write
from tests.export.head_passes import TOKENS, graphs
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint

HEADS = 3
PROMPT = " the self"
KINDS = {"medusa": medusa, "hydra": hydra}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("medusa-target") / "target"
    config = llama_config(num_hidden_layers=2, tie_word_embeddings=False)
    return str(save_checkpoint(folder, config))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """Exports heads once for each set of options; gives bundle, folder and tensors."""
    bundles = {}

    def make(recipe="none", kind="medusa", tied=False, **options):
        key = recipe, kind, tied, *options.items()
        if key not in bundles:
            folder = tmp_path_factory.mktemp(kind)
            torch.manual_seed(3)
            config, tensors = KINDS[kind](HEADS)
            heads = write(folder / "head", config, tensors, f"{kind}_lm_head.pt")
            settings = ExportOptions(
                Recipe.parse(recipe, 32),
                Recipe.parse(recipe, 32),
                capacity=64,
                max_width=16,
                **options,
            )
            if tied:  # an embedding that is quantized as the LM head is
                save_checkpoint(folder / "t", llama_config(num_hidden_layers=2))
            target = str(folder / "t") if tied else source
            bundle = export(target, folder / "bundle", options=settings, head=heads)
            bundles[key] = bundle, heads, tensors
        return bundles[key]

    return make


def test_the_graph_does_what_the_module_does(source, made):
    """One row of features gives the guesses of all heads, whichever row it was."""
    bundle, folder, _ = made()
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


def test_heads_keep_no_rows(made):
    """There is no cache to fill, and no graph of a tree."""
    entry = made()[0].drafter
    assert entry.contract.kv_shapes == ()
    assert entry.contract.guesses == HEADS
    assert entry.tree_file is entry.compaction_file is None
    assert entry.parameters == HEADS * (H * H + H + VOCAB_SIZE * H)


def test_check_says_what_the_heads_are(made):
    lines = describe(made()[0]).split("\ndrafter")[1]
    assert "guesses       3 tokens from one row" in lines
    assert "features of width 64" in lines
    assert "KV" not in lines
    assert "trees" not in lines


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recipe": "int8"},
        {"flavour": "standard"},
        {"dtype": "fp16"},
        {"kind": "hydra"},
        {"kind": "hydra", "draft_vocab": 100},
        {"kind": "hydra", "recipe": "int8", "tied": True},
    ],
    ids=["none", "int8", "standard", "fp16", "hydra", "hydra cut", "hydra tied"],
)
def test_its_drafts_change_no_text(made, options):
    bundle, *_ = made(**options)
    with jetdraft.load(bundle.path, threads=1) as model:
        assert "medusa" in model.methods
        assert "eagle" not in model.methods
        for way in ({}, {"temperature": 1.0, "seed": 4, "top_p": 0.95}):
            how = {"max_new_tokens": 30, "ignore_eos": True, **way}
            plain = model.generate(PROMPT, method="none", **how)
            assert len(set(plain.token_ids)) > 3, "too dull to prove anything"
            for drafting in (
                {"num_draft_tokens": 3},
                {"drafting": {"tree": "best"}},
                {"drafting": {"tree": "heap"}, "exact": False},
                {"drafting": {"tree": "k-ary", "branching": (2, 2)}},
            ):
                drafted = model.generate(PROMPT, method="medusa", **how, **drafting)
                assert drafted.token_ids == plain.token_ids, drafting
                assert drafted.stats.drafted_tokens > 20
            for method in ("medusa,lookup", "lookup", "auto"):
                drafted = model.generate(PROMPT, method=method, **how)
                assert drafted.token_ids == plain.token_ids, method


def test_a_tree_is_the_product_of_the_best_of_each_head(made):
    """All rows of a depth have the same children: the ranks of the next head."""
    bundle, *_ = made()
    with jetdraft.load(bundle.path, threads=1) as model:
        drafts = []
        verify = model.parts.target.verify

        def spy(rows, width, probing):
            drafts.append(rows)
            return verify(rows, width, probing)

        model.parts.target.verify = spy
        model.generate(
            PROMPT,
            method="medusa",
            max_new_tokens=20,
            ignore_eos=True,
            drafting={"tree": "k-ary", "branching": (2, 2, 1)},
        )
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


def test_several_turns_and_a_saved_prefix(made, tmp_path):
    bundle, *_ = made()
    how = {"max_new_tokens": 12, "ignore_eos": True}
    with jetdraft.load(bundle.path, threads=1) as model:
        tokens = list(TOKENS)
        for _ in range(3):
            plain = model.generate(token_ids=tokens, method="none", **how).token_ids
            for _ in range(2):
                drafted = model.generate(token_ids=tokens, method="medusa", **how)
                assert drafted.token_ids == plain
            tokens += [*plain, 7]
        model.save_prefix(tmp_path / "prefix.npz", tokens)
    with jetdraft.load(bundle.path, threads=1) as model:
        model.load_prefix(tmp_path / "prefix.npz")
        drafted = model.generate(
            token_ids=tokens, method="medusa", num_draft_tokens=3, **how
        )
        assert drafted.stats.reused_tokens > 0
        assert drafted.stats.drafted_tokens > 0
        plain = model.generate(token_ids=tokens, method="none", **how)
        assert drafted.token_ids == plain.token_ids


def test_each_head_of_hydra_reads_the_guesses_before_it(source, made):
    """The path is the next token, and then the likeliest token of every head."""
    bundle, _, tensors = made(kind="hydra")
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


def test_the_vocabulary_of_hydra_is_cut(source, made):
    """Later heads read the tokens of the rows, not the rows."""
    cut, _, tensors = made(kind="hydra", draft_vocab=100)
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
    """Its matrices are its own; nothing is lent by the target."""
    bundle, *_ = made()
    model = onnx.load(bundle.path / bundle.drafter.file, load_external_data=False)
    files = {e.value for t in model.graph.initializer for e in t.external_data}
    assert not any("target" in value for value in files)
