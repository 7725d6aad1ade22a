import itertools
import json
import shutil
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import transformers
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from onnx import numpy_helper
from safetensors.torch import load_file, save_file

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import CheckpointError, OptionError, UnsupportedModelError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.step import Step, buffer_sizes
from jetdraft.export.tracer import trace
from jetdraft.quant.choice import Limit
from jetdraft.recipe import Recipe
from tests import cases
from tests.tiny import (
    SIZES,
    bundle_logits,
    eager_logits,
    exported,
    llama_config,
    save_checkpoint,
)

GROUP, IDS = 32, list(range(20))
quick = partial(ExportOptions, Recipe("none"), capacity=64, max_width=32, fast=True)
Q = "model.layers.0.self_attn.q_proj"
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each place of a word holds."""


def words(values, bits, order=None):
    """Along the last axis, several to an int32, the first in the lowest bits."""
    each, rows = 32 // bits, values.reshape(-1, values.shape[-1])
    found = np.zeros((len(rows), values.shape[-1] // each), np.uint32)
    for row, line in enumerate(rows):
        for place in range(values.shape[-1]):
            word, inside = divmod(place, each)
            column = word * each + (order[inside] if order else inside)
            found[row, word] |= np.uint32(line[column]) << np.uint32(bits * inside)
    return torch.from_numpy(found.view(np.int32))


def gptq(integers, scales, zeros, bits):
    return {
        "qweight": words(integers.T.copy().T, bits).T.contiguous(),
        "qzeros": words((zeros.T - 1) & ((1 << bits) - 1), bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.arange(integers.shape[1], dtype=torch.int32) // GROUP,
    }


def gptq_v2(integers, scales, zeros, bits):
    parts = gptq(integers, scales, zeros, bits)
    return {**parts, "qzeros": words(zeros.T.copy(), bits)}


def awq(integers, scales, zeros, bits):
    return {
        "qweight": words(integers.T.copy(), bits, AWQ),
        "qzeros": words(zeros.T.copy(), bits, AWQ),
        "scales": torch.from_numpy(scales.T.copy()),
    }


def compressed(integers, scales, zeros, bits):
    signed = integers.astype(np.float32) - zeros.repeat(GROUP, 1)
    floats = torch.from_numpy(signed * scales.astype(np.float32).repeat(GROUP, 1))
    arguments = QuantizationArgs(
        num_bits=bits, symmetric=False, strategy="group", group_size=GROUP
    )
    offset = 1 << (bits - 1)
    parts = {
        "weight": floats,
        "weight_scale": torch.from_numpy(scales.astype(np.float32)),
        "weight_zero_point": torch.from_numpy((zeros - offset).astype(np.int8)),
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    return PackedQuantizationCompressor.compress(parts, scheme)


def of(method, bits, **more):
    return {"quant_method": method, "bits": bits, "group_size": GROUP, **more}


def of_compressed(bits):
    groups = {"group_0": {"weights": {"num_bits": bits}}}
    return {"quant_method": "compressed-tensors", "bits": bits, "config_groups": groups}


FORMATS = {
    "gptq": (gptq, of("gptq", 4)),
    "gptq 8": (gptq, of("gptq", 8)),
    "gptq_v2": (gptq_v2, of("gptq", 4, checkpoint_format="gptq_v2")),
    "awq": (awq, of("awq", 4, version="gemm")),
    "compressed 4": (compressed, of_compressed(4)),
    "compressed 8": (compressed, of_compressed(8)),
}


def random(shape, bits, symmetric=False, seed=0):
    numbers = np.random.default_rng(seed)
    columns, rows = shape
    integers = numbers.integers(0, 1 << bits, shape, dtype=np.uint8)
    scales = numbers.uniform(0.5, 1.5, (columns, rows // GROUP)) / (1 << bits)
    near = (1 << bits) // 2
    zeros = numbers.integers(near - 2, near + 3, scales.shape).astype(np.uint8)
    if symmetric:
        zeros[:] = near
    return integers, scales.astype(np.float16), zeros


def settle(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config.get("quantization_config", {}) | settings
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(folder, tensors, **settings):
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    settle(folder, **settings)


def quantize(folder, pack, settings, symmetric=False):
    tensors, found = load_file(folder / "model.safetensors"), {}
    for seed, key in enumerate([key for key in tensors if "_proj" in key]):
        shape, name = tuple(tensors.pop(key).shape), key.removesuffix(".weight")
        found[name] = random(shape, settings["bits"], symmetric, seed)
        parts = pack(*found[name], settings["bits"])
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    rewrite(folder, tensors, **settings)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return save_checkpoint(folder, llama_config(num_hidden_layers=1))


@pytest.fixture
def base(plain, tmp_path):
    return shutil.copytree(plain, tmp_path / "base")


@pytest.mark.parametrize("name", FORMATS)
def test_the_integers_are_read_as_they_were_packed(base, name):
    pack, settings = FORMATS[name]
    expected = quantize(base, pack, settings)
    found = Checkpoint.load(str(base), torch.float32).packed
    assert found.method == settings["quant_method"]
    assert set(found.blocks) == {f"{layer}.weight" for layer in expected}
    for layer, (integers, scales, zeros) in expected.items():
        blocks = found.blocks[f"{layer}.weight"]
        assert (blocks.bits, blocks.block_size) == (settings["bits"], GROUP)
        assert blocks.order is None
        np.testing.assert_array_equal(blocks.integers.reshape(integers.shape), integers)
        np.testing.assert_array_equal(blocks.scales, scales.astype(np.float32))
        np.testing.assert_array_equal(blocks.zeros, zeros)


def packed_matrices(bundle):
    graph = onnx.load(bundle / "target.onnx").graph
    constants = {each.name: each for each in graph.initializer}
    return [
        [numpy_helper.to_array(constants[name]) for name in node.input[1:]]
        for node in [node for node in graph.node if node.op_type == "MatMulNBits"]
    ]


@pytest.fixture(
    scope="module",
    # Of each method and bit width only the integers count; one checkpoint mixes layers.
    params=[("gptq", 2), ("awq", 1), ("compressed 8", 1)],
    ids=lambda param: param[0],
)
def packed_bundle(request, tmp_path_factory):
    name, layers = request.param
    folder = tmp_path_factory.mktemp("packed")
    source = save_checkpoint(folder / "source", llama_config(num_hidden_layers=layers))
    numbers = quantize(source, *FORMATS[name])
    export(str(source), folder / "bundle", options=quick())
    return source, numbers, FORMATS[name][1]["bits"], folder / "bundle"


def test_they_go_straight_into_the_graph(packed_bundle):
    _, expected, bits, bundle = packed_bundle
    products = packed_matrices(bundle)
    layers = [f"model.layers.{i}" for i in range(len(expected) // 7)]
    together = [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]]
    together += [["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"]]
    together += [["mlp.down_proj"]]
    joined = [[f"{layer}.{n}" for n in names] for layer in layers for names in together]
    assert len(products) == len(joined)
    for (packed, scales, zeros), names in zip(products, joined, strict=True):
        parts = zip(*(expected[name] for name in names), strict=True)
        integers, wanted, offsets = (np.concatenate(part) for part in parts)
        whole = words(integers, bits).numpy().view(np.uint8)
        np.testing.assert_array_equal(packed.reshape(whole.shape), whole)
        np.testing.assert_array_equal(scales, wanted.astype(np.float32))
        found = np.stack([(zeros >> s) & ((1 << bits) - 1) for s in range(0, 8, bits)])
        found = found.transpose(1, 2, 0).reshape(len(zeros), -1)
        np.testing.assert_array_equal(found[:, : offsets.shape[1]], offsets)


def logits_of(source):
    return eager_logits(Checkpoint.load(str(source), torch.float32).model, IDS)


def test_a_packed_model_computes_what_its_integers_stand_for(packed_bundle):
    source, _, _, bundle = packed_bundle
    logits = bundle_logits(bundle, IDS)
    alike = np.corrcoef(logits.ravel(), logits_of(source).ravel())[0, 1]
    assert alike > 0.99, "but for int8 activations"


def shuffled(seed):
    """As GPTQ packs with desc_act: the most important inputs are in one group."""

    def pack(integers, scales, zeros, bits):
        order = np.random.default_rng(seed()).permutation(integers.shape[1])
        order = np.sort(order.reshape(-1, GROUP)).ravel()
        placed = np.zeros_like(integers)
        placed[:, order] = integers
        parts = gptq(placed, scales, zeros, bits)
        groups = torch.zeros_like(parts["g_idx"])
        groups[torch.from_numpy(order)] = parts["g_idx"]
        return {**parts, "g_idx": groups}

    return pack


@cases(
    "flavour, seed, products",
    ("contrib", lambda: 3, 4),
    ("contrib", itertools.count().__next__, 7),
    # It merges no products, so one order would be no other case.
    ("standard", itertools.count().__next__, 7),
)
def test_inputs_in_another_order(base, flavour, seed, products):
    settings = {**FORMATS["gptq"][1], "desc_act": True}
    ints, scales, zeros = quantize(base, shuffled(seed), settings, symmetric=True)[Q]
    model = Checkpoint.load(str(base), torch.float32).model
    groups = load_file(base / "model.safetensors")[f"{Q}.g_idx"].numpy()
    expected = np.zeros(ints.shape, np.float32)
    for place, row in enumerate(np.argsort(groups, kind="stable")):
        scale, zero = scales[:, place // GROUP], zeros[:, place // GROUP]
        expected[:, row] = (ints[:, place].astype(np.float32) - zero) * scale
    found = model.get_submodule(Q).weight.detach().float().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-2)
    export(str(base), base.parent / "bundle", options=quick(flavour=flavour))
    if flavour == "contrib":
        assert len(packed_matrices(base.parent / "bundle")) == products
    logits = bundle_logits(base.parent / "bundle", IDS)
    assert np.corrcoef(logits.ravel(), logits_of(base).ravel())[0, 1] > 0.99


def test_symmetric_ones_have_no_zeros_and_a_standard_graph(base, tmp_path):
    quantize(base, *FORMATS["gptq"], symmetric=True)
    blocks = Checkpoint.load(str(base), torch.float32).packed.blocks
    assert all(each.zeros is None for each in blocks.values())
    export(str(base), tmp_path / "standard", options=quick(flavour="standard"))
    logits = bundle_logits(tmp_path / "standard", IDS)
    assert np.abs(logits - logits_of(base)).max() < 0.05 * np.abs(logits).max()


def test_a_standard_graph_has_no_zeros_and_a_limit_nothing_to_raise(base, tmp_path):
    quantize(base, *FORMATS["gptq"])
    (tmp_path / "text.txt").write_text("def f(self):\n    return self.x\n" * 30)
    limited = ExportOptions(calibration=tmp_path / "text.txt", limit=Limit(max_kl=1.0))
    standard = quick(flavour="standard")
    for options, said in (
        (standard, "has zero points"),
        (limited, "cannot get more bits"),
    ):
        with pytest.raises(OptionError, match=said):
            export(str(base), tmp_path / "bundle", options=options)
        assert not (tmp_path / "bundle").exists()


def test_a_scale_per_output_becomes_blocks_with_the_same_scale(base):
    tensors = load_file(base / "model.safetensors")
    weight = tensors[f"{Q}.weight"]
    largest = weight.abs().amax(1)
    signed = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors |= {f"{Q}.weight": signed, f"{Q}.SCB": largest}
    rewrite(base, tensors, quant_method="bitsandbytes", load_in_8bit=True)
    [blocks] = Checkpoint.load(str(base), torch.float32).packed.blocks.values()
    assert np.abs(blocks.floats.T - weight.numpy()).max() <= float(largest.max()) / 253
    bundle = base.parent / "bundle"
    export(str(base), bundle, options=quick())
    assert len(packed_matrices(bundle)) == 1, "k and v stay floats, so do not join q"


def test_a_last_group_may_be_shorter(base):
    quantize(base, *FORMATS["gptq"])
    name = "model.layers.0.mlp.down_proj"
    tensors = load_file(base / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith((".scales", ".qzeros")):
            tensors[key] = tensor[: 2 if "down" in key else 1].clone()
        elif key.endswith(".g_idx"):
            tensors[key] = None
    rewrite(base, tensors, group_size=64)
    found = Checkpoint.load(str(base), torch.float32).packed.blocks[f"{name}.weight"]
    scales = tensors[f"{name}.scales"].float().numpy().T
    assert found.block_size == 64
    np.testing.assert_array_equal(found.scales, scales)


def test_integers_of_one_byte_are_read_too(base):
    tensors, random = load_file(base / "model.safetensors"), np.random.default_rng(0)
    shape = tuple(tensors[f"{Q}.weight"].shape)
    signed = torch.from_numpy(random.integers(-128, 128, shape).astype(np.int8))
    scales = torch.from_numpy(random.uniform(0.01, 0.02, (64, 1)).astype(np.float32))
    zeros = torch.from_numpy(random.integers(-9, 9, (64, 1)).astype(np.int8))
    parts = {"weight": signed, "weight_scale": scales, "weight_zero_point": zeros}
    tensors |= {f"{Q}.{part}": tensor for part, tensor in parts.items()}
    rewrite(base, tensors, quant_method="compressed-tensors")
    [blocks] = Checkpoint.load(str(base), torch.float32).packed.blocks.values()
    expected = (signed.float() - zeros.float()) * scales
    np.testing.assert_allclose(blocks.floats.T, expected.numpy(), rtol=1e-6)


def test_names_that_the_model_has_not_are_refused(base):
    quantize(base, *FORMATS["gptq"])
    tensors = load_file(base / "model.safetensors")
    bias = {f"{Q}.bias": torch.zeros(len(tensors[f"{Q}.scales"][0]))}
    rewrite(base, tensors | bias)
    assert Checkpoint.load(str(base), torch.float32).packed, "AutoGPTQ's biases"
    rewrite(base, tensors | {name: zeros + 1 for name, zeros in bias.items()})
    with pytest.raises(CheckpointError, match="describes no such bias"):
        Checkpoint.load(str(base), torch.float32)
    rewrite(base, {name.removeprefix("model."): x for name, x in tensors.items()})
    with pytest.raises(CheckpointError, match="under names that its architecture"):
        Checkpoint.load(str(base), torch.float32)


def test_the_ends_of_text_are_those_of_the_generation_config(base):
    quantize(base, *FORMATS["gptq"])
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert Checkpoint.load(str(base), torch.float32).eos_token_ids == (0, 7)


@cases(
    "method, settings, change, error, reason",
    ("gptq", {"bits": 3}, {}, UnsupportedModelError, "has 3 bits"),
    ("gptq", {}, {"g_idx": lambda x: x.flip(0) * 2}, CheckpointError, "to a group"),
    ("gptq", {"quant_method": "quip"}, {}, UnsupportedModelError, "by quip"),
    ("gptq", {}, {"qzeros": lambda x: None}, CheckpointError, "not as gptq writes"),
    ("gptq", {}, {"scales": lambda x: x * torch.nan}, CheckpointError, "finite"),
    ("gptq", {}, {"scales": lambda x: x[:0]}, CheckpointError, "q_proj"),
    ("awq", {"version": "marlin"}, {}, UnsupportedModelError, "marlin kernels"),
    ("awq", {"bits": 8}, {}, UnsupportedModelError, "has 8 bits"),
    ("awq", {"bits": None}, {}, CheckpointError, "not as awq writes"),
    ("awq", {"version": None}, {}, CheckpointError, "not as awq writes"),
    ("gptq", {"group_size": 24}, {}, CheckpointError, "scales or zeros"),
)
def test_what_cannot_be_read_is_refused_by_name(
    base, method, settings, change, error, reason
):
    pack, usual = FORMATS[method]
    quantize(base, pack, usual)
    tensors = load_file(base / "model.safetensors")
    for part, changed in change.items():
        tensors[f"{Q}.{part}"] = changed(tensors[f"{Q}.{part}"])
    rewrite(base, tensors, **settings)
    with pytest.raises(error, match=reason):
        export(str(base), base.parent / "bundle")
    assert not (base.parent / "bundle").exists()


def test_four_bits_of_bitsandbytes_are_no_integers(base):
    quantize(base, *FORMATS["gptq"])
    tensors = load_file(base / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if "_proj" not in k}
    kept[f"{Q}.weight"] = torch.zeros(2048, 1, dtype=torch.uint8)
    kept[f"{Q}.weight.absmax"] = torch.zeros(64)
    rewrite(base, kept, quant_method="bitsandbytes")
    with pytest.raises(UnsupportedModelError, match="nf4"):
        Checkpoint.load(str(base), torch.float32)


@pytest.fixture
def half(tmp_path):
    folder = save_checkpoint(tmp_path / "half", llama_config(num_hidden_layers=1))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.half().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("large", [0, 1 << 28])
def test_halves_are_computed_with_in_single_precision(half, large, monkeypatch):
    monkeypatch.setattr("jetdraft.checkpoints.parameters.LARGE_TABLE", large)
    model = Checkpoint.load(str(half), torch.float32).model
    whole = transformers.AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    assert np.array_equal(eager_logits(model, IDS), eager_logits(whole, IDS))
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_they_are_halves_again_when_a_pass_fails(half):
    model = Checkpoint.load(str(half), torch.float32).model
    with pytest.raises(IndexError):
        model(torch.tensor([[1 << 20]]))
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert np.isfinite(eager_logits(model, IDS)).all()


def test_what_a_model_computes_for_itself_is_not_rounded(tmp_path):
    """Gemma multiplies its embeddings with the root of their size."""
    config = transformers.Gemma3TextConfig(**{**SIZES, "hidden_size": 72}, head_dim=16)
    folder = save_checkpoint(tmp_path / "gemma", config, tokenizer=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.bfloat16().save_pretrained(folder)
    found = Checkpoint.load(str(folder), torch.float32).model
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = eager_logits(own, IDS)
    assert np.array_equal(eager_logits(found, IDS), expected)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    rounded = eager_logits(rounded.float(), IDS)
    assert not np.array_equal(rounded, expected), "it would matter"


def test_a_traced_graph_holds_no_copy_of_a_matrix(half):
    checkpoint = Checkpoint.load(str(half), torch.float32)
    shapes = buffer_sizes(checkpoint.model).kv_shapes
    # As the next test has it, which then needs no trace.
    contract = StepContract(288, 64, 32, "float32", shapes, spare_slots=1)
    graph = trace(Step(checkpoint.model, contract), checkpoint.weight_names()).graph
    matrices = [
        value.const_value
        for value in graph.initializers.values()
        if value.const_value is not None and len(value.const_value.shape) == 2
    ]
    assert len(matrices) == 1 + 7
    assert all(isinstance(each, ir.LazyTensor) for each in matrices)


def test_a_bundle_of_halves_is_that_of_the_same_numbers_in_single(half, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(half, dtype="float32")
    model.save_pretrained(tmp_path / "single")
    for name in ("half", "single"):
        exported(tmp_path / name, tmp_path / f"{name}-bundle", "int4", max_width=32)
    one, other = (
        np.fromfile(tmp_path / f"{name}-bundle" / "target.onnx.data", np.uint8)
        for name in ("half", "single")
    )
    np.testing.assert_array_equal(one, other)
