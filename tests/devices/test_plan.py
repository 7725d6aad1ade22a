from __future__ import annotations

import itertools
import json

import pytest

from jetdraft.devices.device import Device
from jetdraft.devices.plan import Question, expected, plan, refusal
from jetdraft.errors import DeviceError, OptionError
from tests.cli.running import assert_refused, jetdraft

CONFIG = {
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SMALL = {**CONFIG, "hidden_size": 512, "num_hidden_layers": 2, "head_dim": 32}
LARGE = {
    **CONFIG,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "intermediate_size": 28672,
}


@pytest.fixture
def config(tmp_path):
    def write(fields, name="config.json"):
        file = tmp_path / name
        file.write_text(json.dumps(fields))
        return file

    return write


def ask(target, device="orin-nx-16gb", **more):
    return Question(target, Device.named(device), **more)


def brute_force(rows, acceptance):
    """The best tree of so many nodes by trying all, as total expected tokens."""
    nodes = {
        path: acceptance ** len(path) * (1 - acceptance) ** sum(path)
        for depth in range(1, rows + 1)
        for path in itertools.product(range(rows), repeat=depth)
    }
    return sum(sorted(nodes.values(), reverse=True)[:rows])


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_trees_are_the_likeliest(acceptance, rows):
    levels = expected(rows, acceptance, branching=True)
    assert sum(count for count, _ in levels) == rows
    total = sum(rate for _, rate in levels)
    assert total == pytest.approx(brute_force(rows, acceptance))


def test_a_chain_is_a_geometric_series():
    assert expected(3, 0.5, branching=False) == [(1, 0.5), (1, 0.25), (1, 0.125)]


def test_nothing_is_gained_where_nothing_is_accepted(config):
    best = plan(ask(config(CONFIG), acceptance=0.0)).best
    assert (best.method, best.width, best.speedup) == ("none", 1, 1.0)


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
    # As large as the target, it cannot pay; lookup's acceptance is not the drafter's.
    assert plan(ask(target, drafter=target)).best.method == "none"


def test_the_context_is_read_and_kept(config):
    target = config(CONFIG)
    short, long = (plan(ask(target, context=n)) for n in (64, 32768))
    # 28 layers of 8 heads of 128, keys and values of two bytes.
    kept = (32768 - 64) * 28 * 2 * 8 * 128 * 2 / 1e6
    assert long.needed_mb - short.needed_mb == pytest.approx(kept)
    assert long.pass_ms_by_width[1] > short.pass_ms_by_width[1]


def test_super_modes_are_faster(config):
    target = config(CONFIG)
    slow = plan(ask(target, "orin-nano-8gb"))
    fast = plan(ask(target, "orin-nano-8gb", power_mode="MAXN_SUPER"))
    assert fast.rows[0].tokens_per_second > 1.3 * slow.rows[0].tokens_per_second


def test_json(config):
    result = jetdraft("plan", config(CONFIG), "--device", "orin-nx-16gb", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["device"] == "orin-nx-16gb"
    assert found["fits"] is True
    assert found["plain_tokens_per_second"] > 0
    assert set(found["pass_ms_by_width"]) >= {"1", "2", "64"}
    assert found["best"] in found["rows"]
    assert set(found["best"]) >= {"method", "width", "tokens_per_second", "speedup"}


def test_text_and_picture(config, tmp_path):
    picture = tmp_path / "plan.png"
    result = jetdraft(
        "plan", config(CONFIG), "--device", "agx-thor", "--picture", picture
    )
    assert result.exit_code == 0, result.stderr
    assert "plain" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_that_does_not_fit(config):
    target = config(LARGE)
    result = jetdraft("plan", target, "--device", "orin-nano-8gb")
    assert_refused(result, "GB too much", "it fits agx-orin-64gb, thor-t4000, agx-thor")
    as_json = jetdraft("plan", target, "--device", "orin-nano-8gb", "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["fits"] is False


def test_fewer_bits_may_fit(config):
    question = ask(config(CONFIG), "orin-nano-4gb", quantization="none")
    found = plan(question)
    assert not found.fits
    assert "--quantize int4 would fit" in str(refusal(question, found))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device", "nano"), "unknown device 'nano'"),
        (("--device", "orin-nx-16gb", "--quantize", "fp8"), "'fp8' cannot be planned"),
        (("--device", "agx-thor", "--quantize", "fp4"), "'fp4' cannot be planned"),
        (("--device", "agx-thor", "--acceptance", "1"), "acceptance 1.0 is out of"),
        (("--device", "agx-thor", "--context", "0"), "context 0 is out of range"),
        (("--device", "agx-thor", "--power-mode", "x"), "no power mode 'x'"),
        (("--device", "agx-thor", "--drafter", "none.json"), "cannot read none.json"),
    ],
)
def test_bad_options(config, options, said):
    assert_refused(jetdraft("plan", config(CONFIG), *options), said)


def test_questions_are_checked_in_python_too(config):
    with pytest.raises(OptionError):
        ask(config(CONFIG), acceptance=-0.1)
    with pytest.raises(DeviceError):
        ask(config(CONFIG), quantization="int3")


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("value", [0, -5, "x" * 999, 1e300, None, [], True])
def test_sizes_that_no_model_has(config, name, value):
    target = config({**CONFIG, name: value})
    result = jetdraft("plan", target, "--device", "agx-thor")
    assert_refused(result, f"the config's {name} is")
    assert len(result.stderr) < 150


def test_a_picture_needs_a_file(config, tmp_path):
    for place in (tmp_path, tmp_path / "none" / "plan.png"):
        result = jetdraft(
            "plan", config(CONFIG), "--device", "agx-thor", "--picture", place
        )
        assert_refused(result, "is a folder, or its folder is missing")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_export_refuses_what_does_not_fit(config, tmp_path):
    folder = config(LARGE).parent
    how = ("export", folder, "-o", tmp_path / "out", "--device")
    assert_refused(jetdraft(*how, "orin-nano-8gb"), "GB too much", "it fits")
    assert_refused(jetdraft(*how, "nano"), "unknown device")
    hub = jetdraft(
        "export", "some/model", "-o", tmp_path / "out", *how[-1:], "agx-thor"
    )
    assert_refused(hub, "download it first")
    assert not (tmp_path / "out").exists()
