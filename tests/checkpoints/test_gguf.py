import json
import re
from collections import Counter
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import quants
from onnx import numpy_helper
from tokenizers import Tokenizer

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.gguf_tokenizer import end_token_ids, make_tokenizer_json
from jetdraft.errors import CheckpointError, UnsupportedModelError
from jetdraft.native import GATED, MULTIPLY
from jetdraft.quant.algorithms import quantize
from jetdraft.quant.grids import GRIDS, GridMatrix
from jetdraft.recipe import KERNELS, Recipe
from tests import cases, tiny
from tests.ggufs import adding, one, random_bytes, write_gguf
from tests.native.operators import gathered
from tests.programs import assert_refused, succeed
from tests.programs import jetdraft as command
from tests.tiny import tokenizer
from tools.recipes.__main__ import main as recipes

IDS = list(range(5, 29))
Q = "model.layers.0.self_attn.q_proj.weight"
SMALL_BUFFERS = ("--capacity", 64, "--max-width", 32)


def mixed(name):
    if "down_proj" in name:
        return Type.F16
    return Type.Q6_K if "v_proj" in name else Type.Q4_K


ONE_LAYER = {**tiny.SIZES, "num_hidden_layers": 1}
WIDE = transformers.LlamaConfig(
    **{**ONE_LAYER, "hidden_size": 256, "intermediate_size": 256},
    tie_word_embeddings=True,
)
GEMMA = transformers.Gemma3TextConfig(
    **ONE_LAYER, head_dim=32, sliding_window=8, query_pre_attn_scalar=32
)
QWEN2 = transformers.Qwen2Config(**ONE_LAYER)
QWEN3 = transformers.Qwen3Config(**ONE_LAYER, head_dim=32)
SMALL = tiny.llama_config(num_hidden_layers=1)
CASES = {
    "llama Q4_0": ("llama", tiny.llama_config(num_hidden_layers=2), one(Type.Q4_0)),
    "llama mixed": ("llama", WIDE, mixed),
    "llama Q3_K": ("llama", WIDE, one(Type.Q3_K)),
    "llama Q5_K": ("llama", WIDE, one(Type.Q5_K)),
    "qwen2 Q5_0": ("qwen2", QWEN2, one(Type.Q5_0)),
    "qwen3 Q4_1": ("qwen3", QWEN3, one(Type.Q4_1)),
    "gemma3 Q8_0": ("gemma3", GEMMA, one(Type.Q8_0)),
    "lfm2 Q4_0": ("lfm2", tiny.HYBRIDS["lfm2"](), one(Type.Q4_0)),
}

