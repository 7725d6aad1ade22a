import json
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers
from transformers import GraniteMoeHybridConfig, LlamaConfig

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.model_reader import check_exportable
from jetdraft.checkpoints.refusals import check_kinds, check_unread
from jetdraft.errors import CheckpointError, UnsupportedModelError, reason_of
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe
from tests import cases, edit_json
from tests.checkpoints.heads import layouts
from tests.tiny import SIZES, llama_config, save_checkpoint

QUICK = ExportOptions(Recipe("none"), capacity=64, max_width=32, fast=True)
EXPERTS = "has experts of a family that was not compared with transformers"
RECURRENT = "has recurrent layers"
INDEXED = "attends to the keys that an indexer selects (index_topk 2048)"
SHARED = "has layers that share keys and values"
V2, V3 = transformers.DeepseekV2Config, transformers.DeepseekV3Config
CASES = {
    "dbrx": (transformers.DbrxConfig(), [f"{EXPERTS} (moe_num_experts 4)"]),
    "deepseek_v32": (transformers.DeepseekV32Config(), [f"/model {INDEXED}"]),
    "mamba": (transformers.MambaConfig(), [RECURRENT]),
    "mamba2": (transformers.Mamba2Config(), [RECURRENT]),
    "falcon_mamba": (transformers.FalconMambaConfig(), [RECURRENT]),
    "jamba": (transformers.JambaConfig(), [f"/model {RECURRENT}"]),
    "llama4": (transformers.Llama4Config(), ["/model scales queries by positions"]),
    "ernie, images": (transformers.Ernie4_5_VLMoeConfig(), ["more than text"]),
    "recurrent_gemma": (transformers.RecurrentGemmaConfig(), [RECURRENT]),
    "gemma3n_text": (
        transformers.Gemma3nTextConfig(attn_logit_softcapping=50.0),
        ["has attn_logit_softcapping 50.0, which transformers ignores", "gemma3n_text"],
    ),
    "llama": (LlamaConfig(query_pre_attn_scalar=20), ["query_pre_attn_scalar 20"]),
    "llama, biases": (LlamaConfig(alibi=True), ["has alibi True, which"]),
    "llama, norms": (LlamaConfig(use_qk_norm=True), ["has use_qk_norm True, which"]),
    "llama, a half": (LlamaConfig(partial_rotary_factor=0.5), ["partial_rotary_fac"]),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig(routed_scaling_factor=2.5),
        ["has routed_scaling_factor 2.5, which transformers ignores", "qwen3_moe"],
    ),
    "deepseek_v2": (V2(norm_topk_prob=True), ["has norm_topk_prob True, which"]),
    "deepseek_v3": (V3(scoring_func="softmax"), ["has scoring_func softmax, which"]),
    "aya_vision": (transformers.AyaVisionConfig(), ["'aya_vision'", "more than text"]),
    "clip": (transformers.CLIPConfig(), ["is a 'clip' model", "language model"]),
}
SHARD = "model-00002-of-00002.safetensors"
SENTENCE = "The checkpoint has model type `nonsense`, which is not known"


def test_a_config_with_fewer_layers_than_its_weights(tmp_path):
    folder = save_checkpoint(tmp_path / "c", llama_config(num_hidden_layers=3))
    edit_json(folder / "config.json", layer_types=..., num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"layers\.2\..*describes 2 such layers"):
        Checkpoint.load(str(folder), torch.float32)


STACKS = "encoder.block.3.w decoder.block.1.w"


@cases(
    "read, unread, said",
    ("model.layers.1.w", "model.layers.2.eh_proj.weight model.layers.2.w", ""),
    ("model.layers.1.w", "mtp.layers.0.w model.mtp_layers.0.w mtp.fc", ""),
    ("h.1.w", "h.0.attn.bias h.1.attn.bias lm_head.weight", ""),
    (STACKS, "encoder.block.3.mask encoder.block.3.rotary_emb.inv_freq", ""),
    (
        STACKS,
        "decoder.block.2.w encoder.block.3.mask",
        r"decoder\.block\.2\.w, .* 2 such",
    ),
    ("layers.1.w", "layers.2.eh_proj.weight layers.2.w layers.3.w", r"layers\.3\.w"),
    ("layers.0.q.weight", "layers.0.q.bias", r"layers\.0\.q\.bias, .*no such bias"),
    ("h.0.w", "h.0.attn.bias h.0.q_norm.weight", r"q_norm\.weight, .*no such weight"),
    ("h.0.w", "h.0.gate.e_score_correction_bias", "no such e_score_correction_bias"),
)
def test_what_is_left_unread(read, unread, said):
    with pytest.raises(CheckpointError, match=said) if said else nullcontext():
        check_unread("folder", read.split(), unread.split())


