from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers

import jetdraft
from jetdraft import Bundle, CheckpointError, OptionError, PairError
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import head_files
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.layers import Taps
from jetdraft.devices.providers import PROVIDERS
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.opener import Opener
from jetdraft.runtime.passes.session import ONE_THREAD
from tests import cases, same_text
from tests.checkpoints.heads.layouts import VD, eagle3, write
from tests.export.conftest import KINDS, MTP, graphs, in_graphs, in_torch
from tests.export.test_capture import assert_captured
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint

CAUSAL = ["eagle1", "eagle1-tied", "eagle3", "speculators", *MTP]
LAYERS = 2
TOKENS = np.random.default_rng(4).integers(1, 288, 12).tolist()
TREE = Rows(TOKENS[:5], [-1, 0, 0, 1, 2])


def loaded(source, target):
    checkpoint = Checkpoint.load(target, torch.float32)
    return load_head(source, checkpoint, torch.float32), checkpoint


@pytest.mark.parametrize("name", CAUSAL)
def test_the_graph_does_what_the_module_does(made, name):
    bundle, target, source, _ = made(name)
    features, candidates, top, carried = in_graphs(*graphs(bundle))
    head, _ = loaded(source, target)
    rows, states = in_torch(head, torch.tensor(features))
    np.testing.assert_allclose(carried, states, atol=2e-4)
    ids = np.arange(VOCAB_SIZE) if head.ids is None else head.ids.numpy()
    assert len(ids) == (VD if name in ("eagle3", "speculators") else VOCAB_SIZE)
    best = np.argsort(-rows, axis=1)[:, :5]
    assert np.array_equal(candidates[:, :5], ids[best])
    np.testing.assert_allclose(top[:, :5], np.take_along_axis(rows, best, 1), atol=2e-4)
    assert np.ptp(rows) > 1, "too flat to prove anything"


@pytest.mark.parametrize("name", MTP)
def test_a_module_reads_the_state_after_the_final_norm(made, name):
    """What the LM head reads too, so that it gives the target's logits."""
    bundle, source, *_ = made(name)
    target, _ = graphs(bundle)
    answer = target.run([5, 6, 7, 8])
    head = Checkpoint.load(source, torch.float32).model.get_output_embeddings()
    logits = answer.features @ head.weight.detach().numpy().T
    np.testing.assert_allclose(logits, answer.logits, atol=2e-4)


def test_other_kernels_and_a_second_drafter_are_refused(made, tmp_path):
    """Its provider must have the kernels of the target's matrices."""
    _, target, head, _ = made("eagle3")
    options = ExportOptions(Recipe("q4_k"), drafter_provider="cuda")
    with pytest.raises(OptionError, match=r"no kernel for q4_k.*--drafter-provider"):
        export(target, tmp_path / "bundle", None, options, head=head)
    with pytest.raises(OptionError, match="--drafter or --head, not both"):
        export(target, tmp_path / "bundle", target, head=head)
    assert not (tmp_path / "bundle").exists()


def bytes_of(bundle: Bundle, location: str) -> int:
    model = onnx.load(bundle.path / bundle.drafter.tree_file, load_external_data=False)
    spots = [{e.key: e.value for e in t.external_data} for t in model.graph.initializer]
    return sum(int(p["length"]) for p in spots if p.get("location") == location)


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
    assert 0 < bytes_of(bundle, "drafter.onnx.data") <= own


def test_a_matrix_of_its_own_is_in_its_own_file(made):
    bundle = made("eagle1").bundle
    model = onnx.load(bundle.path / bundle.drafter.file)
    largest = max(model.graph.initializer, key=lambda t: int(np.prod(t.dims)))
    assert tuple(largest.dims) == (VOCAB_SIZE, 64)
    assert bytes_of(bundle, "drafter.onnx.data") > VOCAB_SIZE * 64 * 4


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
    _, target, head, _ = made("eagle1")
    load = Mock(side_effect=head_files.load_file)
    monkeypatch.setattr(head_files, "load_file", load)
    options = ExportOptions(Recipe("none"), draft_vocab=10**6)
    with pytest.raises(OptionError, match="is not a part of"):
        export(target, tmp_path / "bundle", options=options, head=head)
    load.assert_called_once_with(Path(head) / "model.safetensors")


