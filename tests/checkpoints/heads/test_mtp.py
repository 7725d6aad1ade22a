"""MTP modules of a target's own files, against transformers' `MtpModel`."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError, UnsupportedModelError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.methods.eagle.task import EagleSettings, EagleTask
from jetdraft.recipe import Recipe
from tests import edit_json, same_text, tiny
from tests.checkpoints.heads import layouts, reference
from tests.checkpoints.heads.conftest import ROWS
from tests.checkpoints.heads.layouts import H
from tests.export.conftest import MTP
from tests.tiny import HYBRIDS, VOCAB_SIZE, save_checkpoint, save_tokenizer

CLOSE = {"rtol": 0, "atol": 5e-5}
SIZES = {**tiny.SIZES, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}

# fmt: off
RECURRENT = {**tiny.GROUPED, "head_dim": 16}
LATENT = {
    "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}
OF_GLM = {"post_norm": "shared_head.norm"}
OF_QWEN = {
    "eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
    "post_norm": "norm",
}
CONFIGS = {
    "GLM-4": (transformers.Glm4Config(**SIZES, head_dim=16), "model.layers.2.", OF_GLM),
    "GLM-4.5": (transformers.Glm4MoeConfig(
        **SIZES, **EXPERTS, head_dim=16, n_routed_experts=4, first_k_dense_replace=1,
        use_qk_norm=True), "model.layers.2.", OF_GLM),
    "DeepSeek-V3": (transformers.DeepseekV3Config(
        **SIZES | EXPERTS | LATENT, n_routed_experts=4, first_k_dense_replace=1),
        "model.layers.2.", OF_GLM),
    "Qwen3-Next": (transformers.Qwen3NextConfig(
        **SIZES, **EXPERTS, **RECURRENT, num_experts=4,
        shared_expert_intermediate_size=32), "mtp.", OF_QWEN),
    "Qwen3.5": (transformers.Qwen3_5TextConfig(**SIZES, **RECURRENT), "mtp.", OF_QWEN),
    "Mellum": (transformers.MellumConfig(
        **SIZES, **EXPERTS, head_dim=16, num_experts=4, num_mtp_layers=1,
        sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "mtp.", OF_QWEN),
}
# fmt: on


def module_tensors(mtp, layout, names):
    tensors = {}
    for name, tensor in mtp.state_dict().items():
        if not name.startswith("layers.0."):
            continue
        plain = name.removeprefix("layers.0.").removeprefix("mtp_block.")
        first, _, rest = plain.partition(".")
        published = f"{names.get(first, first)}.{rest}"
        if layout == "mtp." and first not in names:
            published = f"layers.0.{published}"
        for part in published, f"{published}.weight":
            if match := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", part):
                for index, expert in enumerate(tensor):
                    prefix = f"{layout}{match[1]}.{index}"
                    if match[2] == "down":
                        tensors[f"{prefix}.down_proj.weight"] = expert.clone()
                    else:
                        gate, up = expert.chunk(2)
                        tensors[f"{prefix}.gate_proj.weight"] = gate.clone()
                        tensors[f"{prefix}.up_proj.weight"] = up.clone()
                break
        else:
            tensors[layout + published] = tensor.clone()
    return tensors


def with_module(name, folder):
    config, layout, names = CONFIGS[name]
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None) and config.model_type != "mellum":
        config.mtp_layer_types = ["full_attention"]
    save_checkpoint(folder, config, tokenizer=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    )
    oracle = MtpModel(model, 1).eval()
    oracle.set_attn_implementation("eager")
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in oracle.layers.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    tensors = module_tensors(oracle, layout, names)
    edit(folder, lambda own: own | tensors)
    return model, oracle


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp") / "target"
    model, oracle = with_module(request.param, folder)
    if model.config.model_type in ("glm4", "glm4_moe", "deepseek_v3"):
        target = Checkpoint.load(str(folder), torch.float32)
    else:  # a head can be read even where its target cannot be exported
        target = Checkpoint(str(folder), model, None, None, ())
    return str(folder), target, oracle


def test_a_module_computes_what_transformers_computes(case):
    folder, target, oracle = case
    head = load_head(folder, target, torch.float32)
    torch.manual_seed(6)
    tokens = torch.randint(VOCAB_SIZE, (1, ROWS))
    final, positions = torch.randn(1, ROWS, H), torch.arange(ROWS)[None]
    with torch.no_grad():
        hidden, carried = head(tokens, head.fuse([final]), positions)
        wanted = oracle.forward_layer(
            0, final, positions, MtpCache(config=oracle.config), input_ids=tokens
        )
        logits = oracle._project_to_logits(wanted)
    torch.testing.assert_close(hidden, wanted, **CLOSE)
    torch.testing.assert_close(head.lm_head(hidden), logits, **CLOSE)
    assert torch.equal(carried, hidden)


def check_training(target, folder):
    head = load_head(target.source, target, torch.float32)
    task = EagleTask(EagleSettings(kind="mtp"))
    pupil = task.new_drafter(SimpleNamespace(target=target))
    task_run = SimpleNamespace(target=target, module=SimpleNamespace(drafter=pupil))
    layouts.write(folder, *task.contents(task_run, task.weights(task_run), None))
    again = load_head(str(folder), target, torch.float32)
    assert again.config == head.config
    wanted = head.state_dict()
    for found in (pupil.state_dict(), again.state_dict()):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_training_begins_with_the_module(case, tmp_path):
    check_training(case[1], tmp_path / "head")


def mimo(folder):
    torch.manual_seed(7)
    config, layout = MTP["mimo"]
    save_checkpoint(folder, config, tokenizer=False)
    tensors = layout()
    edit(folder, lambda own: own | tensors)
    weights = reference.under(tensors, "model.mtp_layers.0.")
    return Checkpoint.load(str(folder), torch.float32), weights


def test_a_training_of_mimo_keeps_its_order(tmp_path):
    check_training(mimo(tmp_path / "target")[0], tmp_path / "head")


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_lends_its_layer_or_is_refused_in_a_line(name, tmp_path):
    save_checkpoint(tmp_path, HYBRIDS[name](), tokenizer=False)
    run = SimpleNamespace(target=Checkpoint.load(str(tmp_path), torch.float32))
    task, layers = EagleTask(EagleSettings(kind="mtp")), run.target.model.model.layers
    if name in ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"):
        with pytest.raises(UnsupportedModelError, match="MTP layer"):
            task.new_drafter(run)
        return
    own = task.new_drafter(run).first_layer.state_dict()
    [attends] = [w for each in layers if (w := each.state_dict()).keys() == own.keys()]
    assert all(torch.equal(attends[name], own[name]) for name in own)


@pytest.mark.parametrize("name", ["GLM-4", ""])
def test_a_hub_id_is_exported_with_the_module_in_its_files(name, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cache = tmp_path / "models--tiny--target"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("1")
    folder, none = cache / "snapshots" / "1", Recipe("none")
    with_module("GLM-4", folder)
    if not name:
        edit(folder, lambda own: {n: t for n, t in own.items() if "layers.2." not in n})
    save_tokenizer(folder)
    options = ExportOptions(none, none, capacity=64, max_width=8, fast=True)
    bundle = export("tiny/target", tmp_path / "bundle", options=options)
    assert (bundle.drafter is not None) == bool(name)
    with jetdraft.load(bundle.path, threads=1) as model:
        methods = "auto", *model.methods[1:]
        assert ("eagle" in methods) == bool(name)
        drafts = [{"method": method, "num_draft_tokens": 3} for method in methods]
        drafted = same_text(model, drafts, [{}], token_ids=[5, 6, 7], max_new_tokens=30)
        for method, result in zip(methods, drafted, strict=True):
            assert method != "eagle" or result.stats.drafted_tokens > 20


def edit(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_mimo_joins_the_state_before_the_embedding(tmp_path):
    """The one published order that is another."""
    target, w = mimo(tmp_path)
    head = load_head(str(tmp_path), target, torch.float32)
    tokens, f = torch.randint(VOCAB_SIZE, (ROWS,)), torch.randn(ROWS, H)
    embedded = target.model.get_input_embeddings().weight.detach()[tokens]
    eps = target.model.config.rms_norm_eps
    parts = [
        reference.rms(f, w["hidden_layernorm.weight"], eps),
        reference.rms(embedded, w["token_layernorm.weight"], eps),
    ]
    g = F.linear(torch.cat(parts, -1), w["input_proj.weight"])
    y = reference.layer(w, g, 10000.0, 16, eps)
    wanted = reference.rms(y, w["final_layernorm.weight"], eps)
    with torch.no_grad():
        hidden, _ = head(tokens[None], f[None], torch.arange(ROWS)[None])
    torch.testing.assert_close(hidden[0], wanted, **CLOSE)


def test_two_modules_are_refused(tmp_path):
    """Each would need a cache of its own."""
    target, _ = mimo(tmp_path)

    def double(own):
        copies = {n.replace("layers.0", "layers.1"): t.clone() for n, t in own.items()}
        return own | copies

    edit(tmp_path, double)
    with pytest.raises(CheckpointError, match="has 2 MTP modules"):
        load_head(str(tmp_path), target, torch.float32)


def test_mimo_with_its_own_config(tmp_path):
    plain = mimo(tmp_path)[0].model
    own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    own |= {"auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}}
    edit_json(tmp_path / "config.json", **own, num_nextn_predict_layers=1)
    (tmp_path / "modeling_mimo.py").write_text("raise SystemExit")
    target = Checkpoint.load(str(tmp_path), torch.float32)
    assert target.model.config.rope_parameters == plain.config.rope_parameters
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, target.model.get_parameter(name))
    assert load_head(str(tmp_path), target, torch.float32).config.hidden_first


@pytest.mark.parametrize("name", ["final_layernorm.weight", "mlp.up_proj.weight"])
def test_a_missing_part_of_a_module_has_its_name_in_the_file(tmp_path, name):
    target, _ = mimo(tmp_path)
    missing = f"model.mtp_layers.0.{name}"
    edit(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n != missing})
    with pytest.raises(CheckpointError, match=f"lacks weight '{missing}'"):
        load_head(str(tmp_path), target, torch.float32)
