"""A published head becomes the drafter of its target's bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import head_files
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError, OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.checkpoints.heads.layouts import (
    LAYERS,
    VD,
    eagle1,
    eagle3,
    speculators,
    write,
)
from tests.export.head_passes import graphs, in_graphs, in_torch
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint

SMALL = {"capacity": 64, "max_width": 16}
PROMPT = " the self"


def eagle1_without_embedding():
    return eagle1(fc_bias=False, embedding=False)


LAYOUTS = {
    "eagle1": eagle1,
    "eagle1-tied": eagle1_without_embedding,
    "eagle3": eagle3,
    "speculators": speculators,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Makes a target of that many layers, its embedding tied to the LM head or not."""
    folder = tmp_path_factory.mktemp("heads")

    def make(tied, layers):
        config = llama_config(
            num_hidden_layers=layers, tie_word_embeddings=tied, initializer_range=0.1
        )
        return str(save_checkpoint(folder / f"target-{tied}-{layers}", config))

    return make


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """Exports a head once for each set of options; gives bundle, head and target."""
    bundles = {}

    def make(layout, tied, recipe="none", drafter="none", **options):
        key = layout, tied, recipe, drafter, *options.items()
        if key not in bundles:
            folder = tmp_path_factory.mktemp("head")
            torch.manual_seed(3)
            head = write(folder / "head", *LAYOUTS[layout]())
            settings = ExportOptions(
                Recipe.parse(recipe, 32), Recipe.parse(drafter, 32), **SMALL, **options
            )
            # EAGLE-1 reads the last layer only, EAGLE-3 three layers.
            target = source(tied, 1 if layout.startswith("eagle1") else LAYERS)
            bundle = export(target, folder / "bundle", options=settings, head=head)
            bundles[key] = bundle, head, target
        return bundles[key]

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_graph_does_what_the_module_does(made, layout):
    """Prompt, catch-up and drafted rows: the cache decides all later rows."""
    bundle, folder, target = made(layout, False)
    features, candidates, values, carried = in_graphs(*graphs(bundle))
    checkpoint = Checkpoint.load(target, torch.float32)
    head = load_head(folder, checkpoint, torch.float32)
    logits, states = in_torch(head, torch.tensor(features))
    np.testing.assert_allclose(carried, states, atol=2e-4)
    ids = np.arange(VOCAB_SIZE) if head.ids is None else head.ids.numpy()
    assert len(ids) == (VD if "3" in layout or layout == "speculators" else VOCAB_SIZE)
    best = np.argsort(-logits, axis=1)[:, :5]
    assert np.array_equal(candidates[:, :5], ids[best])
    np.testing.assert_allclose(
        values[:, :5], np.take_along_axis(logits, best, 1), atol=2e-4
    )
    assert np.ptp(logits) > 1, "too flat to prove anything"


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("eagle3", {"recipe": "int8", "drafter": "int8"}),
        ("eagle1-tied", {"recipe": "int4-head8", "drafter": "int4"}),
        ("eagle3", {"recipe": "w8a8", "drafter": "w8a8"}),
        ("eagle3", {"flavour": "standard"}),
        ("eagle1-tied", {"dtype": "fp16"}),
    ],
    ids=["int8", "int4", "w8a8", "standard", "fp16"],
)
def test_its_drafts_change_no_text(made, layout, options):
    bundle, _, _ = made(layout, True, **options)
    with jetdraft.load(bundle.path, threads=1) as model:
        assert "eagle" in model.methods
        for way in ({}, {"temperature": 1.0, "seed": 4}):
            how = {"max_new_tokens": 30, "ignore_eos": True, **way}
            plain = model.generate(PROMPT, method="none", **how)
            assert len(set(plain.token_ids)) > 3, "too dull to prove anything"
            for drafting in (
                {"num_draft_tokens": 3},
                {"drafting": {"tree": "best"}},
                {"drafting": {"tree": "heap"}},
            ):
                drafted = model.generate(PROMPT, method="eagle", **how, **drafting)
                assert drafted.token_ids == plain.token_ids
                assert drafted.stats.drafted_tokens > 20


