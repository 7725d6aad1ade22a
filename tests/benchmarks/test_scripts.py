import json
import statistics
from dataclasses import astuple, replace
from pathlib import Path

import heads
import inflate
import never_slower
import pytest
import tasks
import torch
from click.testing import CliRunner
from human_eval import solves
from roofline import NVFP4, fit, leave_one_out, module_of, predict_mtp, read, runtime_mb
from tasks import rouge_l
from torch import Tensor

from jetdraft import Stats
from jetdraft.checkpoints.checkpoint import read_settings
from jetdraft.checkpoints.streams import FORECAST, PromptSettings, load_probes
from jetdraft.devices.cost_model import FITTED, RUNTIME_MB
from jetdraft.devices.device import Device
from jetdraft.methods.chimera.task import ChimeraTask
from jetdraft.methods.falcon.task import FalconTask
from jetdraft.methods.glide.task import GlideTask
from jetdraft.methods.kangaroo.task import KangarooTask
from jetdraft.train import blocks, data, teacher
from jetdraft.train.prompts import prompt_logits
from tests import cases
from tests.tiny import llama_config, save_checkpoint, save_probes

TASK = {
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(3) == 6\n",
}
SIZES = {"--hidden-size": 256, "--layers": 5, "--heads": 16, "--kv-heads": 8}
SIZES |= {"--intermediate-size": 416}
TASKS = {"kangaroo": KangarooTask, "glide": GlideTask, "chimera": ChimeraTask}
TASKS |= {"falcon": FalconTask}


