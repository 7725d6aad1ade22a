import dataclasses
import itertools
import json
import math
import re
from dataclasses import replace

import pytest
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM

from jetdraft import CheckpointError, DeviceError, OptionError
from jetdraft.devices.cost_model import (
    FITTED,
    Dimensions,
    Encoder,
    EncoderWork,
    LoadedDecoder,
)
from jetdraft.devices.device import Device
from jetdraft.devices.plan import (
    MethodCost,
    Question,
    does_not_fit_error,
    expected_levels,
    plan,
)
from jetdraft.export.step import buffer_sizes
from jetdraft.recipe import Recipe
from tests import cases
from tests.export.test_architectures import load
from tests.ggufs import one, write_gguf
from tests.programs import assert_refused, jetdraft, succeed
from tests.tiny import HYBRIDS, MIXTURES, SHARING, SIZES, llama_config

CONFIG = {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16}
CONFIG |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144}
CONFIG |= {"vocab_size": 151936, "tie_word_embeddings": True}
SMALL = {**CONFIG, "hidden_size": 512, "num_hidden_layers": 2, "head_dim": 32}
LARGE = {**CONFIG, "hidden_size": 8192, "num_hidden_layers": 80}
LARGE["intermediate_size"] = 28672
METHODS = (
    MethodCost("draft", "drafter", trees=True),
    MethodCost("stream", "probes", trees=True),
    MethodCost("lookup", "free", trees=False),
)


@pytest.fixture
def config(tmp_path):
    def write(fields, name="config.json"):
        file = tmp_path / name
        file.write_text(json.dumps(fields))
        return file

    return write


def ask(target, device="orin-nx-16gb", **more):
    return Question(target, device, **more, methods=METHODS, provider="cuda")


def brute_force(rows, acceptance):
    """The best tree of some nodes by trying all, as total expected tokens."""
    nodes = {
        path: acceptance ** len(path) * (1 - acceptance) ** sum(path)
        for depth in range(1, rows + 1)
        for path in itertools.product(range(rows), repeat=depth)
    }
    return sum(sorted(nodes.values(), reverse=True)[:rows])


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_trees_are_the_likeliest(acceptance, rows):
    levels = expected_levels(rows, acceptance, branching=True)
    assert sum(count for count, _ in levels) == rows
    total = sum(rate for _, rate in levels)
    assert total == pytest.approx(brute_force(rows, acceptance))


def test_a_chain_is_a_geometric_series():
    assert expected_levels(3, 0.5, branching=False) == [(1, 0.5), (1, 0.25), (1, 0.125)]


def test_nothing_is_gained_where_nothing_is_accepted(config):
    best = plan(ask(config(CONFIG), acceptance=0.0)).best
    assert (best.method, best.width, best.speedup) == ("none", 1, 1.0)


def test_only_the_given_methods_are_compared_and_their_cost_counts(config):
    device, target = "orin-nx-16gb", config(CONFIG)
    drafter = config(SMALL, "drafter.json")
    on_gpu = Question(target, device, provider="cuda")
    assert [row.method for row in plan(on_gpu).rows] == ["none"]
    speeds = {}
    for cost, draft_config in (("free", None), ("probes", None), ("drafter", drafter)):
        own = (MethodCost("own", cost, trees=False),)
        rows = plan(replace(on_gpu, drafter=draft_config, methods=own)).rows
        assert {row.shape for row in rows if row.method == "own"} == {"chain"}
        speeds[cost] = rows[4].tokens_per_second
    assert speeds["free"] > max(speeds["probes"], speeds["drafter"])
    assert min(speeds.values()) > 0


def test_more_acceptance_is_never_slower(config):
    target = config(CONFIG)
    speeds = [
        plan(ask(target, acceptance=a)).best.tokens_per_second
        for a in (0.1, 0.3, 0.5, 0.7, 0.9)
    ]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 2 * speeds[0]


def test_a_drafter_costs_time_and_memory(config):
    target, drafter = config(CONFIG), config(SMALL, "drafter.json")
    alone, both = plan(ask(target)), plan(ask(target, drafter=drafter))
    assert both.needed_mb > alone.needed_mb
    assert {row.method for row in both.rows} == {"none", "draft", "lookup"}
    assert {row.method for row in alone.rows} == {"none", "lookup", "stream"}
    # A drafter as large as the target cannot pay; lookup has another acceptance.
    assert plan(ask(target, drafter=target)).best.method == "none"