def test_its_provider_must_have_the_kernels_of_matrices_that_are_lent(source, tmp_path):
    head, target = write(tmp_path / "head", *eagle3()), source(True, LAYERS)
    options = ExportOptions(Recipe("w8a8"), drafter_provider="cuda")
    with pytest.raises(OptionError, match=r"no kernel for w8a8.*--drafter-provider"):
        export(target, tmp_path / "bundle", None, options, head=head)
    assert not (tmp_path / "bundle").exists()


def bytes_of(bundle: Bundle, location: str) -> int:
    """The bytes of the drafter's tensors that lie in a file."""
    model = onnx.load(bundle.path / bundle.drafter.tree_file, load_external_data=False)
    places = [
        {e.key: e.value for e in t.external_data} for t in model.graph.initializer
    ]
    return sum(int(p["length"]) for p in places if p.get("location") == location)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", ["none", "int4-head8", "int4-headw8a8"])
def test_the_target_lends_its_matrices(made, tied, recipe):
    drafter = "none" if recipe == "none" else "int4"
    bundle, _, _ = made("eagle1-tied", tied, recipe, drafter)
    lent = bytes_of(bundle, "target.onnx.data")
    embedding, head = (
        VOCAB_SIZE * 64 * 4,
        VOCAB_SIZE * 64 * (1 if drafter == "int4" else 4),
    )
    assert lent >= (head if tied else embedding + head)
    own = Path(bundle.path / "drafter.onnx.data").stat().st_size
    # Its matrices alone: fc, query, key, value, output, and three of the MLP.
    matrices = 64 * (128 + 64 + 2 * 32 + 64 + 3 * 96)
    assert own < (1.2 if drafter == "int4" else 4.4) * matrices
    weights = bytes_of(bundle, "drafter.onnx.data")
    assert 0 < weights <= own


def test_a_matrix_of_its_own_is_not_lent(made):
    bundle, _, _ = made("eagle1", False)
    model = onnx.load(bundle.path / bundle.drafter.file)
    largest = max(model.graph.initializer, key=lambda t: int(np.prod(t.dims)))
    assert tuple(largest.dims) == (VOCAB_SIZE, 64)
    assert bytes_of(bundle, "drafter.onnx.data") > VOCAB_SIZE * 64 * 4


def test_a_bundle_has_one_drafter(source, tmp_path):
    head, target = write(tmp_path / "head", *eagle3()), source(True, 1)
    with pytest.raises(OptionError, match="--drafter or --head, not both"):
        export(target, tmp_path / "bundle", target, head=head)


def test_no_head_is_found_before_the_target_is_loaded(tmp_path):
    """The target may take a minute to load; here there is none."""
    output = tmp_path / "bundle"
    with pytest.raises(CheckpointError, match="no head at /no/such/head"):
        export("/no/such/target", output, head="/no/such/head")
    config, tensors = eagle3()
    head = write(tmp_path / "head", config | {"odd": 1}, tensors)
    with pytest.raises(CheckpointError, match="has odd=1"):
        export("/no/such/target", output, head=head)
    assert not output.exists()


def test_the_files_of_a_head_are_read_once(source, tmp_path, monkeypatch):
    """They may be all files of a target; what is checked is loaded."""
    read, load = [], head_files.load_file

    def count(file):
        read.append(file)
        return load(file)

    monkeypatch.setattr(head_files, "load_file", count)
    head = write(tmp_path / "head", *eagle1())
    options = ExportOptions(Recipe("none"), draft_vocab=10**6, **SMALL)
    with pytest.raises(OptionError, match="is not a part of"):
        export(source(False, 1), tmp_path / "bundle", options=options, head=head)
    assert read == [Path(head) / "model.safetensors"]
