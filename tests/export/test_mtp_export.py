"""MTP modules of a target's own files, from the published layouts to drafted text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests import tiny
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import H, rand
from tests.export.head_passes import graphs, in_graphs, in_torch
from tests.tiny import save_checkpoint

SIZES = {**tiny.SIZES, "num_hidden_layers": 2}
PROMPT = " the self"


def module(names, layer):
    """The tensors of a module: two norms, their join, a layer, a last norm."""
    embedding_norm, hidden_norm, fc, final = names
    return {
        f"{embedding_norm}.weight": layouts.norm(),
        f"{hidden_norm}.weight": layouts.norm(),
        f"{fc}.weight": rand(H, 2 * H),
        f"{final}.weight": layouts.norm(),
        **layer,
    }


def prefixed(prefix, names):
    return [prefix + name for name in names]


def mimo():
    """MiMo-7B: a Qwen2 layer, and the state before the embedding."""
    prefix = "model.mtp_layers.0."
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    layer = layouts.layer_tensors(prefix, bias=True)
    return transformers.Qwen2Config(**SIZES), module(prefixed(prefix, names), layer)


def qwen():
    """The names of Qwen3-Next and Qwen3.5, beside a target without recurrent layers."""
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    layer = layouts.layer_tensors("mtp.layers.0.", qk_norm=True)
    config = transformers.Qwen3Config(**SIZES, head_dim=16)
    return config, module(prefixed("mtp.", names), layer)


def deepseek():
    """The names of DeepSeek-V3 and GLM-4.5, beside a target without experts.

    The file has the target's matrices once more, as theirs have.
    """
    prefix = "model.layers.2."
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    config = transformers.LlamaConfig(**SIZES)
    layer = layouts.layer_tensors(prefix)
    return config, module(prefixed(prefix, names), layer)


COPIES = {
    "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
    "model.layers.2.shared_head.head.weight": "lm_head.weight",
}
LAYOUTS = {"mimo": mimo, "qwen": qwen, "deepseek": deepseek}


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request, tmp_path_factory):
    """The folder of a target with a module, and the bundle of both."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(11)
    config, tensors = LAYOUTS[request.param]()
    save_checkpoint(folder / "target", config)
    file = folder / "target" / "model.safetensors"
    own = load_file(file)
    if request.param == "deepseek":
        tensors |= {name: own[copied].clone() for name, copied in COPIES.items()}
    save_file(own | tensors, file, {"format": "pt"})
    source = str(folder / "target")
    options = ExportOptions(Recipe("none"), capacity=64, max_width=16)
    return source, export(source, folder / "bundle", options=options, head=source)


def test_the_graph_does_what_the_module_does(case):
    source, bundle = case
    features, candidates, values, carried = in_graphs(*graphs(bundle))
    target = Checkpoint.load(source, torch.float32)
    head = load_head(source, target, torch.float32)
    logits, states = in_torch(head, torch.tensor(features))
    np.testing.assert_allclose(carried, states, atol=2e-4)
    best = np.argsort(-logits, axis=1)[:, :5]
    assert np.array_equal(candidates[:, :5], best)
    np.testing.assert_allclose(
        values[:, :5], np.take_along_axis(logits, best, 1), atol=2e-4
    )
    assert np.ptp(logits) > 1, "too flat to prove anything"


def test_it_reads_the_state_after_the_final_norm(case):
    """What the LM head reads too, so that it gives the target's logits."""
    source, bundle = case
    target, _ = graphs(bundle)
    answer = target.run([5, 6, 7, 8])
    head = Checkpoint.load(source, torch.float32).model.get_output_embeddings()
    logits = answer.features @ head.weight.detach().numpy().T
    np.testing.assert_allclose(logits, answer.logits, atol=2e-4)


def test_its_drafts_change_no_text(case):
    _, bundle = case
    with jetdraft.load(bundle.path, threads=1) as model:
        assert "eagle" in model.methods
        for way in ({}, {"temperature": 1.0, "seed": 4, "top_p": 0.95}):
            how = {"max_new_tokens": 30, "ignore_eos": True, **way}
            plain = model.generate(PROMPT, method="none", **how)
            assert len(set(plain.token_ids)) > 3, "too dull to prove anything"
            for drafting in (
                {"method": "eagle", "num_draft_tokens": 3},
                {"method": "eagle", "drafting": {"tree": "best"}},
                {"method": "eagle", "drafting": {"tree": "heap"}, "exact": False},
                {"method": "eagle,lookup"},
                {"method": "lookup"},
                {"method": "auto"},
            ):
                drafted = model.generate(PROMPT, **how, **drafting)
                assert drafted.token_ids == plain.token_ids, drafting
                if drafting["method"] == "eagle":
                    assert drafted.stats.drafted_tokens > 20
