import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import jetdraft
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streams import StreamSettings
from jetdraft.errors import DataError, OptionError
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.export.measures import QUESTIONS, REPLY_TOKENS, sample_text
from jetdraft.native import DOMAIN, GATED, MULTIPLY
from jetdraft.quant.algorithms import quantize
from jetdraft.quant.choice import (
    DRAFTER_CHOICES,
    MIX_SHARE,
    Limit,
    Sensitivity,
    choose_drafter_recipe,
    choose_recipe,
)
from jetdraft.quant.divergence import Divergence, Windows, own_attention, second_moments
from jetdraft.recipe import HEAD, RUNGS, Recipe
from tests import cases, same_text, tiny
from tests.conftest import Pair
from tests.programs import assert_refused, succeed
from tests.programs import jetdraft as command
from tools.recipes.quality import compare

RECIPE, INT8 = Recipe("int4", 16), Recipe("int8", 16)
LAYER = [f"self_attn.{name}_proj" for name in "qkvo"]
LAYER += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
TEXT = "def f(self):\n    return self.x\n" * 60
ORT, OURS = "onnxruntime", "jetdraft"
*FOUR_BITS, EIGHT_BITS, SAFE = RUNGS[ORT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sensitivity") / "target"
    tiny.save_checkpoint(folder, tiny.llama_config())
    (folder.parent / "text.txt").write_text(TEXT[: len(TEXT) // 3])
    return folder


@pytest.fixture(scope="module")
def sensitivity(folder):
    checkpoint = Checkpoint.load(str(folder), torch.float32)
    windows = Windows.of(folder.parent / "text.txt", checkpoint.tokenizer)
    with own_attention(checkpoint.model):
        yield Sensitivity(Divergence(checkpoint.model, windows, {}), RECIPE)


def test_units_are_the_layers_and_the_head(sensitivity):
    units = sensitivity.divergence.units
    assert set(units) == {"0", "1", "2", HEAD}
    assert len(units["1"]) == 7
    assert list(units[HEAD]) == ["lm_head.weight"]


def rounded_inputs(module, inputs):
    """Before `module`: its inputs in 8 bits."""
    blocks = inputs[0].detach().numpy().reshape(-1, INT8.block_size)
    steps = np.abs(blocks).max(1, keepdims=True) / 127
    return torch.from_numpy(np.rint(blocks / steps) * steps).reshape(inputs[0].shape)


def test_kl_is_that_of_quantized_weights_and_inputs(sensitivity):
    divergence, model = sensitivity.divergence, sensitivity.divergence.model
    ids, layer = torch.cat(divergence.batches), model.model.layers[1]
    expected = model(ids).logits.log_softmax(-1)
    stored, hooks = {}, []
    for name, module in layer.named_modules():
        if name.endswith("proj"):
            stored[module] = module.weight.data
            floats = quantize(module.weight.data.numpy().T, INT8, None).floats
            module.weight.data = torch.from_numpy(floats.T.copy())
            hooks.append(module.register_forward_pre_hook(rounded_inputs))
    logs = model(ids).logits.log_softmax(-1)
    for hook in hooks:
        hook.remove()
    for module, weight in stored.items():
        module.weight.data = weight
    kl = (expected.exp() * (expected - logs)).sum(-1).mean()
    assert divergence.kl_of_units({"1": INT8}) == pytest.approx(float(kl), rel=1e-3)
    assert divergence.kl_of_units({}) == 0.0, "and the weights are back"


@pytest.fixture(scope="module")
def logits_of(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("bundles")

    def load(recipe):
        options = ExportOptions(recipe, capacity=256)
        path = export(str(folder), output / recipe.name, options=options).path
        return jetdraft.load(path, threads=1).parts.target

    return load


@pytest.fixture(scope="module")
def unquantized(logits_of):
    return logits_of(Recipe("none"))


@pytest.mark.parametrize("name", ["int8-rtn-b16", "int8-rtn-b64", "q4_0", "q6_k"])
def test_kl_is_that_of_the_bundle_as_it_runs(sensitivity, unquantized, logits_of, name):
    recipe = Recipe.parse(name)
    windows = torch.cat(sensitivity.divergence.batches).tolist()
    kl = compare(unquantized, logits_of(recipe), windows).kl_mean
    assert sensitivity.divergence.mean_kl(recipe) == pytest.approx(kl, rel=0.1)


def test_as_few_units_as_keep_the_kl(sensitivity):
    mean_kl = sensitivity.divergence.mean_kl
    low, high = (mean_kl(Recipe(scheme, 16)) for scheme in ("int4", "int8"))
    recipe, kl = sensitivity.find_mix(Limit(max_kl=(low + high) / 2))
    assert kl == pytest.approx(mean_kl(recipe))
    assert high < kl <= (low + high) / 2
    assert 1 <= (len(recipe.raised) + (recipe.head is not None)) <= 3
    same, _ = sensitivity.find_mix(Limit(max_kl=2 * low))
    assert same == RECIPE


def test_as_many_units_as_fit(sensitivity):
    least = sensitivity.divergence.bytes_of(RECIPE)
    most = sensitivity.divergence.bytes_of(RECIPE.raise_units(["0", "1", "2", HEAD]))
    assert sensitivity.find_mix(Limit(max_bytes=least))[0] == RECIPE
    everywhere, kl = sensitivity.find_mix(Limit(max_bytes=most))
    assert everywhere.name == "int4-rtn-b16-up0.1.2-head8"
    middle, more = sensitivity.find_mix(Limit(max_bytes=(least + most) // 2))
    assert least < sensitivity.divergence.bytes_of(middle) <= (least + most) // 2
    assert kl < more < sensitivity.divergence.mean_kl(RECIPE)


@cases("name", "int4-rtn-b16", "int8-k_quant-b32-head4", "int2-b64", "q5_k")
def test_the_bytes_are_those_of_the_graph(folder, sensitivity, name, tmp_path):
    recipe = Recipe.parse(name)
    export(str(folder), tmp_path / "bundle", None, ExportOptions(recipe))
    graph = onnx.load(tmp_path / "bundle/target.onnx").graph
    constants = {each.name: each for each in graph.initializer}
    kinds = "MatMulNBits", MULTIPLY, GATED
    products = [node for node in graph.node if node.op_type in kinds]
    read = (n.input[1:3] if n.domain == DOMAIN else n.input[1:] for n in products)
    names = {name for inputs in read for name in inputs}
    found = sum(numpy_helper.to_array(constants[name]).nbytes for name in names)
    assert sensitivity.divergence.bytes_of(recipe) == found


def test_limits_that_nothing_meets_are_refused(sensitivity):
    with pytest.raises(OptionError, match="alone takes"):
        sensitivity.find_mix(Limit(max_bytes=1000))
    with pytest.raises(OptionError, match="with more bits for all layers has a KL"):
        sensitivity.find_mix(Limit(max_kl=1e-12))
    for wrong in ({}, {"max_bytes": 5, "max_kl": 1.0}, {"max_kl": -1.0}):
        with pytest.raises(OptionError):
            Limit(**wrong)


def test_an_export_with_a_limit_writes_the_mix(folder, tmp_path):
    text = folder.parent / "text.txt"
    options = ExportOptions(RECIPE, calibration=text, limit=Limit(max_kl=0.01))
    bundle = export(str(folder), tmp_path / "bundle", None, options)
    recipe = Recipe.from_json(bundle.target.quantization)
    assert recipe.raised or recipe.head
    assert bundle.target.quantization["kl"] <= 0.01
    nodes = onnx.load(tmp_path / "bundle/target.onnx", load_external_data=False).graph
    products = [node for node in nodes.node if node.op_type == "MatMulNBits"]
    bits = [a.i for node in products for a in node.attribute if a.name == "bits"]
    for layer, found in enumerate(np.array(bits[:-1]).reshape(3, 4)):
        assert set(found) == {8 if layer in recipe.raised else 4}
    assert bits[-1] == (8 if recipe.head == "int8" else 4)


def test_the_command_line_says_what_it_chose_and_refuses(folder, tmp_path):
    text = folder.parent / "text.txt"
    given = ("export", folder, "-o", tmp_path / "bundle", "--block-size", "16")
    calibrated = (*given, "--calibration", text)
    both = command(*calibrated, "--max-kl", "1", "--max-bytes", "9")
    assert_refused(both, "either max bytes or max KL")
    floats = command(*calibrated, "--quantize", "int8", "--max-kl", "1")
    assert_refused(floats, "layers of int8 cannot get more bits")
    assert_refused(command(*calibrated, "--max-bytes", "9"), "alone takes")
    assert not (tmp_path / "bundle").exists()
    done = succeed(*calibrated, "--max-kl", "0.1")
    assert "target: int4-gptq-b16-head8" in done.stderr


@pytest.fixture(scope="module")
def checkpoint(folder):
    return Checkpoint.load(str(folder), torch.float32)


def windows(checkpoint, tmp_path, text=TEXT):
    (tmp_path / "text.txt").write_text(text)
    return Windows.of(tmp_path / "text.txt", checkpoint.tokenizer)


def test_a_text_becomes_equal_windows(checkpoint, tmp_path):
    found = windows(checkpoint, tmp_path).ids
    assert found.dtype == torch.int64
    assert found.shape[1] == 256
    short = windows(checkpoint, tmp_path, "def f(x)").ids
    assert len(short) == 1
    assert short.shape[1] > 2


def test_a_text_that_cannot_be_read_is_refused(checkpoint, tmp_path):
    for text, reason in (("", "0 tokens"), ("d", "1 tokens")):
        with pytest.raises(DataError, match=reason):
            windows(checkpoint, tmp_path, text)
    own = checkpoint.tokenizer
    for words, reason in ((own, "no data file"), (None, "has no tokenizer")):
        with pytest.raises(DataError, match=reason):
            Windows.of(tmp_path / "nothing", words)


def test_moments_are_those_of_the_inputs(checkpoint, tmp_path):
    model, text = checkpoint.model, windows(checkpoint, tmp_path)
    before, found = model.config._attn_implementation, second_moments(model, text)
    assert model.config._attn_implementation == before
    linear = (n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    assert set(found) == {f"{name}.weight" for name in linear}
    with torch.no_grad():
        rows = model.model.layers[0].input_layernorm(model.model.embed_tokens(text.ids))
    rows = rows.reshape(-1, rows.shape[-1]).double()
    for name in ("q_proj", "k_proj", "v_proj"):
        moments = found[f"model.layers.0.self_attn.{name}.weight"]
        np.testing.assert_allclose(moments, (rows.T @ rows).numpy(), rtol=1e-4)
    for name, powers in second_moments(model, text, diagonal=True).items():
        np.testing.assert_allclose(powers, np.diagonal(found[name]), rtol=1e-4)
    own = {id(found[f"model.layers.0.{name}.weight"]) for name in LAYER}
    assert len(own) == 4, "q, k and v are fed the same, and so are gate and up"


@pytest.mark.parametrize("recipe", ["int4-gptq", "q3_k-gptq"])
def test_a_model_with_streams_is_calibrated_as_it_is_without(tmp_path, recipe):
    tiny.save_checkpoint(tmp_path / "c", tiny.llama_config(num_hidden_layers=2))
    settings = StreamSettings(gamma=3, layers=1, lora_rank=4, prune_rank=2)
    tiny.save_probes(tmp_path / "c", settings)
    (tmp_path / "text.txt").write_text(TEXT)
    text = tmp_path / "text.txt"
    bundle = tmp_path / "b"
    model = tiny.exported_model(tmp_path / "c", bundle, recipe, calibration=text)
    same_text(model, ["stream"], prompt="def f")


class Known:
    units = {str(layer): {} for layer in range(10)} | {"head": {}}
    drop_blocks = staticmethod(lambda: None)

    def __init__(self, kl, layer=0.0, eight_bits=((64, 0.002), (32, 0.001))):
        self.kl, self.layer, self.eight_bits = kl, layer, dict(eight_bits)

    def mean_kl(self, recipe):
        if recipe.has_grids:
            return self.kl[recipe.scheme] - self.layer * len(recipe.raised)
        if recipe.scheme == "int8":
            return self.eight_bits[recipe.block_size]
        return self.kl[recipe.block_size] - self.layer * len(recipe.raised)

    def kl_of_units(self, recipes, batches=None):
        return self.layer * (int(*recipes) + 1) if "head" not in recipes else 0.0

    def bytes_of_unit(self, unit, recipe):
        return recipe.bits

    def bytes_of(self, recipe):
        return sum(recipe.of_unit(unit).bits for unit in self.units)


@cases(
    "kl, expected",
    ({32: 0.001, 64: 0.002, 128: 0.003}, FOUR_BITS[0]),
    ({32: 0.01, 64: 0.02, 128: 0.04}, FOUR_BITS[1]),
    ({32: 0.02, 64: 0.04, 128: 0.05}, FOUR_BITS[2]),
)
def test_the_largest_blocks_that_keep_the_text(kl, expected):
    recipe, measured = choose_recipe(Known(kl), ORT, bound=0.03)
    assert recipe == Recipe.parse(expected)
    assert measured == kl[recipe.block_size]


def test_a_mix_where_rounding_is_not_enough():
    worse = dict.fromkeys((64, 128), 1.0)
    recipe, kl = choose_recipe(Known({32: 0.06, **worse}, layer=0.01), ORT, bound=0.03)
    assert recipe.name == "int4-rtn-b32-up7.8.9-head8", "the worst layers first"
    assert kl == pytest.approx(0.03)


@cases(
    "kl, layer, expected",
    ({"q4_k": 0.02}, 0.0, "q4_k-headq6_k"),
    ({"q4_k": 0.06, "q5_k": 0.01}, 0.01, "q4_k-up7.8.9-headq6_k"),
    ({"q4_k": 0.06, "q5_k": 0.01}, 0.003, "q5_k-headq6_k"),
    ({"q4_k": 1.0, "q5_k": 0.5, "q6_k": 0.2, "q8_0": 0.1}, 0.0, "q8_0"),
)
def test_types_of_llama_cpp_from_the_cheapest_up(kl, layer, expected):
    recipe, measured = choose_recipe(Known(kl, layer), OURS, bound=0.03)
    assert recipe.name == expected
    assert measured == pytest.approx(kl[recipe.scheme] - layer * len(recipe.raised))


def test_eight_bits_where_a_mix_saves_nothing():
    known = Known({32: 0.09, **dict.fromkeys((64, 128), 1.0)}, layer=0.0065)
    eight_bits = Recipe.parse(EIGHT_BITS)
    assert choose_recipe(known, ORT, bound=0.03) == (eight_bits, 0.002)
    mix = Recipe.parse("int4-b32-up0.1.2.3.4.5.6.7.8.9-head8")
    assert known.bytes_of(mix) > MIX_SHARE * known.bytes_of(eight_bits)
    hopeless = Known(dict.fromkeys((32, 64, 128), 9.0), layer=0.0)
    assert choose_recipe(hopeless, ORT, bound=0.03)[0] == eight_bits


@pytest.mark.parametrize("finest", [0.02, 0.05])
def test_smaller_blocks_where_eight_bits_are_not_enough(finest):
    fine = ((64, 0.04), (32, finest))
    known = Known(dict.fromkeys((32, 64, 128), 9.0), eight_bits=fine)
    assert choose_recipe(known, ORT, bound=0.03) == (Recipe.parse(SAFE), finest)


@pytest.fixture(scope="module")
def both(pair):
    checkpoints = (Checkpoint.load(str(path), torch.float32) for path in pair)
    return Pair(*checkpoints)


def test_a_model_writes_its_own_text(both):
    target, before, steps = both.target, torch.random.get_rng_state(), []
    text = sample_text(target, lambda done, total: steps.append((done, total)))
    assert steps[-1] == (REPLY_TOKENS, REPLY_TOKENS)
    assert text.ids.shape[0] == len(QUESTIONS)
    assert text.scored == REPLY_TOKENS < text.ids.shape[1]
    assert torch.equal(text.ids, sample_text(target).ids)
    assert torch.equal(before, torch.random.get_rng_state())
    logits = target.model
    with own_attention(logits), torch.no_grad():
        rows = logits(text.ids, use_cache=False).logits.log_softmax(-1)
    chosen = rows[:, :-1].gather(-1, text.ids[:, 1:, None])[:, -REPLY_TOKENS + 1 :]
    uniform = -torch.tensor(float(rows.shape[-1])).log()
    assert chosen.mean() > uniform + 0.1, "more likely than random tokens"


def test_only_the_scored_tokens_are_compared(both):
    target, text = both.target.model, sample_text(both.target)
    recipe = Recipe("int4", 16)
    with own_attention(target):
        kl = Divergence(target, text, {}).mean_kl(recipe)
        text.scored = text.ids.shape[1]
        whole = Divergence(target, text, {})
        compared = whole.scored * sum(map(len, whole.batches))
        assert compared > REPLY_TOKENS * len(QUESTIONS)
        assert whole.mean_kl(recipe) != kl > 0


def test_overlap_is_the_acceptance_of_sampled_drafts(both):
    text, floats = sample_text(both.target), Recipe("none")
    with own_attention(both.target.model), own_attention(both.drafter.model):
        target, drafter = (Divergence(each.model, text, {}) for each in both)
        assert target.overlap(floats, target) == pytest.approx(1.0, abs=1e-5)
        p, q = (torch.cat(m._logprobs).exp() for m in (target, drafter))
        expected = float(torch.minimum(p, q).sum(-1).mean())
        assert drafter.overlap(floats, target) == pytest.approx(expected, abs=1e-5)
        ids = torch.tensor([3, 7, 9])
        part = float(torch.minimum(p[:, ids], q[:, ids]).sum(-1).mean())
        # As though the drafter's head had all rows and theirs were the first.
        first = drafter.overlap(floats, target, torch.arange(p.shape[1]))
        assert 0 < part < first == pytest.approx(expected, abs=1e-5)
        choice = choose_drafter_recipe(target, drafter, Recipe("int8", 32), ORT)
    assert choice.recipe.name in (*DRAFTER_CHOICES[ORT], "int8-rtn-b32-head4")
    assert choice.full_overlap == pytest.approx(expected, abs=1e-5)


@cases(
    "size, lost, head_lost, expected",
    (1e6, 0.10, 0.02, "int8-rtn-b32"),  # a pass takes its fixed time in any case
    (1e6, 0.10, 0.009, "int8-rtn-b32-head4"),
    (1e3, 0.009, 0.0, "int4-rtn-b32"),
    (5e8, 0.03, 0.0, "int4-rtn-b32"),
    (5e8, 0.60, 0.02, "int8-rtn-b32"),
)
def test_a_drafter_gets_the_bits_that_make_a_pair_fast(size, lost, head_lost, expected):
    class Target:
        bytes_of = staticmethod(lambda recipe: 3 * size)

    def overlap(recipe, other, ids):
        head = head_lost if recipe.head == "int4" else 0.0
        return 0.8 - (lost if recipe.bits == 4 else head)

    class Drafter:
        drop_blocks = staticmethod(lambda: None)
        bytes_of = staticmethod(lambda recipe: size * recipe.bits / 8)

    Drafter.overlap = staticmethod(overlap)
    choice = choose_drafter_recipe(Target(), Drafter(), Recipe(), ORT)
    assert choice.recipe.name == expected
    assert choice.full_overlap == 0.8