MIXTURES = {
    "qwen3moe": (tiny.MIXTURES["qwen3_moe"], Type.Q5_0),
    "qwen3moe of halves": (tiny.MIXTURES["qwen3_moe"], Type.F16),
    "qwen2moe": (tiny.MIXTURES["qwen2_moe"], Type.Q8_0),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_keep_their_types(name, tmp_path):
    make, kind = MIXTURES[name]
    config = make()
    config.moe_intermediate_size, config.mlp_only_layers = 32, []
    if name == "qwen2moe":
        config.shared_expert_intermediate_size = 96
    config.norm_topk_prob = family_norms = name.startswith("qwen3")
    file, family = tmp_path / "model.gguf", name.partition(" ")[0]
    expected = logits_of(write_gguf(file, config, one(kind), family).model)
    found = Checkpoint.load(str(file), torch.float32, keeps_grids=True)
    assert found.model.config.norm_topk_prob == family_norms
    logits = logits_of(found.model)
    assert (logits - expected).std() < 0.002 * expected.std()
    tiny.exported(file, tmp_path / "bundle", "q8_0", max_width=32)
    logits = tiny.bundle_logits(tmp_path / "bundle", IDS)
    # Routers see rounded rows.
    assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.99
    graph = onnx.load(tmp_path / "bundle" / "target.onnx", load_external_data=False)
    nodes = [node for node in graph.graph.node if node.op_type == "MatMulExperts"]
    types = [GRIDS[a.i] for n in nodes for a in n.attribute if a.name == "format"]
    assert set(types) == {"Q8_0" if kind == Type.F16 else kind.name}
    how = {"kernel": "onnxruntime", "recipe": "int8"}
    tiny.refused(jetdraft.JetdraftError, "types hold experts", file, **how)


# Recurrent states are computed by jetdraft's operators only.
PAIRS = [(c, k) for k in KERNELS for c in CASES if k == KERNELS[0] or "lfm2" not in c]


@pytest.fixture(scope="module", params=PAIRS)
def case(request, tmp_path_factory):
    name, kernel = request.param
    family, config, kinds = CASES[name]
    folder = tmp_path_factory.mktemp("gguf")
    written = write_gguf(folder / "model.gguf", config, kinds, family)
    tiny.exported(written.path, folder / "bundle", max_width=32, kernel=kernel)
    return written, folder / "bundle"


def logits_of(model):
    return tiny.eager_logits(model, IDS)


def test_the_model_and_the_bundle_are_what_was_written(case):
    written, bundle = case
    expected = logits_of(written.model)
    found = logits_of(Checkpoint.load(str(written.path), torch.float32).model)
    exact = not {kind.name[-1] for kind in written.types.values()} & {"1", "K"}
    assert (found - expected).std() < (0.002 if exact else 0.06) * expected.std()
    found = tiny.bundle_logits(bundle, IDS)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.999
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.8


def test_all_integers_are_in_the_bundle(case):
    written, bundle = case
    tied = written.model.config.tie_word_embeddings
    kept = {n: d for n, d in written.data.items() if tied or "embed_tokens" not in n}
    graph = onnx.load(bundle / "target.onnx").graph
    constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    kinds = "MatMulNBits", MULTIPLY, GATED
    products = [node for node in graph.node if node.op_type in kinds]
    stored = [row.tobytes() for node in products for row in columns(node, constants)]
    packed = products[0].op_type == MULTIPLY
    for name, data in kept.items():
        expected = quants.dequantize(data, written.types[name])
        if not packed:
            matrix = grid_matrix(written.types[name], data)
            int8 = quantize(matrix.floats, Recipe("int8", 32), None)
            expected = (matrix.exact_blocks() or int8).packed
        assert {row.tobytes() for row in expected} <= {*stored}, name
    assert len(stored) == sum(map(len, kept.values()))


def test_products_add_biases_and_gate_what_they_read(case):
    written, bundle = case
    graph = onnx.load(bundle / "target.onnx", load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    config, own = written.model.config, "MatMulNBits" not in kinds
    gates = own and any(
        n.endswith(("down_proj.weight", "w2.weight")) for n in written.types
    )
    assert kinds[GATED] == (config.num_hidden_layers if gates else 0)
    assert bool(kinds["Sigmoid"] + kinds["Gelu"]) != gates
    read = [n.input[3] for n in graph.node if n.op_type == MULTIPLY and n.input[3:]]
    assert len(read) == (own and config.model_type == "qwen2")  # of merged q, k, v


def columns(node, constants):
    """The integers of a product's columns; the numbers where they keep their type."""
    arrays = [constants[name] for name in node.input[1:3]]
    if node.op_type == "MatMulNBits":
        return arrays[0]
    fields = {a.name: a.i for a in node.attribute if a.type == a.INT}
    return gathered(np.arange(fields["N"]), arrays, **fields)


def test_rows_of_llama_are_turned_back(tmp_path):
    """Without it q of llama would have the rows of another head's halves."""
    written = write_gguf(tmp_path / "model.gguf", SMALL, one(Type.Q4_0))
    packed = Checkpoint.load(str(written.path), torch.float32).packed
    expected = grid_matrix(Type.Q4_0, written.data[Q]).exact_blocks()
    np.testing.assert_array_equal(packed.blocks[Q].packed, expected.packed)


def tied_with_a_head(file, noise):
    """A tied model whose file has a head too: its embedding, and noise."""

    def change(writer):
        [embedding] = [t for part in writer.tensors for t in part.items()][:1]
        stored = quants.dequantize(embedding[1].tensor, Type.Q4_0)
        spread = np.random.default_rng(0).standard_normal(stored.shape) * stored.std()
        head = quants.quantize((stored + noise * spread).astype("f4"), Type.Q8_0)
        writer.add_tensor("output.weight", head, raw_dtype=Type.Q8_0)

    write_gguf(file, SMALL, one(Type.Q4_0), change=change)
    return Checkpoint.load(str(file), torch.float32)


def test_two_copies_of_a_tied_matrix_become_the_finer_one(tmp_path):
    found = tied_with_a_head(tmp_path / "model.gguf", 0.02)
    assert found.model.config.tie_word_embeddings
    assert found.packed.forms[found.lm_head_name] == "Q8_0 exact"
    embedding = found.model.get_input_embeddings().weight
    assert embedding is found.model.get_output_embeddings().weight
    blocks = found.packed.blocks[found.lm_head_name]
    np.testing.assert_allclose(blocks.floats.T, embedding.float().numpy(), atol=1e-3)


def test_a_head_of_its_own_stays_one(tmp_path):
    found = tied_with_a_head(tmp_path / "model.gguf", 0.5)
    assert not found.model.config.tie_word_embeddings
    assert found.packed.forms["lm_head.weight"] == "Q8_0 exact"
    assert found.packed.forms["model.embed_tokens.weight"] == "Q4_0 exact"


def test_a_file_of_floats_is_a_checkpoint_of_floats_and_gets_a_recipe(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", SMALL, one(Type.F16)).path
    found = Checkpoint.load(str(file), torch.float32)
    assert found.packed is None
    assert found.model.get_parameter(Q).dtype == torch.float16
    result = succeed("export", file, "-o", tmp_path / "bundle", *SMALL_BUFFERS)
    assert re.search(r"^target: q\d\S+, KL 0\.", result.stderr, re.MULTILINE)


@cases(
    "kernel, form, rest",
    ("jetdraft", "exact", "q8_0"),
    ("onnxruntime", "as int8", "int8-rtn-b32"),
)
def test_the_export_says_what_was_kept(tmp_path, kernel, form, rest):
    file, bundle = tmp_path / "model.gguf", tmp_path / "bundle"
    write_gguf(file, CASES["llama mixed"][1], mixed)
    result = succeed("export", file, "-o", bundle, *SMALL_BUFFERS, "--kernel", kernel)
    kept = f"7 matrices kept (6 Q4_K {form}, 1 Q6_K exact)"
    assert f"target: {kept}, 1 requantized to {rest}\n" in result.stderr
    assert kept in command("check", bundle, "--no-run").stdout


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def rotations(factors):
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors)


def factors_of(config):
    scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"]
    scaled, _ = scale(config, torch.device("cpu"))
    return (500000.0 ** -(np.arange(0, 64, 2) / 64) / scaled.numpy()).astype(np.float32)


def test_llama_3_scales_its_rotations(tmp_path):
    sizes = {"head_dim": 64, "num_hidden_layers": 1, "max_position_embeddings": 131072}
    config = tiny.llama_config(**sizes, rope_parameters=LLAMA3)
    factors = factors_of(config)
    assert factors.max() == 32
    assert factors.min() == pytest.approx(1)
    file = tmp_path / "model.gguf"
    written = write_gguf(file, config, change=rotations(factors))
    found = Checkpoint.load(str(file), torch.float32).model
    assert found.config.rope_parameters == LLAMA3
    ids = torch.arange(20)[None] + 5
    for model in (found, written.model):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        options = {"position_ids": torch.arange(3000, 3020)[None], "use_cache": False}
        logits = [m(ids, **options).logits.numpy() for m in (found, written.model)]
    assert np.abs(logits[0] - logits[1]).max() < 0.02
    write_gguf(file, config, change=rotations(factors[::-1].copy()))
    with pytest.raises(UnsupportedModelError, match="in another way than Llama 3"):
        Checkpoint.load(str(file), torch.float32)


def scaling(**fields):
    return {f"scaling.{name}": value for name, value in fields.items()}


LONG = scaling(type="yarn", factor=4.0)
ORIGINAL = LONG | scaling(original_context_length=128)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
STRONGER = YARN | {"attention_factor": 2 * (1 + 0.1 * np.log(4))}
YARN_BOUNDS = YARN | {"beta_slow": 0.05}
LINEAR, DEFAULT = {"rope_type": "linear"}, {"rope_type": "default"}
SCALINGS = {
    "linear": (scaling(type="linear", factor=4.0), LINEAR),
    "no type": (scaling(factor=4.0), LINEAR),
    "old name": ({"scale_linear": 4.0}, LINEAR),
    "yarn": (ORIGINAL, YARN),
    "yarn, length of texts": (LONG, YARN | {"original_max_position_embeddings": 512}),
    "yarn, stronger": (ORIGINAL | scaling(attn_factor=2.0), STRONGER),
    "yarn, bounds": (ORIGINAL | scaling(yarn_beta_slow=0.05), YARN_BOUNDS),
    "none": (scaling(type="none", factor=4.0), DEFAULT),
    "a factor of nothing": (scaling(factor=0.0), DEFAULT),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rotations_are_scaled_as_llama_cpp_scales_them(tmp_path, name):
    stored, meant = SCALINGS[name]
    change = adding({f"llama.rope.{key}": value for key, value in stored.items()})
    rope = {"rope_theta": 10000.0, "factor": 4.0, **meant}
    config = tiny.llama_config(num_hidden_layers=1, rope_parameters=rope)
    written = write_gguf(tmp_path / "model.gguf", config, one(Type.F32), change=change)
    found = Checkpoint.load(str(written.path), torch.float32).model
    np.testing.assert_allclose(logits_of(found), logits_of(written.model), atol=1e-4)


def test_an_unknown_scaling_is_refused(tmp_path):
    change = adding({"llama.rope.scaling.type": "longrope"})
    file = write_gguf(tmp_path / "model.gguf", SMALL, change=change).path
    with pytest.raises(UnsupportedModelError, match="by 'longrope'"):
        Checkpoint.load(str(file), torch.float32)


def grid_matrix(kind, data):
    return GridMatrix(kind.name, data, quants.dequantize(data, kind).shape[1])


@pytest.mark.parametrize("name", GRIDS)
def test_types_without_minima_are_blocks_exactly(name):
    data = random_bytes(Type[name], (6, 512), seed=1)
    blocks = GridMatrix(name, data, 500).exact_blocks()
    if name not in ("Q4_0", "Q5_0", "Q8_0", "Q6_K", "Q3_K"):
        assert blocks is None
        return
    expected = quants.dequantize(data, Type[name])[:, :500]
    np.testing.assert_array_equal(blocks.floats.T, expected)


def assert_no_bundle(folder, *arguments, said):
    before = sorted(folder.iterdir())
    assert_refused(command("export", *arguments, "-o", folder / "bundle"), *said)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.97, 0.9999])
def test_a_file_that_is_cut_off(tmp_path, share):
    file = write_gguf(tmp_path / "model.gguf", SMALL).path
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    assert_no_bundle(tmp_path, file, said=["is cut off", "fetch it again"])


@cases(
    "data, said",
    (b"", "is empty; fetch it again"),
    (b"def f(x):\n", "is not a GGUF file, it begins with b'def '"),
    (b"PK\x03\x04" + bytes(999), "give a GGUF file, or the folder of a checkpoint"),
)
def test_a_file_that_never_was_one(tmp_path, data, said):
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    assert_no_bundle(tmp_path, file, said=[said])


def add_a_weight(writer):
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))