def test_the_context_is_read_and_kept(config):
    target = config(CONFIG)
    short, long = (plan(ask(target, context=n)) for n in (64, 32768))
    cache_mb = (32768 - 64) * 28 * 2 * 8 * 128 * 2 / 1e6
    assert long.needed_mb - short.needed_mb == pytest.approx(cache_mb)
    assert long.pass_ms_by_width[1] > short.pass_ms_by_width[1]


def test_an_encoder_reads_its_weights_in_each_pass_and_computes(config):
    encoder = Encoder(10**9, 64, (EncoderWork(64, 64, 8, 3, 500.0, 1.0),))
    asked = replace(ask(config(CONFIG), context=1000), encoder=encoder)
    on_gpu, on_cpu = plan(asked), plan(replace(asked, provider="cpu"))
    mode, mb = Device.named("orin-nx-16gb").power_mode(), 1000 * (1 + 2 / 32)
    assert on_gpu.memory_mb["encoder"] == pytest.approx(mb + 1000 * 64 * 2 / 1e6)
    fitted = FITTED["8.7"]
    ms = 3 * (fitted.pass_ms + mb / mode.bandwidth_gbs / fitted.bandwidth)
    ms += 500 / (mode.fp16_tflops * fitted.compute)
    assert on_gpu.pictures[0]["ms"] == pytest.approx(ms, abs=0.1)
    bound = 3 * 1000 * (1 + 4 / 32) / mode.bandwidth_gbs
    assert on_cpu.pictures[0]["ms"] == pytest.approx(bound, abs=0.1)
    assert plan(ask(config(CONFIG))).pictures == []


def test_super_modes_are_faster(config):
    target, device = config(CONFIG), "orin-nano-8gb"
    modes = None, "MAXN_SUPER"
    slow, fast = (plan(ask(target, device, power_mode=m)).rows[0] for m in modes)
    assert fast.tokens_per_second > 1.3 * slow.tokens_per_second


def test_a_cpu_has_a_bound_of_plain_decoding_and_nothing_else(config):
    asked = ask(config(CONFIG), "orin-nano-8gb", context=1000)
    on_cpu, on_gpu = plan(replace(asked, provider="cpu")), plan(asked)
    layer = 2048 * (2 * 16 + 2 * 8) * 128 + 3 * 2048 * 6144
    weights = (28 * layer + 2048 * 151936) * (0.5 + 4 / 128)
    cache = 1000 * 28 * 2 * 8 * 128 * 4
    bound = 68.3e9 / (weights + cache)
    assert on_cpu.rows[0].tokens_per_second == pytest.approx(bound)
    assert on_cpu.rows[0].tokens_per_second > on_gpu.rows[0].tokens_per_second
    assert on_cpu.memory_mb["target"] == pytest.approx((weights + cache) / 1e6)
    assert [row.method for row in on_cpu.rows] == ["none"]
    assert list(on_cpu.pass_ms_by_width) == [1]


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen2moe"])
def test_the_header_of_a_gguf_file_has_all_sizes_and_the_recipe(family, tmp_path):
    config = llama_config() if family == "llama" else HYBRIDS["lfm2"]()
    if family == "qwen2moe":
        config = MIXTURES["qwen2_moe"]()
        config.moe_intermediate_size, config.mlp_only_layers = 32, []
        config.shared_expert_intermediate_size = 96
    file = write_gguf(tmp_path / "m.gguf", config, one(Type.Q4_1), family).path
    asked = Question(file, "raspberry-pi-5-8gb")
    found = plan(asked)
    assert found.sizes == replace(Dimensions.of(config.to_dict()), window=0)
    assert found.quantization == "q4_1-headq4_1"
    assert plan(replace(asked, quantization="int8")).needed_mb > found.needed_mb
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="does not describe a decoder"):
        plan(replace(asked, target=cut))