def refusal(folder, output) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        export(str(folder), output)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    assert not output.exists()
    return message


@pytest.mark.parametrize("case", CASES)
def test_a_kind_is_refused_by_its_name_before_a_weight_is_read(tmp_path, case):
    config, said = CASES[case]
    config.save_pretrained(tmp_path / "model")  # no weight is there to be read
    message = refusal(tmp_path / "model", tmp_path / "bundle")
    assert all(part in message for part in said), message


def test_what_is_refused_is_said_with_the_way_on(tmp_path):
    transformers.JambaConfig().save_pretrained(tmp_path / "m")
    assert refusal(tmp_path / "m", tmp_path / "bundle") == (
        f"{tmp_path / 'm'} has recurrent layers (layer_types linear_attention), which "
        "jetdraft does not export yet; see docs/models.md"
    )


def test_fields_of_parts_that_a_model_lacks_refuse_nothing(tmp_path):
    config = llama_config(num_local_experts=0, kv_lora_rank=None)
    config.save_pretrained(tmp_path / "llama")
    check_exportable(str(tmp_path / "llama"))
    config = GraniteMoeHybridConfig(
        **{**SIZES, "num_hidden_layers": 1},
        num_local_experts=0,
        layer_types=["attention"],
        shared_intermediate_size=96,
    )
    folder = save_checkpoint(tmp_path / "granite", config)
    export(str(folder), tmp_path / "bundle", options=QUICK)


@cases(
    "fields",
    {"num_experts": 1},
    {"num_experts": 16_384, "is_moe": False},
    {"num_experts": [1, "two", None]},
)
def test_one_expert_is_no_mixture(fields):
    check_kinds("doge/", fields.get)
    with pytest.raises(UnsupportedModelError, match="has experts of a family"):
        check_kinds("doge/", {"num_experts": 2, "is_moe": True}.get)


def test_attention_of_its_own_is_said(tmp_path):
    config = transformers.BloomConfig(**{**SIZES, "num_hidden_layers": 1})
    save_checkpoint(tmp_path / "model", config)
    with pytest.raises(UnsupportedModelError, match=r"own, .*; see docs/models\.md"):
        export(str(tmp_path / "model"), tmp_path / "bundle")


def test_a_checkpoint_without_a_tokenizer_is_told(tmp_path):
    config = llama_config(num_hidden_layers=1)
    folder = save_checkpoint(tmp_path / "model", config, tokenizer=False)
    with pytest.warns(UserWarning, match="has no tokenizer, so the bundle takes"):
        export(str(folder), tmp_path / "bundle", options=QUICK)


@pytest.fixture(params=["head", "target"])
def load(request):
    target = partial(Checkpoint.load, dtype=torch.float32)
    return {"head": HeadFiles.read, "target": target}[request.param]


@pytest.fixture
def folder(tmp_path):
    layouts.write(tmp_path, *layouts.eagle3(), "shards of model.safetensors")
    return tmp_path


@cases("place", "../other/x.safetensors", "/etc/x", "a/../../x", "..\\x", "C:\\x")
def test_a_shard_outside_the_folder(folder, load, place):
    """An index of strangers must not choose which files are read."""
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["fc.weight"] = place
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside the folder"):
        load(str(folder))


def test_a_missing_shard(folder, load):
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard {SHARD}, which its"):
        load(str(folder))


def test_an_index_of_a_format_that_was_not_fetched(folder):
    """Many repositories have their weights twice."""
    index = {"weight_map": {"fc.weight": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "fc.weight" in HeadFiles.read(str(folder)).tensors


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_an_index_that_is_none(folder, load, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json cannot be read"):
        load(str(folder))


@cases(
    "message, line",
    ("one\ntwo", "one"),
    ("wrong:\n  two\nthree", "wrong: two"),
    (f"{SENTENCE}. It is new", f"{SENTENCE}. It is new"),
    (f"{SENTENCE}. {'This could be. ' * 20}", SENTENCE),
    ("", "ValueError"),
)
def test_of_a_long_line_the_first_sentence_is_left(message: str, line: str) -> None:
    assert reason_of(ValueError(message)) == line