def with_field(name, value):
    return {"change": lambda w: setattr(w.kv_data[0][name], "value", value)}


def of(family, name=None):
    def change(writer):
        with_field("general.architecture", family)["change"](writer)
        adding({f"{family}.{name}": 4} if name else {})(writer)

    return {"change": change}


def repeat_a_token(writer):
    tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
    tokens.append(tokens[20])
    writer.kv_data[0]["tokenizer.ggml.token_type"].value.append(1)


@cases(
    "changes, said",
    (of("rwkv6"), "is a 'rwkv6' model"),
    (with_field("tokenizer.ggml.merges", ["x yz"]), "the tokenizer of"),
    (with_field("tokenizer.ggml.model", "bert"), "a tokenizer of the kind 'bert'"),
    (with_field("tokenizer.ggml.token_type", [1, 1]), "2 types of tokens"),
    (with_field("llama.block_count", 10**6), "for 1000000 layers"),
    ({"change": repeat_a_token}, "the same token twice"),
    ({"rule": "klingon"}, "by the rule 'klingon'"),
    ({"change": add_a_weight}, "the weight 'blk.0.attn_q.bias'"),
    ({"kinds": lambda n: None if n == Q else Type.Q8_0}, "lacks the weights"),
    ({"change": adding({"split.count": 3})}, "one of 3 parts"),
    (of("llama", "expert_count"), "has experts of a family"),
    (of("deepseek2", "attention.kv_lora_rank"), "latent attention"),
    (of("rwkv6", "wkv.head_size"), "has recurrent layers (wkv"),
    (of("falcon-h1", "ssm.state_size"), "export its Hugging Face folder"),
    (of("gemma3n", "attention.shared_kv_layers"), "share keys and val"),
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, changes, said):
    file = write_gguf(tmp_path / "model.gguf", SMALL, **changes).path
    assert_no_bundle(tmp_path, file, said=[said])