@cases(
    "provider, basis, speed",
    ((), "at most, for the CPU", "at most"),
    (("--provider", "cuda"), "for the GPU, by the constants of another", "about"),
)
def test_the_first_line_says_what_is_predicted(config, provider, basis, speed):
    result = jetdraft("plan", config(CONFIG), "--device", "orin-nano-8gb", *provider)
    first, *others = result.stdout.splitlines()
    assert first.startswith(f"predicted  {basis}")
    assert first.endswith("jetdraft was never measured on this device")
    assert any(line.startswith(f"plain      {speed} ") for line in others)
    assumed = [line for line in others if line.startswith("at acceptance 0.6")]
    assert assumed == (["at acceptance 0.6, which is assumed:"] if provider else [])
    refusals = [line for line in others if line.startswith("methods    not predicted")]
    assert len(refusals) == (not provider)
    assert ("lookup" in result.stdout) == bool(provider)


def test_json(config):
    flags = ("--device", "orin-nx-16gb", "--provider", "cuda", "--json")
    prediction = json.loads(succeed("plan", config(CONFIG), *flags).stdout)
    assert (prediction["device"], prediction["provider"]) == (flags[1], "cuda")
    assert "TensorRT Edge-LLM" in prediction["basis"]
    assert prediction["fits"] is True
    assert prediction["plain_tokens_per_second"] > 0
    assert set(prediction["pass_ms_by_width"]) >= {"1", "2", "64"}
    best = prediction["best"]
    assert best in prediction["rows"]
    assert set(best) >= {"method", "width", "tokens_per_second", "speedup"}


def test_a_model_that_does_not_fit(config):
    target = config(LARGE)
    result = jetdraft("plan", target, "--device", "orin-nano-8gb")
    assert_refused(result, "GB too much", "it fits agx-orin-64gb, thor-t4000, agx-thor")
    as_json = jetdraft("plan", target, "--device", "orin-nano-8gb", "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["fits"] is False
    question = ask(config(CONFIG), "orin-nano-4gb", quantization="none")
    prediction = plan(question)
    assert not prediction.fits
    assert "--quantize int4 would fit" in str(does_not_fit_error(question, prediction))


@cases(
    "options, message",
    (("--device", "nano"), "unknown device 'nano'"),
    (("--device", "agx-thor", "--quantize", "fp8"), "unknown quantization 'fp8'"),
    (("--device", "agx-thor", "--acceptance", "1"), "acceptance 1.0 is out of"),
    (("--device", "n100-16gb", "--provider", "cuda"), "give --provider cpu"),
    (("--device", "agx-thor", "--context", "0"), "context 0 is out of range"),
    (("--device", "agx-thor", "--power-mode", "x"), "unknown power mode 'x'"),
    (("--device", "agx-thor", "--drafter", "none.json"), "cannot read none.json"),
)
def test_bad_options(config, options, message):
    assert_refused(jetdraft("plan", config(CONFIG), *options), message)


def test_questions_are_checked_in_python_too(config):
    for wrong in ({"acceptance": -0.1}, {"quantization": "int3"}):
        with pytest.raises(OptionError):
            ask(config(CONFIG), **wrong)
    with pytest.raises(DeviceError, match="'int2' cannot be planned"):
        ask(config(CONFIG), quantization="int2")


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [0, -5, "x" * 999, 1e300, None, [], True])
def test_sizes_that_no_model_has(config, name, value):
    result = jetdraft("plan", config({**CONFIG, name: value}), "--device", "agx-thor")
    assert_refused(result, f"the config's {name} is")
    assert len(result.stderr) < 150


def test_export_refuses_what_does_not_fit(config, tmp_path):
    command = ("export", config(LARGE).parent, "-o", tmp_path / "out", "--device")
    assert_refused(jetdraft(*command, "orin-nano-8gb"), "GB too much", "it fits")
    assert_refused(jetdraft(*command, "nano"), "unknown device")
    hub = jetdraft("export", "some/model", *command[2:], "agx-thor")
    assert_refused(hub, "download it first")
    assert not (tmp_path / "out").exists()


LLAMA = {**SIZES, "model_type": "llama", "vocab_size": 128}
QWEN = {**LLAMA, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 32}
QWEN |= {"attn_output_gate": True, "linear_num_key_heads": 2}
QWEN |= {"linear_num_value_heads": 4, "linear_key_head_dim": 16}
QWEN |= {"linear_value_head_dim": 16, "full_attention_interval": 4}

LFM2 = {**LLAMA, "model_type": "lfm2", "tie_embedding": True, "block_multiple_of": 32}
LFM2 |= {"layer_types": ["conv", "full_attention", "conv"]}
LFM2 |= {"block_auto_adjust_ff_dim": True}