@pytest.fixture
def measured(tmp_path, toy, monkeypatch):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    line = {"prompt": "The robot sees", "completion": " a wall."}
    prompts.write_text(json.dumps(line))
    monkeypatch.setattr(Stats, "add", Stats.add)  # heads.py puts another in its place

    def run(script, *words):
        known = {"BUNDLE": str(toy), "PROMPTS": str(prompts)}
        options = [*[known.get(word, word) for word in words], "--json", str(output)]
        result = CliRunner().invoke(script.main, options, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(output.read_text()), result.stdout

    return run


def test_heads_compares_bundles(measured):
    words = ("--bundle", "toy", "draft", "BUNDLE", "--prompts", "PROMPTS")
    report, shown = measured(heads, *words, "--max-new-tokens", "12")
    rows = {row["way"]: row for row in report["T=0.0"]["toy"]}
    assert {"width 1", "plain", "K = 1", "K = 5", "planned", "auto"} < set(rows)
    exact = [row for row in rows.values() if row["exact"]]
    assert all(row["same_text"] == row["texts"] for row in exact)
    assert rows["K = 5"]["tokens_per_pass"] > 2
    assert rows["K = 5"]["draft_ms"] > 0
    assert "| toy |" in shown
    assert "| lookup, K = 4 |" in shown


def test_tasks_has_the_metrics_of_plain_decoding(measured):
    words = ("BUNDLE", "PROMPTS", "--methods", "draft,auto", "--num-draft-tokens", "2")
    report, shown = measured(tasks, *words, "--max-new-tokens", "8")
    assert [row["way"] for row in report["rows"]] == [
        *("plain", "width 1", "draft, K = 2", "draft, any K", "auto, any K")
    ]
    assert report["exact_match"] in (0.0, 1.0)
    assert all(row["same_text"] == 1 for row in report["rows"] if row["exact"])
    assert "1 prompts, exact match" in shown


def test_never_slower_measures_three_workloads(measured, monkeypatch):
    monkeypatch.setattr(never_slower, "LONG", {"max_new_tokens": 8, "ignore_eos": True})
    monkeypatch.setattr(never_slower, "SLOTS", never_slower.SLOTS[:2])
    words = ("BUNDLE", "--prompts", "PROMPTS", "--methods", "draft,lookup")
    report, _ = measured(never_slower, *words, "--repeats", "1")
    assert [row["way"] for row in report["random"]["T=1.0"]] == [
        *("plain", "width 1", "auto", "auto, not exact"),
        *("never right", "never right, not exact"),
    ]
    assert report["random"]["T=0.0"][-1]["acceptance_rate"] in (0.0, None)
    assert {row["way"] for row in report["code"]["T=0.8"]} > {"draft 8", "lookup 1"}
    assert report["repeated"]["again"][-1]["way"] == "recall"


@cases(
    "one, other, score",
    ([1, 2, 3], [1, 2, 3], 1.0),
    ([1, 2, 3, 4], [1, 3, 4, 9], 0.75),
    ([3, 2, 1], [1, 2, 3], 1 / 3),
    ([1, 2], [1, 2, 3, 4], 4 / 6),
    ([], [1], 0.0),
    ([], [], 1.0),
)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(one, other, score):
    assert rouge_l(one, other) == pytest.approx(score)
    assert rouge_l(other, one) == pytest.approx(score)


@cases(
    "answer, solved",
    ("Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", True),
    ("def double(x):\n    return 2 * x", True),
    ("def double(x):\n    return x", False),
    ("raise SystemExit(0)", False),
    ("no code", False),
)
def test_an_answer_is_solved_if_all_tests_ran_and_passed(answer, solved):
    assert solves(TASK, answer) is solved


def of_kernels(records, capability, recipe="int4-rtn-b128-headnone"):
    return [r for r in records if r.kernels == (capability, recipe)]


@pytest.mark.parametrize("capability", FITTED)
def test_the_constants_are_those_that_fit_the_published_rows(capability):
    records, table = read()
    efficiency, _ = fit(of_kernels(records, capability))
    assert astuple(efficiency) == pytest.approx(astuple(FITTED[capability]), rel=0.01)
    assert runtime_mb(records, table["capacity"]) == pytest.approx(RUNTIME_MB, rel=0.01)


def test_each_published_row_is_predicted_from_the_others():
    records, table = read()
    errors = leave_one_out(records, table["capacity"])
    assert len(errors) == len(records) == 56
    for name, count, median, worst in (
        ("speed", 56, 0.05, 0.15),
        ("prefill", 56, 0.10, 0.40),
        ("memory", 20, 0.02, 0.20),
    ):
        sizes = [abs(x) for e in errors if (x := getattr(e, name)) is not None]
        assert len(sizes) == count
        assert statistics.median(sizes) < median
        assert max(sizes) < worst


def test_published_rows_of_mtp_are_predicted_from_other_models():
    records, table = read()
    rows = list(predict_mtp(table, records))
    assert len(rows) == 22
    assert max(abs(one.plain) for one in rows) < 0.20
    mixtures = [one.speed for one in rows if "A3B" in one.row["model"]]
    assert all(0.15 < error < 0.30 for error in mixtures)
    others = [abs(one.speed) for one in rows if "A3B" not in one.row["model"]]
    assert statistics.median(others) < 0.05
    assert max(others) < 0.15


def test_a_step_of_a_published_module_has_the_time_of_its_bytes():
    records, table = read()
    published = table["module"]
    module = module_of(table["models"][published["model"]])
    assert module.pass_bytes(0) / 1e6 == pytest.approx(published["megabytes"], rel=0.02)
    efficiency, _ = fit(of_kernels(records, "11.0", NVFP4.name))
    mode = Device.named(published["device"]).power_mode()
    step_ms = module.pass_ms(1, 2064, mode, replace(efficiency, pass_ms=0.0))
    assert step_ms == pytest.approx(published["step_ms"], rel=0.03)


def test_trees_of_sixty_rows_keep_their_published_share():
    records, table = read()
    for tree in table["trees"]:
        key = tree["device"], tree["model"]
        record = next(r for r in records if (r.device.name, r.model) == key)
        efficiency = FITTED[record.device.compute_capability]
        share = record.predict_ms(efficiency) / record.predict_ms(efficiency, 60)
        published = tree["speedup"] / tree["tokens_per_pass"]
        assert share == pytest.approx(published, rel=0.21)


def said_by_probes(folder: Path) -> Tensor:
    checkpoint, _ = teacher.load_target(str(folder))
    made = load_probes(checkpoint.model, read_settings(folder), folder, 1.0)
    ids = torch.arange(1, 61)[None]
    plain, _ = teacher.load_target(str(folder))
    cache = plain.model(input_ids=ids, use_cache=True).past_key_values
    places = blocks.Blocks.spread(data.Batch(ids, ids), 15)
    return prompt_logits(made.prompts, plain.model, places.anchors, ids.shape[1], cache)


def run(command, *arguments: object) -> None:
    result = CliRunner().invoke(command, [str(part) for part in arguments])
    assert result.exit_code == 0, result.output


def enlarged(small: Path, large: Path, *options: object) -> Path:
    sizes = [part for pair in SIZES.items() for part in pair]
    run(inflate.main, small, "-o", large, *sizes, *options)
    return large


@cases(
    "settings",
    PromptSettings(gamma=2, members=2, ranks=((0.5,), (0.25,))),
    PromptSettings(gamma=2, prefix=5, mode=FORECAST),
    ids=["prompt tokens", "forecasts"],
)
def test_enlarged_probes_say_the_same(settings, tmp_path):
    small = save_checkpoint(tmp_path / "small", llama_config())
    save_probes(small, settings)
    big = enlarged(small, tmp_path / "large", "--lowest", 1)
    expected = said_by_probes(small)
    assert expected.std() > 0.5
    torch.testing.assert_close(said_by_probes(big), expected, rtol=0.0, atol=1e-2)
    assert read_settings(big).ranks == settings.ranks
