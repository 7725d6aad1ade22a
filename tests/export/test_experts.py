"""Families with experts through the real path, against transformers' own loop."""

import re
import shutil
from collections import Counter
from types import SimpleNamespace

import families
import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

import jetdraft
from jetdraft import CheckpointError, OptionError, Sampling, UnsupportedModelError
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods.eagle.task import EagleSettings, EagleTask
from jetdraft.quant.divergence import Divergence, Windows, own_attention
from jetdraft.recipe import Recipe
from jetdraft.runtime.measured.cost_model import MIN_MS, Curve
from tests import cases, edit_json, same_text
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads import test_acceptance_gate as gate
from tests.checkpoints.heads.conftest import watched
from tests.checkpoints.heads.test_mtp import edit
from tests.export import test_architectures as architectures
from tests.runtime.method_bundles import tokens_of
from tests.runtime.test_generation import PROMPT, SPOILS, Scripted
from tests.tiny import MIXTURES, VOCAB_SIZE, exported, exported_model, save_checkpoint
from tests.train.periodic import teach
from tools.recipes.quality import compare

TOKENS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 200)
SIZES = {"capacity": 256, "max_width": 32}
BUNDLES = {"qwen3_moe": "none", "gpt_oss": "q8_0", "granitemoe": "q4_k-headq6_k"}
BUNDLES |= {"qwen3_next": "q4_0"}
CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
MISTAKES = {
    "": lambda name, tensor: tensor,
    "another expert": lambda name, tensor: (
        tensor.roll(1, 0) if ".experts." in name else tensor
    ),
    "gates after the other columns": lambda name, tensor: (
        tensor.roll(tensor.shape[1] // 2, 1) if "gate_up" in name else tensor
    ),
    "no experts": lambda name, tensor: tensor * (".experts.down" not in name),
}


@pytest.fixture(scope="module", params=MIXTURES)
def case(request, tmp_path_factory):
    config, folder = MIXTURES[request.param](), tmp_path_factory.mktemp("mixture")
    config._experts_implementation = "eager"
    checkpoint = architectures.load(config, folder / "checkpoint")
    with architectures.row_by_row(checkpoint.model):
        weights = checkpoint.model.state_dict()
        expected = architectures.transformers_logits(config, weights, TOKENS)
        chosen = chosen_experts(checkpoint.model)
    graph = architectures.graph_of(checkpoint, folder / "step.onnx", 256)
    return SimpleNamespace(graph=graph, expected=expected, chosen=chosen)


def chosen_experts(model) -> np.ndarray:
    chosen, count, hooks = [], 0, []
    for module in model.modules():
        if hasattr(module, "_apply_gate"):

            def keep(module, read, first=count):
                chosen.append(read[1].sort(-1).values + first)

            hooks.append(module.register_forward_pre_hook(keep))
            count += module.num_experts
    with own_attention(model), torch.no_grad():
        model(torch.tensor(TOKENS)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat(chosen, 1).numpy()


@pytest.mark.parametrize("length", [1, 63, 200])
def test_a_prompt_in_chunks_equals_transformers(case, length):
    graph, expected = case.graph, case.expected
    # Otherwise this would prove little.
    assert expected.std(axis=-1).min() > 0.1
    assert len(np.unique(case.chosen)) > case.chosen.shape[1]
    graph.cache.rewind(0)
    alone = graph.run(TOKENS[:1]).logits.copy()
    for start in range(0, length, 32):
        end = min(length, start + 32)
        answer = graph.run(TOKENS[start:end])
        logits = answer.logits
        assert start or np.array_equal(logits[:1], alone)  # the same bits
        architectures.assert_close(logits, expected[start:end])
        np.testing.assert_array_equal(logits.argmax(-1), expected[start:end].argmax(-1))
        chosen = np.sort(answer.experts, -1)
        np.testing.assert_array_equal(chosen, case.chosen[start:end])
        assert answer.touched == len(np.unique(chosen))
        graph.cache.advance(end - start)


@pytest.fixture(scope="module", params=BUNDLES)
def bundle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    source = save_checkpoint(folder / "source", MIXTURES[request.param]())
    return exported(source, folder / "bundle", BUNDLES[request.param], **SIZES)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=3)])