MODELS = [LLAMA, {**LLAMA, "tie_word_embeddings": True}, QWEN, LFM2]
MODELS += [{**LLAMA, "model_type": "bitnet", "hidden_act": "relu2"}]
MODELS += [{**MIXTURES["nemotron_h"]().to_dict(), "moe_latent_size": 32}]
for group in (HYBRIDS, MIXTURES, SHARING):
    MODELS += [make().to_dict() for make in group.values()]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config["model_type"])
def test_weights_are_those_of_the_model(config):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    named = model.named_parameters()
    others = r"bias|conv1d|conv\.conv|altup\.|shared_expert_gate"
    weights = [w for n, w in named if not re.search(others, n)]
    matrices = [w for w in weights if w.ndim > 1]
    sizes = Dimensions.of(config)
    assert sizes.weights == sum(w.numel() for w in matrices)
    experts = sum(w.numel() for w in matrices if w.ndim == 3)
    assert sizes.experts * sizes.expert == experts
    used = round(sizes.row_weights - sizes.matrices)
    assert used * (sizes.experts or 1) == experts * sizes.used
    assert sizes.read_weights(1) == pytest.approx(sizes.row_weights)
    if experts:
        two = sizes.read_weights(2) - sizes.read_weights(1)
        share = 1 - sizes.used / sizes.experts
        assert two == pytest.approx(used * share)


def test_a_plan_says_what_a_row_uses_of_a_mixture(config):
    fields = {**CONFIG, "num_experts": 128, "num_experts_per_tok": 8}
    target = config({**fields, "moe_intermediate_size": 768})
    result = jetdraft("plan", target, "--device", "agx-thor")
    assert "experts    8 of 128 for a row: it uses 1.7 of 17.6 billion" in result.stdout
    shown = jetdraft("plan", target, "--device", "agx-thor", "--json")
    sizes = Dimensions.of(json.loads(target.read_text()))
    found = json.loads(shown.stdout)
    assert found["weights"] == sizes.weights
    assert found["weights_per_row"] == sizes.row_weights + sizes.head
    plans = [plan(ask(path, "agx-thor")) for path in (target, config(CONFIG, "d.json"))]
    mixture, dense = (each.pass_ms_by_width for each in plans)
    assert mixture[4] / mixture[1] > 1.5 * dense[4] / dense[1]


def test_shared_buffers_and_windows_count_once_and_as_far_as_they_reach():
    """Layers 4 and 5 read the buffers of others; windows have 8 rows."""
    sizes = Dimensions.of(SHARING["gemma4"]().to_dict())
    heads = SIZES["num_key_value_heads"]
    assert sizes.window_values == 2 * 2 * heads * 16
    assert sizes.kv_values == 2 * 2 * heads * 32
    load = LoadedDecoder(sizes, Recipe("none"))
    near, far = (load.pass_bytes(tokens) for tokens in (8, 100))
    assert far - near == 92 * sizes.kv_values * load.kv_bytes
    more = (load.memory_mb(100) - load.memory_mb(8)) * 1e6
    assert more == pytest.approx(
        92 * load.kv_bytes * (sizes.kv_values + sizes.window_values)
    )


@pytest.mark.parametrize(
    "make", [llama_config, *HYBRIDS.values()], ids=["llama", *HYBRIDS]
)
def test_buffers_are_as_large_as_the_runtime_s(make, tmp_path):
    config = make()
    buffers = buffer_sizes(load(config, tmp_path / "checkpoint").model)
    sizes = Dimensions.of(config.to_dict())
    assert sizes.kv_values == sum(2 * heads * size for heads, size in buffers.kv_shapes)
    assert sizes.state_values + sizes.kept_values == sum(map(math.prod, buffers.states))


GRANITE, NEMOTRON = (HYBRIDS[n]().to_dict() for n in ("granitemoehybrid", "nemotron_h"))


def test_published_configs_name_layers_in_other_ways():
    old = {**LFM2, "layer_types": None, "full_attn_idxs": [1], "tie_embedding": None}
    old |= {"block_ff_dim": old["intermediate_size"], "intermediate_size": 7}
    assert Dimensions.of(old) == Dimensions.of(LFM2)
    named = {**GRANITE, "layer_types": ["mamba", "attention"]}
    assert Dimensions.of(named) == Dimensions.of(GRANITE)
    pattern = {**NEMOTRON, "layers_block_type": None, "hybrid_override_pattern": "M*-"}
    assert Dimensions.of(pattern) == Dimensions.of(NEMOTRON)


