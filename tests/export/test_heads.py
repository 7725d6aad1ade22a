"""A published head becomes the drafter of its target's bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import head_files
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError, OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests.checkpoints.heads.layouts import VD, eagle3, write
from tests.export.conftest import MTP
from tests.export.head_passes import graphs, in_graphs, in_torch
from tests.tiny import VOCAB_SIZE

CAUSAL = ["eagle1", "eagle1-tied", "eagle3", "speculators", *MTP]


def loaded(source, target):
    """The head as a module, and the checkpoint of its target."""
    checkpoint = Checkpoint.load(target, torch.float32)
    return load_head(source, checkpoint, torch.float32), checkpoint


@pytest.mark.parametrize("name", CAUSAL)
def test_the_graph_does_what_the_module_does(made, name):
    """Prompt, catch-up and drafted rows: the cache decides all later rows."""
    bundle, target, source, _ = made(name)
    features, candidates, values, carried = in_graphs(*graphs(bundle))
    head, _ = loaded(source, target)
    logits, states = in_torch(head, torch.tensor(features))
    np.testing.assert_allclose(carried, states, atol=2e-4)
    ids = np.arange(VOCAB_SIZE) if head.ids is None else head.ids.numpy()
    assert len(ids) == (VD if name in ("eagle3", "speculators") else VOCAB_SIZE)
    best = np.argsort(-logits, axis=1)[:, :5]
    assert np.array_equal(candidates[:, :5], ids[best])
    np.testing.assert_allclose(
        values[:, :5], np.take_along_axis(logits, best, 1), atol=2e-4
    )
    assert np.ptp(logits) > 1, "too flat to prove anything"


@pytest.mark.parametrize("name", MTP)
def test_a_module_reads_the_state_after_the_final_norm(made, name):
    """What the LM head reads too, so that it gives the target's logits."""
    bundle, source, *_ = made(name)
    target, _ = graphs(bundle)
    answer = target.run([5, 6, 7, 8])
    head = Checkpoint.load(source, torch.float32).model.get_output_embeddings()
    logits = answer.features @ head.weight.detach().numpy().T
    np.testing.assert_allclose(logits, answer.logits, atol=2e-4)


def test_its_provider_must_have_the_kernels_of_the_targets_matrices(made, tmp_path):
    _, target, head, _ = made("eagle3")
    options = ExportOptions(Recipe("q4_k"), drafter_provider="cuda")
    with pytest.raises(OptionError, match=r"no kernel for q4_k.*--drafter-provider"):
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
@pytest.mark.parametrize("recipe", ["none", "int4-head8", "int4-headq8_0"])
def test_matrices_of_the_target_are_in_its_file(made, tied, recipe):
    drafter = "none" if recipe == "none" else "int4"
    how = {} if recipe == "none" else {"recipe": recipe, "drafter": drafter}
    bundle = made("eagle1-tied", tied=tied, **how).bundle
    shared = bytes_of(bundle, "target.onnx.data")
    embedding, head = (
        VOCAB_SIZE * 64 * 4,
        VOCAB_SIZE * 64 * (1 if drafter == "int4" else 4),
    )
    assert shared >= (head if tied else embedding + head)
    own = Path(bundle.path / "drafter.onnx.data").stat().st_size
    # Its matrices alone: fc, query, key, value, output, and three of the MLP.
    matrices = 64 * (128 + 64 + 2 * 32 + 64 + 3 * 96)
    assert own < (1.2 if drafter == "int4" else 4.4) * matrices
    weights = bytes_of(bundle, "drafter.onnx.data")
    assert 0 < weights <= own


def test_a_matrix_of_its_own_is_in_its_own_file(made):
    bundle = made("eagle1").bundle
    model = onnx.load(bundle.path / bundle.drafter.file)
    largest = max(model.graph.initializer, key=lambda t: int(np.prod(t.dims)))
    assert tuple(largest.dims) == (VOCAB_SIZE, 64)
    assert bytes_of(bundle, "drafter.onnx.data") > VOCAB_SIZE * 64 * 4


def test_a_bundle_has_one_drafter(made, tmp_path):
    _, target, head, _ = made("eagle1")
    with pytest.raises(OptionError, match="--drafter or --head, not both"):
        export(target, tmp_path / "bundle", target, head=head)


def test_no_head_is_found_before_the_target_is_loaded(tmp_path):
    """The target may take a minute to load; here it does not exist."""
    output = tmp_path / "bundle"
    with pytest.raises(CheckpointError, match="no head at /no/such/head"):
        export("/no/such/target", output, head="/no/such/head")
    config, tensors = eagle3()
    head = write(tmp_path / "head", config | {"odd": 1}, tensors)
    with pytest.raises(CheckpointError, match="has odd=1"):
        export("/no/such/target", output, head=head)
    assert not output.exists()


def test_the_files_of_a_head_are_read_once(made, tmp_path, monkeypatch):
    """They may be all files of a target; what is checked is loaded."""
    _, target, head, _ = made("eagle1")
    read, load = [], head_files.load_file

    def count(file):
        read.append(file)
        return load(file)

    monkeypatch.setattr(head_files, "load_file", count)
    options = ExportOptions(Recipe("none"), draft_vocab=10**6)
    with pytest.raises(OptionError, match="is not a part of"):
        export(target, tmp_path / "bundle", options=options, head=head)
    assert read == [Path(head) / "model.safetensors"]