def test_drafts_that_are_right_now_and_then(bundle, sampling):
    with jetdraft.load(bundle.path, threads=2) as model:
        plain, _ = tokens_of(model, PROMPT, sampling, tokens=48)
        for spoil in SPOILS[:-1]:
            proposer = Scripted(np.array(plain), spoil)
            tokens, _ = tokens_of(model, PROMPT, sampling, proposer, tokens=48)
            assert tokens == plain


def test_experts_are_packed_and_what_chooses_them_stays_floats(bundle):
    graph = onnx.load(bundle.path / bundle.target.file, load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    is_packed = bundle.target.quantization["scheme"] != "none"
    assert kinds["MatMulExperts"] == 4 * is_packed
    if is_packed:
        floats = [n.input[1] for n in graph.node if n.op_type == "MatMul"]
        assert len(floats) == 2
        assert all(re.search(r"(gate|router)\.weight", name) for name in floats)


@pytest.mark.parametrize("made", [False, True])
def test_a_generation_counts_the_experts_of_its_last_rows(made, tmp_path):
    """A made router sends all rows to the same experts, so that more rows are free."""
    source = save_checkpoint(tmp_path / "source", MIXTURES["qwen3_moe"]())
    if made:
        edit(source, lambda own: {n: t * (".gate." not in n) for n, t in own.items()})
    with exported_model(source, tmp_path / "bundle", **SIZES) as model:
        plain, _ = tokens_of(model, PROMPT, Sampling(), tokens=30)
        proposer = Scripted(np.array(plain), SPOILS[-2])
        tokens_of(model, PROMPT, Sampling(), proposer, tokens=30)
        curve, parts = model.parts.curve, model.parts
        parts.target.cache.rewind(0)
        rows, chosen = [*PROMPT, *plain][:-1], []
        for start in range(0, len(rows), 16):
            some = rows[start : start + 16]
            chosen += [*parts.target.run(some).experts.copy()]
            parts.target.cache.advance(len(some))
        counts = [len(np.unique(chosen[-width:])) for width in range(1, 17)]
        assert [*curve.touched.values()] == counts
        assert (counts[-1] == counts[0]) == made
        curve.expert, before = 0.5, curve.passes[4]
        more_ms = 0.5 * (counts[3] - curve.experts[4])
        assert curve.pass_ms(4) == pytest.approx(max(before + more_ms, MIN_MS))


def routed(overlapping):
    """Weights whose text counts to 31; a token picks its experts, or all pick two."""

    def change(own):
        eye = torch.eye(64)[torch.arange(VOCAB_SIZE) % 64]
        small = {n: t / 1e3 for n, t in own.items() if "o_proj" in n or "down" in n}
        gates = {n: torch.eye(64) * (not overlapping) for n in own if ".gate." in n}
        ends = {"model.embed_tokens.weight": eye, "lm_head.weight": eye.roll(1, 0)}
        return own | small | gates | ends

    return change


def test_drafting_stops_where_experts_do_not_overlap(tmp_path, monkeypatch):
    """Rows are free but for the experts that they touch; all drafts are right."""
    config, drafted = MIXTURES["qwen3_moe"](), []
    config.num_experts, config.tie_word_embeddings = 64, False
    monkeypatch.setattr(Curve, "learn", lambda *_: None)
    for overlapping in (True, False):
        source = save_checkpoint(tmp_path / f"source-{overlapping}", config)
        edit(source, routed(overlapping))
        output = tmp_path / f"bundle-{overlapping}"
        with exported_model(source, output, **SIZES) as model:
            plain, _ = tokens_of(model, PROMPT, Sampling(), tokens=120)
            assert len(set(plain[-32:])) == 32
            curve, widths = model.parts.curve, range(1, 17)
            curve.passes = {w: 1 + 1.2 * (w - 1) for w in widths}
            curve.experts, curve.expert = {w: 4.0 * w for w in widths}, 0.3
            proposer = Scripted(np.array(plain), SPOILS[0])
            how = {"length": None, "tokens": 120}
            tokens, stats = tokens_of(model, PROMPT, Sampling(), proposer, **how)
            assert tokens == plain
            drafted.append(stats.drafted_tokens / stats.target_passes)
    assert drafted[0] > 5 > 0.5 > drafted[1], drafted


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_kl_is_that_of_the_bundle_as_it_runs(name, tmp_path):
    """Nearly: what enters the second matrix of an expert is not rounded in torch."""
    source = save_checkpoint(tmp_path / "source", MIXTURES[name](), tokenizer=False)
    checkpoint = Checkpoint.load(str(source), torch.float32)
    graphs, recipe = [], Recipe("q4_0")
    for each in (Recipe("none"), recipe):
        model = exported_model(source, tmp_path / each.name, each.name, **SIZES)
        graphs.append(model.parts.target)
    windows = Windows(torch.tensor(TOKENS)[None])
    kl = compare(*graphs, windows.ids.tolist()).kl_mean
    with own_attention(checkpoint.model):
        divergence = Divergence(checkpoint.model, windows, {})
        assert divergence.mean_kl(recipe) == pytest.approx(kl, rel=0.1)
        for unit, matrices in divergence.units.items():
            experts = {n: m for n, m in matrices.items() if ".experts." in n}
            assert len(experts) == 2 * unit.isdigit()
            divergence.units[unit] = experts
        assert divergence.mean_kl(recipe) > 0.05


@cases(
    "recipe, size, kernel, said",
    ("int4-rtn-b32", 48, None, "experts of 96 columns, and only llama.cpp's"),
    (None, 48, "onnxruntime", "experts of 96 columns, and only llama.cpp's"),
    ("q4_0", 20, None, "experts of 40 columns, .* a multiple of 16"),
)
def test_other_recipes_are_refused_before_a_weight_is_read(
    recipe, size, kernel, said, tmp_path
):
    config = MIXTURES["mixtral"]()
    config.intermediate_size = size
    source = save_checkpoint(tmp_path / "source", config)
    own = recipe and Recipe.parse(recipe)
    how = ExportOptions(own, fast=recipe is not None, kernel=kernel)
    seen = []
    with pytest.raises(OptionError, match=said):
        export(str(source), tmp_path / "bundle", None, how, lambda *at: seen.append(at))
    assert seen == [("load", 0, 1)]


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe", "gpt_oss"])
def test_an_export_reads_a_matrix_at_a_time(name, tmp_path, monkeypatch):
    config, sizes, read = MIXTURES[name](), [], np.fromfile
    source = save_checkpoint(tmp_path / "source", config)
    monkeypatch.setattr(
        "jetdraft.checkpoints.packed.np.fromfile",
        lambda file, kind, count, offset: (
            sizes.append(count) or read(file, kind, count, offset=offset)
        ),
    )
    exported(source, tmp_path / "bundle", "q4_0", **SIZES)
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    parts = 1 if name == "qwen3_moe" else 2  # gate and other columns, where stacked
    largest = 4 * config.hidden_size * width * parts
    assert max(sizes) == largest
    assert sum(sizes) > 20 * largest


def write_mxfp4(folder, low, high):
    config, numbers = MIXTURES["gpt_oss"](), np.random.default_rng(0)
    config.intermediate_size = 96
    save_checkpoint(folder, config)
    floats = {}

    def pack(own):
        packed = {}
        for name, tensor in own.items():
            if not name.endswith("_proj") or "experts" not in name:
                packed[name] = tensor.bfloat16()
                continue
            experts, rows, columns = tensor.shape
            shape = experts, columns, rows // 32
            bytes_ = numbers.integers(0, 256, (*shape, 16), dtype=np.uint8)
            scales = numbers.integers(low, high + 1, shape, dtype=np.uint8)
            codes = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(*shape, 32)
            values = np.array(CODES + [-code for code in CODES])[codes]
            exact = np.ldexp(values, scales[..., None].astype(int) - 127)
            floats[name] = exact.reshape(experts, columns, rows)
            packed[f"{name}_blocks"] = torch.from_numpy(bytes_)
            packed[f"{name}_scales"] = torch.from_numpy(scales)
        return packed

    edit(folder, pack)
    method = {"quant_method": "mxfp4"}
    edit_json(folder / "config.json", quantization_config=method)
    return floats


def test_experts_of_mxfp4_are_kept_as_they_are(tmp_path):
    """Their numbers are Q5_0's: twice a float of E2M1 is an integer."""
    floats = write_mxfp4(tmp_path / "source", 104, 124)
    found = Checkpoint.load(str(tmp_path / "source"), torch.float32, keeps_grids=True)
    for name, exact in floats.items():
        matrix = found.packed.blocks[name].concatenated([found.packed.blocks[name]])
        assert matrix.grid == "Q5_0"
        rows = exact.reshape(-1, exact.shape[2])
        np.testing.assert_array_equal(matrix.floats.T, rows)
        stack = found.model.get_parameter(name)
        np.testing.assert_array_equal(stack.numpy(), exact.swapaxes(1, 2))
    write_mxfp4(tmp_path / "likely", 117, 121)
    bundle = exported(tmp_path / "likely", tmp_path / "bundle")
    assert bundle.target.quantization["kept"] == {"mxfp4 exact": 4}
    model = Checkpoint.load(str(tmp_path / "likely"), torch.float32).model
    with own_attention(model), torch.no_grad():
        expected = model(torch.tensor(TOKENS[None, :16]), use_cache=False).logits[0]
    with jetdraft.load(bundle.path, threads=1) as loaded:
        logits = loaded.parts.target.run(TOKENS[:16]).logits
    assert np.corrcoef(logits.ravel(), expected.numpy().ravel())[0, 1] > 0.9999


def test_turned_experts_are_turned_back(tmp_path):
    """The published files of Qwen3-VL-MoE have both axes of an expert exchanged."""
    own, turned = tmp_path / "own", tmp_path / "turned"
    families.save_tiny("qwen3_vl_moe", own, seed=0)
    shutil.copytree(own, turned)

    def turn(tensors):
        stacks = {n: w.mT.contiguous() for n, w in tensors.items() if ".experts." in n}
        assert stacks
        return tensors | stacks

    edit(turned, turn)
    one, other = (Checkpoint.load(str(f), torch.float32).model for f in (own, turned))
    expected = one.state_dict()
    assert all(torch.equal(expected[n], w) for n, w in other.state_dict().items())


@pytest.mark.parametrize("kind", ["gate", "down"])
def test_experts_that_do_not_fit_each_other_are_refused(kind, tmp_path):
    source = save_checkpoint(tmp_path / "source", MIXTURES["qwen3_moe"]())
    name = f"model.layers.0.mlp.experts.1.{kind}_proj.weight"
    edit(source, lambda own: own | {name: own[name][:-16].clone()})
    with pytest.raises(CheckpointError):
        Checkpoint.load(str(source), torch.float32)


def test_an_exponent_beyond_a_half_is_refused(tmp_path):
    write_mxfp4(tmp_path / "source", 90, 90)
    with pytest.raises(
        UnsupportedModelError, match="an exponent of -37, which no half"
    ):
        exported(tmp_path / "source", tmp_path / "bundle")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("learned"), MIXTURES["qwen3_moe"]()
    config.initializer_range = 0.05
    save_checkpoint(folder / "target", config, tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "target", experts_implementation="eager"
    )
    ids = gate.text()[None]
    teach(model, ids, 220)
    model.save_pretrained(folder / "target")
    target = Checkpoint.load(str(folder / "target"), torch.float32)
    with own_attention(target.model):
        streams, out = watched(target.model, ids)
    known = {"streams": streams, "final": out.hidden_states[-1], "logits": out.logits}
    taught = SimpleNamespace(target=target, ids=ids, **known)
    task, run = EagleTask(EagleSettings(kind="mtp")), SimpleNamespace(target=target)
    torch.manual_seed(8)
    run.module = SimpleNamespace(drafter=task.new_drafter(run))
    gate.learn(run.module.drafter, taught, ".mlp.", steps=250)
    layouts.write(folder / "head", *task.contents(run, task.weights(run), None))
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_mtp_module_with_experts_drafts_what_it_learned(learned, mistake, tmp_path):
    head = shutil.copytree(learned / "head", tmp_path / "head")
    edit(head, lambda own: {n: MISTAKES[mistake](n, t) for n, t in own.items()})
    bundle = exported(learned / "target", tmp_path / "b", head=head, **SIZES)
    words, chain = gate.text().tolist(), {"method": "eagle", "num_draft_tokens": 3}
    tree = {"method": "eagle", "drafting": {"tree": "k-ary", "branching": (2, 2)}}
    how = {"token_ids": words[:40], "max_new_tokens": 90}
    with jetdraft.load(bundle.path, threads=1) as model:
        results = same_text(model, [chain, tree], [{}], **how)
    assert np.mean(np.equal(results[0].token_ids, words[40:130])) > 0.95
    rates = [result.stats.acceptance_rate for result in results]
    assert all(rate < 0.6 if mistake else rate > 0.75 for rate in rates), rates