@cases("fields, states", (GRANITE, 128 * 16 + 19 * 192 + 16 * 168), (LLAMA, 0))
def test_states_are_named_and_take_chains_without_probes(config, fields, states):
    target, drafter = config(fields), config(SMALL, "drafter.json")
    alone, both = plan(ask(target)), plan(ask(target, drafter=drafter))
    taken = {(row.shape, row.method) for row in alone.rows + both.rows}
    wanted = {("chain", name) for name in ("none", "lookup", "draft")}
    more = {("tree", "draft"), ("tree", "stream"), ("chain", "stream")}
    assert taken == (wanted if states else wanted | more)
    assert alone.memory_mb["states"] == pytest.approx(8e-6 * states)
    shown = jetdraft("plan", target, "--device", "agx-thor").stdout
    assert ("states" in shown) == bool(states)


@cases(
    "config, change, size",
    (LLAMA, {"tied": True}, 2 * 128 * 64),
    (LFM2, {"state_values": 0}, 2 * 4 * 256),
)
def test_memory_counts_a_tied_head_once_and_states_twice(config, change, size):
    sizes, recipe = Dimensions.of(config), Recipe.parse("int4-b64-headnone")
    changed = dataclasses.replace(sizes, **change)
    more, less = (LoadedDecoder(n, recipe).memory_mb(10) for n in (sizes, changed))
    assert more - less == pytest.approx(size / 1e6)


@cases(
    "name, layers, head",
    ("none", 2, 2),
    ("int4", 0.5 + 2 / 128, 0.5 + 2 / 128),
    ("int4-b32-head8", 0.5 + 2 / 32, 1 + 2 / 32),
    ("int4-b32-headnone", 0.5 + 2 / 32, 2),
    ("int8-k_quant-b64", 1 + 3 / 64, 1 + 3 / 64),
    ("int4-b32-up0.2", 0.5 + 2 / 32 + 0.5 * 2 / 3, 0.5 + 2 / 32),
)
def test_bytes_of_a_recipe(name, layers, head):
    load = LoadedDecoder(Dimensions.of(LLAMA), Recipe.parse(name))
    assert load.weight_bytes == pytest.approx(layers)
    assert load.head_bytes == pytest.approx(head)
    assert load.kv_bytes == 2
    assert LoadedDecoder(load.sizes, Recipe.parse(f"{name}-kv8")).kv_bytes == 1


@cases(
    "content, match",
    ("{", "is not JSON or GGUF"),
    ("[]", "does not describe a decoder"),
    ('{"is_encoder_decoder": true}', "a plan predicts decoders only"),
    ("{}", "does not describe a decoder"),
    ('{"text_config": 5}', "does not describe a decoder"),
    ({"hidden_size": "x"}, "hidden_size is 'x'"),
    ({"num_experts": 8}, "does not say how many of them a token uses"),
    ({"n_routed_experts": 64}, "mixture of experts"),
    ({"mamba_d_state": 16}, "Mamba layers of a kind"),
    ({"layer_types": ["attention"] * 4}, "4 layer_types for 3 layers;"),
    ({"layer_types": ["banana"] * 3}, "does not know \\(banana\\)"),
    ({"attn_layer_indices": [1, 2], "conv_kernel": -1}, "conv_kernel is -1"),
)
def test_files_that_are_not_configs_of_known_models(tmp_path, content, match):
    whole = content if isinstance(content, str) else json.dumps({**LLAMA, **content})
    (tmp_path / "config.json").write_text(whole)
    with pytest.raises(CheckpointError, match=match):
        Dimensions.read(tmp_path)


VISION = {"hidden_size": 999, "text_config": LLAMA, "vision_config": {"hidden_size": 9}}
ATTENTION = {"mamba_d_state": 16, "mamba_n_heads": 4, "layer_types": ["attention"] * 3}


MOE = {"num_experts": 8, "is_moe": False}


@cases("fields", VISION, ATTENTION, MOE, {"num_experts": 1})
def test_fields_of_parts_that_are_not_there_change_nothing(fields):
    assert Dimensions.of({**LLAMA, **fields}) == Dimensions.of(LLAMA)