PROMPT = " the self"
METHODS = {name: kind.method for name, kind in KINDS.items()}
METHODS |= dict.fromkeys(MTP, "eagle")
BLOCKS = [
    {"num_draft_tokens": 5, "drafting": {"confidence": 0.0}},
    {"num_draft_tokens": 5, "drafting": {"confidence": 0.0, "steps": 2}},
]
CHAINS = {"eagle": [{"num_draft_tokens": 3}], "medusa": [{"num_draft_tokens": 3}]}
CHAINS |= {"dflash": BLOCKS, "diffusion": BLOCKS}
TREES = [{"drafting": {"tree": "best"}}, {"drafting": {"tree": "heap"}, "exact": False}]
WIDE = {"drafting": {"tree": "k-ary", "branching": (2, 2)}}
INT8, PACKED = {"recipe": "int8"}, {"recipe": "q8_0"}
STANDARD = {"flavour": "standard"}
FP16 = {"recipe": "int8", "provider": "cuda"}
"""Exported for a GPU, which computes in half precision, and run on the CPU."""

HOWS = {"": {}, "int8": INT8, "packed": PACKED, "standard": STANDARD, "fp16": FP16}
BUNDLES = {
    "eagle3 int8": ("eagle3", INT8),
    "eagle3 packed": ("eagle3", PACKED),
    "eagle3 standard": ("eagle3", STANDARD),
    "eagle1 int4": (
        "eagle1-tied",
        {"tied": True, "recipe": "int4-head8", "drafter": "int4"},
    ),
    "eagle1 fp16": ("eagle1", FP16),
    **{name: (name, {}) for name in MTP},
    "medusa": ("medusa", {}),
    "medusa int8": ("medusa", INT8),
    "medusa standard": ("medusa", STANDARD),
    "medusa fp16": ("medusa", FP16),
    "hydra": ("hydra", {}),
    "hydra cut": ("hydra", {"draft_vocab": 100}),
    "hydra tied": ("hydra", {"tied": True, **INT8}),
    **{
        f"{name} {how}".strip(): (name, options)
        for name in ("dflash", "diffusion")
        for how, options in HOWS.items()
    },
}


@pytest.mark.parametrize("case", BUNDLES)
def test_its_drafts_change_no_text(made, case):
    name, options = BUNDLES[case]
    bundle, method = made(name, **options).bundle, METHODS[name]
    with jetdraft.load(bundle.path, provider="cpu", threads=1) as model:
        others = {"draft", "eagle", "medusa", "dflash", "diffusion"} - {method}
        assert method in model.methods
        assert not others & set(model.methods)
        ways = [*CHAINS[method], *TREES, *([] if method == "eagle" else [WIDE])]
        drafts = [{"method": method, **way} for way in ways]
        for drafted in same_text(model, drafts, prompt=PROMPT, max_new_tokens=30):
            assert len(set(drafted.token_ids)) > 3, "too dull to prove anything"
            assert drafted.stats.drafted_tokens > 20


@cases("name", "eagle1", "eagle3", "medusa", "hydra", "dflash", "diffusion")
def test_it_can_be_captured(made, name):
    assert_captured(made(name, **FP16).bundle)


def fused_taps() -> Taps:
    torch.manual_seed(7)
    fc = torch.nn.Linear(3 * 64, 64, bias=False)

    def fuse(states):
        return fc(torch.cat(states, -1).float())

    return Taps((0, 1, LAYERS), 64, fuse, {"fc": fc})


def exported(source, output, taps, **options) -> Bundle:
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
    folder = tmp_path_factory.mktemp(f"features-{request.param}")
    how = {"recipe": Recipe("int8", 32), "flavour": request.param}
    plain = exported(source, folder / "plain", None, **how)
    return plain, exported(source, folder / "fused", fused_taps(), **how)


def graph(bundle):
    return Opener(bundle, PROVIDERS["cpu"], ONE_THREAD).graph(bundle.target)


def answers(bundle):
    opened, found = graph(bundle), []
    for last_only, width in ((True, 8), (False, 2), (False, 1)):
        found.append(copied(opened.run(TOKENS[:width], last_only)))
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


def test_the_fusions_still_apply_and_their_matrix_stays_floats(bundles):
    plain, fused = (operators(bundle) for bundle in bundles)
    added = fused - plain
    assert not plain - fused
    assert set(added) <= {"Concat", "MatMul", "Transpose"}
    if bundles[0].flavour == "contrib":
        assert fused["SkipSimplifiedLayerNormalization"] == 2 * LAYERS
    model = ir.load(bundles[1].path / bundles[1].target.file)
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
    bundle = exported(
        source, tmp_path / "bundle", Taps((), 64), recipe=Recipe("none"), dtype=dtype
    )
    _, state = states_of(source, TOKENS)
    features = graph(bundle).run(TOKENS, last_only=True).features
    assert features.dtype == np.float32
    tolerance = {"fp32": 1e-4, "fp16": 5e-2}[dtype]
    np.testing.assert_allclose(features, state[0].numpy(), atol=tolerance)


def test_a_head_of_a_deeper_target_is_refused(source, tmp_path):
    with pytest.raises(PairError, match="enter layer 5, and the target has 2 layers"):
        exported(source, tmp_path / "bundle", Taps((5,), 64), recipe=Recipe("none"))
