"""A target gives features for a head, and changes nothing else."""

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.layers import Taps
from jetdraft.devices.providers import PROVIDERS
from jetdraft.errors import PairError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.session import ONE_THREAD
from tests.tiny import llama_config, save_checkpoint

LAYERS = 2
TOKENS = np.random.default_rng(4).integers(1, 288, 12).tolist()
TREE = Rows(TOKENS[:5], [-1, 0, 0, 1, 2])


def fused_taps() -> Taps:
    """Three states to one feature vector, as EAGLE-3 joins them."""
    torch.manual_seed(7)
    fc = torch.nn.Linear(3 * 64, 64, bias=False)

    def fuse(states):
        return fc(torch.cat(states, -1).float())

    return Taps((0, 1, LAYERS), 64, fuse, {"fc": fc})


def exported(source, output, taps, **options) -> Bundle:
    """The bundle of a target whose states a head reads."""
    load = Checkpoint.load

    def load_with_taps(*how):
        return replace(load(*how), taps=taps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "load", load_with_taps)
        settings = ExportOptions(capacity=64, max_width=16, **options)
        return export(str(source), output, options=settings)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_checkpoint(
        tmp_path_factory.mktemp("features") / "target",
        llama_config(num_hidden_layers=LAYERS),
    )


@pytest.fixture(scope="module", params=["contrib", "standard"])
def bundles(request, source, tmp_path_factory):
    """The same target without and with features."""
    folder = tmp_path_factory.mktemp(f"features-{request.param}")
    how = {"recipe": Recipe("int8", 32), "flavour": request.param}
    plain = exported(source, folder / "plain", None, **how)
    return plain, exported(source, folder / "fused", fused_taps(), **how)


def graph(bundle):
    return Opener(bundle, PROVIDERS["cpu"], ONE_THREAD).graph(bundle.target)


def answers(bundle):
    """The answers of a prefill, a chain and a tree, each with its rows' features."""
    opened = graph(bundle)
    found = []
    for last_only, width in ((True, 8), (False, 2), (False, 1)):
        answer = opened.run(TOKENS[:width], last_only)
        found.append(copied(answer))
        opened.cache.advance(width)
    found.append(copied(opened.verify(TREE, 6)[1]))
    return found


def copied(answer):
    names = ("candidates", "candidate_logits", "logsumexp", "logits", "features")
    values = [getattr(answer, name) for name in names]
    return [None if value is None else value.copy() for value in values]


def operators(bundle):
    model = ir.load(bundle.path / bundle.target.file)
    return Counter(node.op_type for node in model.graph)


def test_features_change_no_bit_of_the_rows(bundles):
    plain, fused = (answers(bundle) for bundle in bundles)
    for before, after in zip(plain, fused, strict=True):
        assert before[-1] is None
        for one, other in zip(before[:-1], after[:-1], strict=True):
            assert np.array_equal(one, other)


def test_the_fusions_still_apply(bundles):
    plain, fused = (operators(bundle) for bundle in bundles)
    added = fused - plain
    assert not plain - fused
    # What joins the states and maps them to features.
    assert set(added) <= {"Concat", "MatMul", "Transpose"}
    if bundles[0].flavour == "contrib":
        assert fused["SkipSimplifiedLayerNormalization"] == 2 * LAYERS


def test_the_matrix_of_the_fusion_stays_floats(bundles):
    _, fused = bundles
    model = ir.load(fused.path / fused.target.file)
    names = [name for name in model.graph.initializers if name.startswith("features.")]
    assert names == ["features.parts.fc.weight"]


def states_of(source, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    output = {}
    norm = model.model.norm.register_forward_pre_hook(
        lambda _, args: output.update(stream=args[0])
    )
    with torch.no_grad():
        result = model(torch.tensor([tokens]), output_hidden_states=True)
    norm.remove()
    return [*result.hidden_states[:-1], output["stream"]], result.hidden_states[-1]


def test_every_row_has_the_features_of_the_model(source, tmp_path):
    """A prefill answers for its last row, and gives the features of all."""
    bundle = exported(source, tmp_path / "bundle", fused_taps(), recipe=Recipe("none"))
    streams, _ = states_of(source, TOKENS)
    with torch.no_grad():
        states = [streams[layer] for layer in (0, 1, LAYERS)]
        expected = fused_taps().fuse(states)[0].numpy()
    answer = graph(bundle).run(TOKENS, last_only=True)
    assert answer.candidates.shape[0] == 1
    assert answer.features.shape == (len(TOKENS), 64)
    np.testing.assert_allclose(answer.features, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_state_after_the_norm(source, tmp_path, dtype):
    taps = Taps((), 64)
    bundle = exported(
        source, tmp_path / "bundle", taps, recipe=Recipe("none"), dtype=dtype
    )
    _, state = states_of(source, TOKENS)
    features = graph(bundle).run(TOKENS, last_only=True).features
    assert features.dtype == np.float32
    tolerance = {"fp32": 1e-4, "fp16": 5e-2}[dtype]
    np.testing.assert_allclose(features, state[0].numpy(), atol=tolerance)


def test_a_head_of_a_deeper_target_is_refused(source, tmp_path):
    with pytest.raises(PairError, match="enter layer 5, and the target has 2 layers"):
        exported(source, tmp_path / "bundle", Taps((5,), 64), recipe=Recipe("none"))
