import os
import pickle
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

import jetdraft
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_reader import check_head, load_head
from jetdraft.errors import CheckpointError
from tests import same_text
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import FF, VD, H, write
from tests.tiny import VOCAB_SIZE, exported, llama_config, save_checkpoint

EAGLE1, EAGLE3, SPECULATORS = layouts.eagle1, layouts.eagle3, layouts.speculators
MEDUSA, HYDRA, DIFFUSION = layouts.medusa, layouts.hydra, layouts.diffusion
DFLASH, SPECULATED = layouts.dflash, layouts.speculators_dflash
CHIMERA, FALCON, GLIDE, KANGAROO = (
    partial(layouts.one_layer, kind)
    for kind in ("chimera", "falcon", "glide", "kangaroo")
)
NAN, INTEGERS = torch.full((FF, H), torch.nan), torch.ones(FF, H).int()
UP, QUERY = "midlayer.mlp.up_proj.weight", "midlayer.self_attn.q_proj.weight"
MLA = "midlayer.self_attn.kv_a_proj_with_mqa"
TAPS = "eagle_aux_hidden_state_layer_ids"
IDS = torch.arange(VD)
LONELY = {"model_type": "llama"}, {"model.layers.0.mlp.up_proj.weight": torch.ones(1)}
ANY = "fetch|check|give|needs"