def test_weights_that_are_not_finite(tmp_path):
    written = write_gguf(tmp_path / "model.gguf", SMALL, one(Type.Q8_0))
    data = bytearray(written.path.read_bytes())
    place = data.index(written.data["model.layers.0.mlp.up_proj.weight"].tobytes())
    data[place : place + 2] = np.array([np.inf], "<f2").tobytes()
    written.path.write_bytes(data)
    assert_no_bundle(tmp_path, written.path, said=["not finite"])


def test_paths_that_are_no_file(tmp_path):
    said = ["no checkpoint at", "a GGUF file"]
    assert_no_bundle(tmp_path, tmp_path / "model.gguf", said=said)
    assert_no_bundle(tmp_path, "org/model.gguf", said=said)
    file = write_gguf(tmp_path / "model.gguf", SMALL).path
    assert_no_bundle(tmp_path, tmp_path, said=[f"give the file {file}"])


def test_a_drafter_with_another_tokenizer(tmp_path):
    target = write_gguf(tmp_path / "target.gguf", SMALL).path
    words = ("while", "yield", "lambda", "class", "async", "await", "raise")
    drafter = write_gguf(tmp_path / "drafter.gguf", SMALL, words=words).path
    said = ["has another tokenizer than"]
    assert_no_bundle(tmp_path, target, "--drafter", drafter, said=said)
    # A folder with the same tokenizer in another form is no other tokenizer.
    folder = tiny.save_checkpoint(tmp_path / "folder", tiny.drafter_config())
    fields = json.loads((folder / "tokenizer.json").read_text())
    fields["pre_tokenizer"]["trim_offsets"] = False
    fields["model"]["merges"] = [" ".join(m) for m in fields["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    options = ["--drafter", folder, "--fast", "--capacity", 64, "--max-width", 32]
    succeed("export", target, *options, "-o", tmp_path / "bundle")


def test_a_device_takes_a_file_and_verbs_that_need_a_folder_say_so(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", SMALL).path
    assert_refused(command(file, command=recipes), "is quantized already")
    options = ["--device", "orin-nx-16gb", "--capacity", 64, "--max-width", 32]
    succeed("export", file, *options, "-o", tmp_path / "bundle")
    entry = jetdraft.load(tmp_path / "bundle").bundle.target
    assert "Q8_0 exact), 0 " in entry.scheme, "its types are kept"
    text = tmp_path / "text.txt"
    text.write_text("def f(): pass\n" * 200)
    arguments = ["train", "stream", file, "--data", text, "-o", tmp_path / "out"]
    assert_refused(command(*arguments), "streams are trained for a folder")


def test_a_type_that_gguf_cannot_read(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "model.gguf", SMALL, one(Type.F16)).path

    refuse = Mock(side_effect=NotImplementedError)
    monkeypatch.setattr("jetdraft.checkpoints.gguf.dequantize", refuse)
    with pytest.raises(CheckpointError, match="of the type F16"):
        Checkpoint.load(str(file), torch.float32)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXT = "def self.in(x):\n\treturn 1234 für 日本  \n"


def named(**fields):
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def fields_of(tokens, kind=NORMAL, merges=(), **more):
    types = [NORMAL] * 6 + [kind] * len(tokens)
    fields = {"tokens": [*"ab</s>", *tokens], "token_type": types} | more
    return named(model="gpt2", merges=list(merges), **{"pre": "gpt-2"} | fields)


def built(fields):
    return Tokenizer.from_str(make_tokenizer_json("file", fields.get))


@cases("rule", "gpt-2", "default", "qwen2", "smollm", "llama-bpe", "tekken", "gpt-4o")
def test_texts_come_back(tmp_path, rule):
    written = write_gguf(tmp_path / "model.gguf", SMALL, rule=rule)
    found = Checkpoint.load(str(written.path), torch.float32)
    made = Tokenizer.from_str(found.tokenizer)
    ids = made.encode(TEXT + tiny.END_OF_TEXT).ids
    assert made.decode(ids, skip_special_tokens=False) == TEXT + tiny.END_OF_TEXT
    assert made.decode(ids) == TEXT, "the end of text is a special token"
    assert ids.count(0) == 1
    assert ids[-1] == 0
    assert found.eos_token_ids == (0,)
    if rule == "gpt-2":
        assert made.encode(TEXT).ids == tokenizer().encode(TEXT).ids


@cases(
    "rule, begin, first",
    ("gpt-2", None, False),
    ("gpt-2", True, True),
    ("llama-bpe", None, True),
    ("llama-bpe", False, False),
)
def test_a_text_begins_as_the_file_says(tmp_path, rule, begin, first):
    file = write_gguf(tmp_path / "model.gguf", SMALL, rule=rule, begin=begin).path
    made = Tokenizer.from_str(Checkpoint.load(str(file), torch.float32).tokenizer)
    assert (made.encode("x").ids[0] == 0) == first


@cases(
    "rule, merges, pieces",
    # The merge of two digits is used by the rules that leave numbers whole.
    ("gpt-2", ["1 2"], ["12", "3"]),
    ("smollm", ["1 2"], ["1", "2", "3"]),
    ("llama-bpe", ["1 2"], ["12", "3"]),
    ("qwen2", ["1 2"], ["1", "2", "3"]),
    # Llama 3 knows words that are tokens; other rules build them by merges only.
    ("llama-bpe", [], ["ab"]),
    ("gpt-2", [], ["a", "b"]),
)
def test_numbers_and_words_are_split_by_the_rule(rule, merges, pieces):
    text = "".join(pieces)
    fields = named(model="gpt2", pre=rule, tokens=[*text, text[:2]], merges=merges)
    assert built(fields).encode(text).tokens == pieces


def test_sentencepiece_merges_the_best_pair_first():
    pieces = {
        **{"<unk>": (0.0, UNKNOWN), "<s>": (0.0, CONTROL), "</s>": (0.0, CONTROL)},
        **{"<0xC3>": (0.0, BYTE), "<0xBC>": (0.0, BYTE), "▁": (-9.0, NORMAL)},
        **dict.fromkeys("abc", (-5.0, NORMAL)),
        **{"bc": (-1.0, NORMAL), "ab": (-2.0, NORMAL), "▁a": (-3.0, NORMAL)},
    }
    scores, types = zip(*pieces.values(), strict=True)
    fields = named(model="llama", tokens=list(pieces), bos_token_id=1)
    fields |= named(scores=scores, token_type=types)
    made = built(fields)
    assert made.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert made.encode("ü</s>").tokens == ["<s>", "▁", "<0xC3>", "<0xBC>", "</s>"]
    assert made.decode(made.encode("abc ü").ids) == "abc ü"
    fields |= named(add_space_prefix=False)
    assert built(fields).encode("abc").tokens == ["<s>", "a", "bc"]


def test_templates_and_the_ends_of_a_turn(tmp_path):
    template, file = "{% for m in messages %}{% endfor %}", tmp_path / "model.gguf"
    tools = {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    both = "{% if tools is not none %}{{ tools }}{% else %}" + template + "{% endif %}"
    for fields, expected in (({}, template), (tools, both)):
        change = adding(fields | {"tokenizer.ggml.eot_token_id": 7})
        write_gguf(file, SMALL, template=template, change=change)
        found = Checkpoint.load(str(file), torch.float32)
        assert found.chat_template == expected
        assert found.eos_token_ids == (0, 7)


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "</s>", "<|fim_pad|>"])
def test_an_end_by_its_name_is_one_whatever_its_type(end, kind):
    """As in llama.cpp, which calls such types a bug of the model."""
    field = fields_of(["<x>", end], kind, eos_token_id=0)
    assert end_token_ids(field.get) == [0, 7]
    made = built(field)
    assert made.encode(f"a{end}b").ids == [0, 7, 1]
    assert made.decode([0, 7, 1]) == "ab", "ends are not shown"
    assert (made.decode([6], skip_special_tokens=True) == "<x>") == (kind != CONTROL)


def test_marks_of_infilling_are_control_tokens():
    tokens = ["<|fim_prefix|>", "<PRE>", "<|file_sep|>"]
    field = fields_of(tokens, USER_DEFINED)
    assert built(field).decode([6, 7, 8]) == "<PRE>"
    assert end_token_ids(field.get) == [8]
    chosen = fields_of(tokens, USER_DEFINED, fim_sep_token_id=0, fim_pre_token_id=0)
    assert end_token_ids(chosen.get) == [0]


def test_a_token_that_merges_build_is_no_end():
    """Qwen's </s> is a tag of HTML."""
    merges = ["< /", "</ s", "</s >"]
    field = fields_of(["</", "</s", "</s>", "<|im_end|>"], merges=merges)
    assert end_token_ids(field.get) == [9]
    assert built(field).decode([8]) == "</s>"


def test_an_end_inside_of_a_turn_is_shown():
    """OpenAI's harmony: <|end|> ends a message of several, <|return|> the turn."""
    field = fields_of(["<|end|>", "<|return|>", "<|call|>"], CONTROL)
    assert end_token_ids(field.get) == [7, 8]
    assert built(field).decode([6, 7]) == "<|end|>"
    assert end_token_ids(fields_of(["<|end|>", "<|return|>"], CONTROL).get) == [6, 7]


def test_a_file_may_ask_for_an_end_behind_each_text():
    field = fields_of(["<s>"], CONTROL, bos_token_id=6, eos_token_id=0)
    asks = (True, True, [6, 1, 0]), (False, True, [1, 0]), (None, False, [1])
    for begins, ends, expected in asks:
        field["tokenizer.ggml.add_bos_token"] = begins
        field["tokenizer.ggml.add_eos_token"] = ends
        assert built(field).encode("b").ids == expected


def test_sentencepiece_has_ids_where_the_file_has_none():
    tokens = ["<unk>", "<s>", "<end>", "▁", "a"]
    field = named(model="llama", tokens=tokens, scores=[0.0] * 5)
    field |= named(token_type=[UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL])
    assert built(field).encode("a").ids[0] == 1
    assert end_token_ids(field.get) == [2]


def test_tokens_of_phi_3_take_the_spaces_behind_them():
    field = fields_of(["<|user|>", "<|endoftext|>"], CONTROL)
    for name, taken in (("Phi 3 Mini", False), ("Phi-3 Mini", True)):
        field["general.name"] = name
        found = built(field).encode("<|user|> a<|endoftext|>").offsets[0]
        assert found == ((0, 9) if taken else (0, 8))