# fmt: off
KEYS = [
    (EAGLE3, {"residual_scale": 2.0}, "residual_scale=2.0"),
    (EAGLE3, {"sliding_window": 64}, "sliding_window=64"),
    (EAGLE3, {"layer_types": ["sliding_attention"]},
     r"layer_types=\['sliding_attention'\]"),
    (EAGLE3, {"eagle_config": {"parallel_draft_step": 2}}, "parallel_draft_step"),
    (EAGLE3, {"eagle_config": {"use_aux_hidden_state": False}},
     "use_aux_hidden_state=False"),
    (SPECULATORS, {"transformer_layer_config": layouts.layer_config(logit_scale=0.5)},
     "logit_scale=0.5"),
    (SPECULATORS, {"mask_token_id": 3}, "mask_token_id=3"),
    (SPECULATORS, {"speculators_model_type": "peagle"}, "'peagle'"),
    (SPECULATORS, {"speculators_model_type": "mtp"},
     "reads eagle3, dflash, dspark; an MTP module is read from the folder"),
    (MEDUSA, {"medusa_choices": 3}, "medusa_choices=3"),
    (HYDRA, {"hydra_head_arch": "prefix-mlp"}, "hydra_head_arch='prefix-mlp'"),
    (DFLASH, {"is_causal": False}, "is_causal=False"),
    (DFLASH, {"input_embedding_scale": 8.0}, "input_embedding_scale=8.0"),
    (DFLASH, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    (DFLASH, {"dflash_config": {"mask_token_id": 3, "shift": 1}}, "has shift=1, which"),
    (DFLASH, {"architectures": ["DFlash2DraftModel"]}, "has DFlash2's convolutions"),
    (DFLASH, {"architectures": ["DominoDraftModel"]}, "has Domino's recurrent layer"),
    (SPECULATORS, {"speculators_model_type": "dflash2"}, "is a 'dflash2' drafter"),
    (SPECULATED, {"projector_type": "domino"}, "projector_type='domino'"),
    (layouts.dspark, {"markov_head_type": "rnn"}, "markov_head_type='rnn', which"),
    (DIFFUSION, {"noise": "uniform"}, "noise='uniform'"),
    *((make, {"gate": 1}, "has gate=1, which jetdraft does not know")
      for make in (CHIMERA, GLIDE, KANGAROO)),
    (FALCON, {"lstm_layers": 3}, "lstm_layers=3, which jetdraft does not know"),
    *((make, fields, f"the config of .* has {words}")
      for make in (EAGLE1, EAGLE3)
      for fields, words in (
          ({"rope_theta": -1}, "rope_theta=-1"),
          ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0"),
          ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor=-2"),
          ({"rms_norm_eps": "NaN"}, "rms_norm_eps='NaN'"),
          ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05"),
          ({"hidden_act": "swoosh"}, "hidden_act='swoosh'; it needs an"),
      )),
    *((make, {"vocab_size": 9999}, "vocabulary of 9999 tokens")
      for make in (EAGLE3, DFLASH, DIFFUSION, CHIMERA, FALCON, GLIDE, KANGAROO)),
    *((make, {"hidden_size": 96}, "states of 96 numbers")
      for make in (EAGLE3, DFLASH, CHIMERA, FALCON, GLIDE, KANGAROO)),
    *((make, {"num_attention_heads": 7}, "no q_proj of 7 heads")
      for make in (CHIMERA, FALCON)),
    (GLIDE, {"num_attention_heads": 8}, "8 heads of 8 numbers, but .* keeps 2 of 16"),
    (EAGLE3, {"target_hidden_size": 8}, "states of 8 numbers"),
    (EAGLE3, {"hidden_size": None}, "hidden_size=None"),
    (EAGLE3, {"hidden_size": 32, "target_hidden_size": H},
     r"no embed_tokens.weight|reads 192|lacks|is \["),
    (EAGLE3, {TAPS: [2, 18, 33]}, r"\[2, 18, 33\], but its 7 layers"),
    (EAGLE3, {"draft_vocab_size": 50}, "does not map 50 rows"),
    (EAGLE3, {"intermediate_size": 128},
     r"mlp.down_proj.weight of .* is \[64, 96\].* need \[64, 128\]"),
    (DFLASH, {"num_target_layers": 36}, "target of 36 layers, .* has 7"),
    (partial(DFLASH, outputs=(1, 2, 7)), {}, r"reads the target at \[1, 2, 7\]"),
    (SPECULATED, {"aux_hidden_state_layer_ids": None}, "reads the target at None"),
    (DFLASH, {"dflash_config": {"target_layer_ids": [1, 2, 4]}},
     "mask_token_id=None, .* embeds the tokens 0 to 287"),
    (DFLASH, {"dflash_config": {"mask_token_id": 288, "target_layer_ids": [1, 2, 4]}},
     "mask_token_id=288"),
    (DFLASH, {"block_size": 1}, "block_size=1; .* 2 to 64"),
    (DFLASH, {"block_size": "6"}, "block_size='6'"),
    (FALCON, {"block_size": 1}, "blocks of 2 to 8"),
    (FALCON, {"block_size": "two"}, "block_size='two'"),
    (KANGAROO, {"exit_layer": 7}, "below layer 7, but .* has 7 layers"),
    (KANGAROO, {"exit_layer": None}, "exit_layer=None; it needs a whole number"),
    *((partial(make, layers=2), {}, "has 2 layers, and jetdraft reads .* of one;")
      for make in (CHIMERA, FALCON, GLIDE, KANGAROO)),
    (partial(CHIMERA, qk_norm=True), {}, "not a Chimera drafter with one Llama layer"),
    (EAGLE3, {"rms_norm_eps": [1]}, ANY), (EAGLE1, {"rms_norm_eps": "small"}, ANY),
    (EAGLE3, {"hidden_act": "no such thing"}, ANY), (EAGLE3, {"eagle_config": 5}, ANY),
    (EAGLE3, {"hidden_act": ["silu"]}, ANY), (EAGLE3, {TAPS: ["2", 3, 4]}, ANY),
    (EAGLE3, {TAPS: 7}, ANY), (EAGLE1, {"rope_theta": "fast"}, ANY),
    (EAGLE3, {"rope_scaling": {"type": "spiral"}}, ANY),
    (EAGLE3, {"layer_types": 5}, ANY), (EAGLE3, {"intermediate_size": 2**50}, ANY),
    (SPECULATORS, {"transformer_layer_config": 5}, ANY),
    (EAGLE3, {"architectures": 5}, ANY),
    (EAGLE3, {"\x1b[2J": 1}, ANY), (EAGLE3, {"residual_scale": "\u202e"}, ANY),
]
TENSORS = [
    # Tensors have the names of the file, not of the module that they become.
    (EAGLE3, {"fc.weight": torch.zeros(H, H)},
     f"the fc of .* reads {H} numbers, but 3 states of this target have {3 * H}"),
    (EAGLE1, {"fc.weight": torch.zeros(H, 3 * H)}, f"reads {3 * H} numbers"),
    (DFLASH, {"fc.weight": torch.zeros(64, 128)},
     "fc of .* reads 128 numbers, .* have 192"),
    *((make, {"fc.weight": None}, "has no fc.weight") for make in (EAGLE3, DFLASH)),
    *((make, {name: None}, f"lacks weight '{name}'") for make, name in (
        (EAGLE3, "midlayer.self_attn.k_proj.weight"), (EAGLE3, "norm.weight"),
        (EAGLE3, UP), (partial(EAGLE3, prefix="model.midlayer."), f"model.{UP}"),
        (DFLASH, "hidden_norm.weight"), (DIFFUSION, "mask"), (KANGAROO, "norm.weight"),
        (MEDUSA, "1.0.linear.bias"), (HYDRA, "hydra_mlp.1.0.res_connection.weight"))),
    *((make, {name: torch.zeros(4)}, f"unknown weight '{name}'") for make, name in (
        (EAGLE3, "midlayer.self_attn.q_proj.bias"),
        (DFLASH, "markov_head.markov_w1.weight"))),
    (EAGLE3, {QUERY: None, f"{MLA}.weight": torch.ones(1)}, "latent attention"),
    (EAGLE3, {UP: NAN}, f"{UP} of .* has a NaN"),
    (EAGLE3, {UP: INTEGERS}, f"{UP} of .* is int32"),
    (MEDUSA, {"2.1.weight": torch.ones(5, H)}, r"2.1.weight of .* is \[5, 64\]"),
    (MEDUSA, {"0.0.linear.bias": torch.full((H,), torch.inf)},
     "0.0.linear.bias of .* an infinite"),
    (MEDUSA, dict.fromkeys(["1.0.linear.weight", "1.0.linear.bias", "1.1.weight"]),
     "has the heads 0, 2, which"),
    (EAGLE3, {"t2d": None, "d2t": torch.full((VD,), VOCAB_SIZE)},
     "does not map 100 rows to different ids below 288"),
    (EAGLE3, {"t2d": None, "d2t": -IDS - 1}, "does not map 100 rows"),
    (EAGLE3, {"t2d": None, "d2t": IDS + 188}, "does not map 100 rows"),
    (EAGLE3, {"d2t": IDS * 0, "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)},
     "the map was never set"),
    (EAGLE3, {"d2t": None}, "has no d2t"),
    (lambda: LONELY, {},
     "holds no head that jetdraft knows; it reads heads of EAGLE-1"),
    (EAGLE3, {"model.layers.x.y": torch.zeros(2)}, ANY),
    (EAGLE3, {f"layers.{'9' * 5000}.y": torch.zeros(2)}, ANY),
    (EAGLE3, {QUERY: torch.tensor(1)}, ANY), (EAGLE3, {"d2t": torch.tensor(1)}, ANY),
    (EAGLE3, {"fc.weight": torch.tensor(1.0)}, ANY),
    (EAGLE3, {"t2d": torch.tensor(True)}, ANY),
    (MEDUSA, {"0.999999999.linear.weight": torch.zeros(H)}, ANY),
    (HYDRA, {"hydra_mlp.0.999999999.linear.weight": torch.zeros(H)}, ANY),
    (EAGLE3, {"\x1b[2J": torch.zeros(2)}, ANY),
    (MEDUSA, {"\x1b[2J": torch.zeros(2)}, "where Medusa has heads"),
]
# fmt: on
TABLE = re.compile(r"(embed_tokens|lm_head|hydra_lm_head\.\d|\d\.1)\.weight|t2d")


def refusal(target, source) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_head(str(source), target, torch.float32)
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize(("make", "fields", "words"), KEYS)
def test_a_config_that_is_refused(target, tmp_path, make, fields, words):
    config, tensors = make()
    assert re.search(words, refusal(target, write(tmp_path, config | fields, tensors)))


@pytest.mark.parametrize(("make", "changes", "words"), TENSORS)
def test_tensors_that_are_refused(target, tmp_path, make, changes, words):
    config, tensors = make()
    changed = {n: t for n, t in (tensors | changes).items() if t is not None}
    assert re.search(words, refusal(target, write(tmp_path, config, changed)))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": 1e999}', '{"a": "\\ud800"}'])
def test_a_config_beyond_the_limits(target, tmp_path, text):
    write(tmp_path, *layouts.eagle3())
    (tmp_path / "config.json").write_text(text)
    assert "no readable config.json" in refusal(target, tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipes_are_not_waited_for(target, tmp_path, name):
    write(tmp_path, *layouts.eagle3())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert "is a pipe or a device" in refusal(target, tmp_path)


def test_files_that_are_no_files_of_tensors(target, tmp_path):
    config, tensors = layouts.eagle3()
    assert "no head at" in refusal(target, tmp_path / "nothing here" / "x" / "y")
    source = write(tmp_path / "code", config, {})
    (tmp_path / "code" / "model.safetensors").unlink()
    assert "no weights" in refusal(target, source)

    class Code:
        def __reduce__(self):
            return (print, ("code ran",))

    (tmp_path / "code" / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))
    message = refusal(target, source)
    assert "damaged" in message or "code" in message
    torch.save({"a": Code()}, tmp_path / "code" / "pytorch_model.bin")
    assert "holds code" in refusal(target, source)
    (tmp_path / "code" / "config.json").write_text("[]")
    assert "is no object" in refusal(target, source)
    (tmp_path / "code" / "config.json").write_text("{")
    assert "no readable config.json" in refusal(target, source)
    source = write(tmp_path / "cut", config, tensors)
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "damaged" in refusal(target, source)


def test_a_whole_model_is_no_head(target, tmp_path):
    assert "has no MTP module" in refusal(target, target.source)
    save_checkpoint(tmp_path, llama_config(), tokenizer=False)
    message = refusal(target, tmp_path)
    assert "is a whole model, not a head; give it as --drafter" in message


def test_most_is_said_without_the_target(tmp_path):
    """A target may take a minute to load."""
    for source in ("/no/such/head", write(tmp_path / "a", {}, {"x": torch.ones(1)})):
        with pytest.raises(CheckpointError, match="no head"):
            check_head(HeadFiles.read(source), "target")
    for make in (layouts.eagle3, layouts.medusa, layouts.hydra):
        files = HeadFiles.read(write(tmp_path / "d", *make()))
        check_head(files, "target")
        with pytest.raises(CheckpointError, match="has odd=3"):
            check_head(replace(files, config=files.config | {"odd": 3}), "target")
    files = HeadFiles.read(write(tmp_path / "d", *layouts.eagle3()))
    with pytest.raises(CheckpointError, match="rope_theta=-1"):
        check_head(replace(files, config=files.config | {"rope_theta": -1}), "target")


def repadded(config, tensors, rows):
    layer = "transformer_layer_config"
    if layer in config:
        config = config | {layer: config[layer] | {"vocab_size": rows}}
    elif "vocab_size" in config:  # Medusa's and Hydra's have none
        config = config | {"vocab_size": rows}
    own = {}
    for name, tensor in tensors.items():
        if TABLE.fullmatch(name) and len(tensor) == VOCAB_SIZE:
            spare = torch.zeros(64, *tensor.shape[1:]).to(tensor.dtype)
            spare = spare if name == "t2d" else torch.randn(spare.shape)
            own[name] = torch.cat([tensor, spare])[:rows].clone()
        else:
            own[name] = tensor
    return config, own


def whole_head(**changes):
    config, tensors = layouts.eagle3(**changes)
    config.pop("draft_vocab_size")
    kept = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}
    return config, kept | {"lm_head.weight": layouts.rand(VOCAB_SIZE, layouts.H)}


NAMES = ("eagle1", "eagle3", "speculators", "medusa", "hydra", "dflash", "diffusion")
LAYOUTS = {
    **{name: getattr(layouts, name) for name in NAMES},
    **{"eagle3, whole LM head": whole_head},
    **{"dflash, mapped": layouts.speculators_dflash},
}


def made(layout, rows):
    torch.manual_seed(3)
    config, tensors = LAYOUTS[layout]()
    if "d2t" in tensors:  # to tokens that all of them have
        tensors |= layouts.map_of(torch.arange(layouts.VD) * 2)
    return repadded(config, tensors, rows)


def lm_heads(head):
    modules = head.lm_heads if hasattr(head, "lm_heads") else [head.lm_head]
    ids = range(VOCAB_SIZE) if head.ids is None else head.ids.tolist()
    for module in modules:
        assert len(module.weight) == len(ids)
        yield dict(zip(ids, module.weight, strict=True))


@pytest.mark.parametrize("rows", [VOCAB_SIZE - 8, VOCAB_SIZE + 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_another_padding_says_the_same(target, tmp_path, layout, rows):
    heads = [
        load_head(write(tmp_path / str(n), *made(layout, n)), target, torch.float32)
        for n in (VOCAB_SIZE, rows)
    ]
    known = min(rows, VOCAB_SIZE)
    for one, other in zip(*map(lm_heads, heads), strict=True):
        lends = layout in ("eagle1", "dflash")  # the target's own LM head
        wanted = set(one) if lends else {i for i in one if i < known}
        assert wanted == set(other)
        assert all(torch.equal(one[i], other[i]) for i in wanted)
    if hasattr(heads[0], "embed_tokens"):
        one, other = (head.embed_tokens.weight for head in heads)
        assert one.shape == other.shape
        assert torch.equal(one[:known], other[:known])


def test_a_map_to_tokens_that_the_target_lacks_loses_them(target, tmp_path):
    config, tensors = repadded(*layouts.eagle3(), VOCAB_SIZE + 32)
    ids = torch.arange(layouts.VD) + torch.arange(layouts.VD) * 2 + 20
    tensors |= layouts.map_of(ids, VOCAB_SIZE + 32)
    head = load_head(write(tmp_path / "head", config, tensors), target, torch.float32)
    known = ids < VOCAB_SIZE
    assert 0 < known.sum() < layouts.VD
    assert torch.equal(head.ids, ids[known])
    assert torch.equal(head.lm_head.weight, tensors["lm_head.weight"][known])


@pytest.mark.parametrize("rows", [VOCAB_SIZE - 8, VOCAB_SIZE, VOCAB_SIZE + 32])
def test_the_targets_own_matrices_are_not_kept_twice(target, tmp_path, rows):
    """Publishers copy the target's embedding into the head, with their padding."""
    config, tensors = layouts.eagle1()
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach()
    tensors["lm_head.weight"] = target.model.get_output_embeddings().weight.detach()
    source = write(tmp_path / "head", *repadded(config, tensors, rows))
    head = load_head(source, target, torch.float32)
    assert head.embed_tokens is target.model.get_input_embeddings()
    assert head.lm_head is target.model.get_output_embeddings()
    assert head.ids is None


def test_its_drafts_change_no_text(tmp_path):
    config = llama_config(num_hidden_layers=1, tie_word_embeddings=False)
    checkpoint = save_checkpoint(tmp_path / "target", config)
    rows, method = VOCAB_SIZE - 8, "medusa"
    head = write(tmp_path / "head", *made(method, rows))
    bundle = exported(checkpoint, tmp_path / "bundle", head=head)
    ids = bundle.draft_vocabulary()
    assert ids is not None
    assert ids.max() < rows
    prompt, drafts = [5, VOCAB_SIZE - 1, 9, 40], [{"method": method}]
    drafts[0]["num_draft_tokens"] = 3
    with jetdraft.load(bundle.path, threads=1) as model:
        for drafted in same_text(model, drafts, token_ids=prompt, logprobs=3):
            assert drafted.stats.drafted_tokens > 10
