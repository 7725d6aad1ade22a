import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from jetdraft import CheckpointError, OptionError, OutputError, TrainingError, errors
from jetdraft.checkpoints.streams import StreamSettings
from jetdraft.export.exporter import export
from jetdraft.methods.block.task import SourceBlockSettings, SourceBlockTask
from jetdraft.methods.chimera.task import ChimeraTask
from jetdraft.methods.dflash.task import DFlashSettings, DFlashTask
from jetdraft.methods.diffusion.task import DiffusionSettings, DiffusionTask
from jetdraft.methods.draft.task import ModelSettings, ModelTask
from jetdraft.methods.eagle.task import EagleSettings, EagleTask
from jetdraft.methods.falcon.task import FalconSettings, FalconTask
from jetdraft.methods.forecast.task import ForecastSettings, ForecastTask
from jetdraft.methods.glide.task import GlideTask
from jetdraft.methods.kangaroo.task import KangarooSettings, KangarooTask
from jetdraft.methods.medusa.task import MedusaTask
from jetdraft.methods.ppd.task import PpdSettings, PpdTask
from jetdraft.methods.stream.task import StreamTask
from jetdraft.runtime.planning.registry import load_object, methods
from jetdraft.train.heads import HeadSettings, LayerSettings
from jetdraft.train.run_folder import STATE_FILE, RunFolder
from jetdraft.train.task import Task, TrainingOptions
from tests import cases
from tests.programs import ROOT, printed
from tests.sources import CONFIGS, save
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint
from tests.train.periodic import PERIOD, interrupt, made, write_periodic

OPTIONS = TrainingOptions(steps=5, batch_size=2, sequence_length=32, validate_every=2)
UNSIZED = {"layers": None, "hidden_size": None}
OF_TEXT = {"loss": "text", "on_policy_share": 0.0}
REFUSED = [
    ("draft", {"loss": "mse"}, "unknown loss 'mse'; choose forward-kl, .* or text"),
    ("draft", {"layers": 0}, "layers 0 is out of range; give 1 to 1000"),
    ("draft", {"hidden_size": 33}, "hidden size 33 is not a multiple of 8"),
    ("draft", {"cache_tokens": 9}, "--cache-tokens needs a folder; give --cache too"),
    ("draft", {"loss": "text"}, "leave --on-policy-share out"),
    ("draft", {"hidden_size": 7}, "hidden size 7 is out of range"),
    ("draft", {"beta": 0.5}, "loss forward-kl has no beta"),
    ("draft", {"loss": "js", "beta": 1.5}, "beta 1.5 is out of range"),
    ("draft", {"on_policy_share": 1.5}, "on policy share 1.5 is out of range"),
    ("draft", {"start": "x", "from_layers": (1,)}, "give --from or --from-layers"),
    ("draft", {"from_layers": (1,)}, "leave --layers and --hidden-size out"),
    ("draft", UNSIZED | {"from_layers": (1, 9)}, r"the layers \[1, 9\] are not all"),
    ("draft", {"draft_vocab": VOCAB_SIZE}, "is not a part of the target's 288"),
    ("draft", {"cache": Path("x")}, "leave --cache out"),
    ("draft", OF_TEXT | {"cache": Path("x")}, "leave --cache out"),
    ("draft", UNSIZED | {"start": "/nowhere/at/all"}, "no checkpoint at"),
    ("eagle", {"kind": "eagle2"}, "kind 'eagle2'; choose eagle3, eagle1 or mtp"),
    ("eagle", {"kind": "mtp"}, "leave --inner, --taps and --draft-vocab out"),
    ("eagle", {"unrolled": 0}, "unrolled 0 is out of range"),
    ("eagle", {"draft_vocabulary": 0}, "draft vocabulary 0 is out of range"),
    ("eagle", {"taps": (2, 9)}, r"the taps \[2, 9\] are not all layers"),
    ("eagle", {"unrolled": 31}, "too short for 31 steps; give 33"),
    ("kangaroo", {"exit_layer": 6}, "exit layer 6 .*give 1 to 5"),
    ("kangaroo", {"exit_layer": -1}, "exit layer -1 .*give 1 to 5"),
    ("glide", {"inner": -1}, "inner -1 is out of range"),
    ("falcon", {"block_rows": 1}, "block rows 1 is out of range"),
    ("dflash", {"loss": "tv"}, "unknown loss 'tv'; choose forward-kl or text"),
    ("dflash", {"block_rows": 1}, "block rows 1 is out of range; give 2 to"),
    ("dflash", {"known_share": 1.5}, "known share 1.5 is out of range"),
    ("dflash", {"layers": 0}, "layers 0 is out of range"),
    ("dflash", {"taps": (1, 5)}, r"taps \[1, 5\] .* numbers from 0 to 4"),
    ("dflash", {"block_rows": 40}, "too short for blocks of 40; give 42"),
    ("diffusion", {"anchors": 0}, "anchors 0 is out of range"),
    ("diffusion", {"hidden_size": 40}, "give a multiple of 16"),
    ("diffusion", {"hidden_size": 8}, "hidden size 8 is out of range"),
    ("block", {"layers": 3}, "its decoder has 2; give --layers 1 to 2"),
    ("block", {"glancing": 1.5}, "glancing 1.5 is out of range"),
    ("stream", {"gamma": 0}, "gamma 0 is out of range"),
    ("stream", {"layers": 7}, "layers 7 is out of range; give 1 to 6"),
    ("stream", {"mode": "both"}, "unknown mode 'both'"),
    ("ppd", {"gamma": 0}, "prompt tokens 0 is out of range"),
    ("ppd", {"members": 65}, "ensemble 65 is out of range"),
    ("ppd", {"insertions": 0}, "insertions 0 is out of range; give 1 to 4096"),
    ("forecast", {"prefix": 0}, "prefix 0 is out of range; give 1 to 1024"),
]
SHORT = {
    **dict.fromkeys(("kangaroo", "glide"), (9, "too short for drafts of 5; give 10")),
    "stream": (4, "too short for 3 streams; give 5"),
    "ppd": (4, "too short for 2 prompt tokens; give 5"),
}


@dataclass(frozen=True)
class Kind:
    task: type[Task]
    settings: Any
    change: dict[str, Any]

    @property
    def changed(self) -> str:
        [name] = self.change
        return name.replace("_", " ")


SMALL = LayerSettings(inner=8, half=True)
OF_DRAFT = ModelSettings(layers=1, hidden_size=32, draft_vocab=30, on_policy_share=0.5)
OF_EAGLE = EagleSettings(draft_vocabulary=40, unrolled=3)
OF_DFLASH = DFlashSettings(layers=1, block_rows=4, anchors=6)
OF_DIFFUSION = DiffusionSettings(layers=1, block_rows=3, anchors=6, hidden_size=32)
OF_BLOCK = SourceBlockSettings(
    layers=1, block_rows=5, anchors=8, glancing=1.0, half=True
)
OF_STREAM = StreamSettings(gamma=3, lora_rank=8, prune_rank=2)
KINDS = {
    "draft": Kind(ModelTask, OF_DRAFT, {"loss": "tv"}),
    "eagle": Kind(EagleTask, OF_EAGLE, {"unrolled": 2}),
    "medusa": Kind(MedusaTask, HeadSettings(unrolled=3), {"unrolled": 2}),
    "kangaroo": Kind(KangarooTask, KangarooSettings(), {"exit_layer": 1}),
    "glide": Kind(GlideTask, SMALL, {"inner": 16}),
    "chimera": Kind(ChimeraTask, SMALL, {"inner": 16}),
    "falcon": Kind(FalconTask, FalconSettings(inner=8, half=True), {"block_rows": 3}),
    "dflash": Kind(DFlashTask, OF_DFLASH, {"anchors": 5}),
    "diffusion": Kind(DiffusionTask, OF_DIFFUSION, {"anchors": 5}),
    "block": Kind(SourceBlockTask, OF_BLOCK, {"glancing": 0.5}),
    "stream": Kind(StreamTask, OF_STREAM, {"gamma": 2}),
    "ppd": Kind(PpdTask, PpdSettings(gamma=2, members=2), {"members": 1}),
    "forecast": Kind(ForecastTask, ForecastSettings(gamma=2, prefix=4), {"prefix": 5}),
}


def test_the_table_has_all_tasks():
    named = {m.task for m in methods().values() if m.task}
    tasks = {load_object(name) for name in named if not name.endswith(":command")}
    assert tasks == {kind.task for kind in KINDS.values()}


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> Callable[[str], tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("targets")
    llama = save_checkpoint(folder / "llama", llama_config(num_hidden_layers=6))
    text, pairs = write_periodic(folder / "text.txt"), folder / "pairs.jsonl"
    line = {"prompt": " self for", "completion": " in range print" * 3}
    pairs.write_text(f"{json.dumps(line)}\n" * 16)
    source = save(folder / "t5", CONFIGS["t5"])
    both = {True: (str(source), pairs), False: (str(llama), text)}
    return lambda kind: both[kind == "block"]


def prepared(targets, name, output, changes=(), options=OPTIONS, data=None):
    kind, (target, text) = KINDS[name], targets(name)
    settings = replace(kind.settings, **dict(changes))
    return made(kind.task, target, output, [data or text], settings, options)


def weights_of(run) -> dict[str, Tensor]:
    return load_file(run.folder.path / run.folder.weights)


@pytest.mark.parametrize("name", KINDS)
def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(targets, tmp_path, name):
    whole = prepared(targets, name, tmp_path / "whole")
    whole.run()
    with pytest.raises(KeyboardInterrupt):
        # No validation follows the third step.
        prepared(targets, name, tmp_path / "cut").run(interrupt(3))
    assert (tmp_path / "cut" / STATE_FILE).is_file()
    kind = KINDS[name]
    other = prepared(targets, name, tmp_path / "cut", kind.change)
    with pytest.raises(OutputError, match=rf"other settings.*{kind.changed}"):
        other.run()
    cut = prepared(targets, name, tmp_path / "cut")
    cut.run()
    assert cut.step == OPTIONS.steps
    one, two = weights_of(whole), weights_of(cut)
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(two[key], tensor)
    half = getattr(kind.settings, "half", False)
    dtypes = {tensor.dtype for tensor in one.values() if tensor.dtype.is_floating_point}
    assert dtypes == {torch.float16 if half else torch.float32}
    assert names_in(cut) == names_in(whole)
    with pytest.raises(OutputError, match="holds a finished training"):
        prepared(targets, name, tmp_path / "cut")


def infinite_slope(loss: Tensor) -> Tensor:
    """Zero, whose gradient is not a number, for all that the loss depends on."""
    return (loss * 0).abs().sqrt()


@pytest.mark.parametrize(
    ("name", "spoil"),
    [(name, lambda loss: torch.nan) for name in KINDS] + [("stream", infinite_slope)],
    ids=[*KINDS, "gradient"],
)
def test_a_loss_that_is_no_number_keeps_what_was_learned(
    targets, tmp_path, monkeypatch, name, spoil
):
    run, calls = prepared(targets, name, tmp_path / "out"), []
    original = run.task.loss

    def loss(*arguments):
        found = original(*arguments)
        calls.append(1)
        return found + (spoil(found) if len(calls) == 3 else 0.0)

    monkeypatch.setattr(run.task, "loss", loss)
    message = "the loss of step 3 is not a number; the last good checkpoint is in"
    with pytest.raises(TrainingError, match=message):
        run.run()
    assert all(w.float().isfinite().all() for w in weights_of(run).values())
    assert torch.load(tmp_path / "out" / STATE_FILE, weights_only=True)["step"] == 2


@pytest.mark.parametrize("name", KINDS)
def test_weights_that_are_no_numbers_are_never_saved(targets, tmp_path, name):
    run = prepared(targets, name, tmp_path / "out")
    optimizers = run.task.optimizers(run)
    moved = [w for o in optimizers for group in o.param_groups for w in group["params"]]
    assert sorted(map(id, moved)) == sorted(map(id, run.weights.values()))
    if run.task.has_muon:
        assert all(w.ndim == 2 for w in optimizers[0].param_groups[0]["params"])
        tables = {id(run.weights[name]) for name in run.task.tables(run)}
        assert tables <= {id(w) for w in optimizers[-1].param_groups[0]["params"]}
    with torch.no_grad():
        for weight in run.weights.values():
            weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match=r"nothing had been learned.*check the"):
        run.run()


@pytest.mark.parametrize("last", ["training.pt", "model.safetensors", "config.json"])
def test_a_kill_in_the_last_save_is_mended_by_the_next_run(
    targets, tmp_path, monkeypatch, last
):
    """`last` is the last file that was written; weights and state may differ then."""
    write, options = RunFolder._replace_file, replace(OPTIONS, steps=2)

    def killed(folder, name, contents):
        write(folder, name, contents)
        if name != last:
            return
        if torch.load(folder.path / STATE_FILE, weights_only=True)["step"] == 2:
            raise SystemExit

    whole = prepared(targets, "kangaroo", tmp_path / "whole", options=options)
    whole.run()
    monkeypatch.setattr(RunFolder, "_replace_file", killed)
    with pytest.raises(SystemExit):
        prepared(targets, "kangaroo", tmp_path / "out", options=options).run()
    monkeypatch.undo()
    mended = prepared(targets, "kangaroo", tmp_path / "out", options=options)
    mended.run()
    assert names_in(mended) == names_in(whole)
    torch.testing.assert_close(weights_of(mended), weights_of(whole))


def names_in(run):
    return {file.name for file in run.folder.path.iterdir()}


@pytest.fixture(scope="module")
def kept(targets, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.raises(KeyboardInterrupt):
        prepared(targets, "stream", output).run(interrupt(0))
    return output


@pytest.fixture
def stopped(kept, tmp_path) -> Path:
    return shutil.copytree(kept, tmp_path / "stopped")


def test_an_interrupt_of_the_first_validation_can_be_gone_on_from(targets, stopped):
    assert json.loads((stopped / "streams.json").read_text())["step"] == 0
    run = prepared(targets, "stream", stopped)
    run.run()
    assert run.step == OPTIONS.steps


@pytest.mark.parametrize("content", [b"", b"not a state", None])
def test_a_damaged_state_is_refused(targets, stopped, content):
    (stopped / STATE_FILE).unlink()
    if content is not None:
        (stopped / STATE_FILE).write_bytes(content)
    before = (stopped / "streams.safetensors").read_bytes()
    with pytest.raises(OutputError, match="another folder"):
        prepared(targets, "stream", stopped).run()
    assert (stopped / "streams.safetensors").read_bytes() == before


def test_other_data_and_another_target_do_not_go_on(targets, stopped, tmp_path):
    other = tmp_path / "text.txt"
    other.write_text(PERIOD * 101)
    with pytest.raises(OutputError, match=r"other settings \(data\)"):
        prepared(targets, "stream", stopped, data=other).run()
    for name in (STATE_FILE, "streams.json", "streams.safetensors"):
        (stopped / name).unlink()
    with pytest.raises(CheckpointError, match="let it go on"):
        export(str(stopped), tmp_path / "bundle")
    config = llama_config(num_hidden_layers=6)
    target, (_, text) = save_checkpoint(tmp_path / "t", config, seed=9), targets("ppd")
    kind = KINDS["stream"]
    run = made(kind.task, str(target), stopped, [text], kind.settings, OPTIONS)
    with pytest.raises(OutputError, match="holds another target"):
        run.run()


def test_outputs_that_cannot_be_written(targets, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    for place, message in (("file/out", "cannot write"), ("taken", "has no streams")):
        with pytest.raises(OutputError, match=message):
            prepared(targets, "stream", tmp_path / place)


@pytest.mark.parametrize("name", ["draft", "eagle", "ppd", "block"])
def test_the_target_writes_what_is_missing(targets, tmp_path, name):
    prompt, end = " self for", " in range print"
    lines = [{"prompt": prompt}] * 8 + [{"prompt": prompt, "completion": end}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    texts = {}
    for way in ("alone", "all", "again"):
        changes = {"regenerate": way != "alone"}
        output = tmp_path / ("out" if way == "alone" else "all")
        run = prepared(targets, name, output, changes, data=data)
        texts[way] = run.corpus.training + run.corpus.validation
        assert all(text.is_written for text in texts[way])
        assert len({tuple(t.ids[: t.prompt_size]) for t in texts[way]}) == 1
        assert max(len(text.ids) for text in texts[way]) <= OPTIONS.sequence_length
    assert texts["again"] == texts["all"]
    words = Tokenizer.from_str(run.target.tokenizer)
    given = words.encode(end, add_special_tokens=False).ids
    kept = {
        way: [t for t in of_way if t.ids[t.prompt_size :][: len(given)] == given]
        for way, of_way in texts.items()
    }
    assert (len(kept["alone"]), kept["all"]) == (1, [])
    run.run()
    assert not (tmp_path / "all" / "written").exists()


def test_an_empty_completion_is_one_line(tmp_path):
    """A target without an end of text learns nothing from it."""
    config = llama_config(num_hidden_layers=6, eos_token_id=None)
    folder = save_checkpoint(tmp_path / "t", config)
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "for self in range", "completion": ""}')
    said = r"line 1 of .* has an empty completion"
    for regenerate in (False, True):
        settings = EagleSettings(regenerate=regenerate)
        with pytest.raises(errors.DataError, match=said):
            made(EagleTask, str(folder), tmp_path / "o", [data], settings, OPTIONS)


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_settings_that_cannot_be_used(targets, tmp_path, name, changes, message):
    with pytest.raises((OptionError, CheckpointError), match=message):
        prepared(targets, name, tmp_path / "out", changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", SHORT)
def test_sequences_that_are_too_short_or_too_long(targets, tmp_path, name):
    length, message = SHORT[name]
    for tokens, words in ((length, message), (600, "the target's 512 positions")):
        options = replace(OPTIONS, sequence_length=tokens)
        with pytest.raises(OptionError, match=words):
            prepared(targets, name, tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()


@cases(
    "options, message",
    ({"steps": 0}, "steps 0 is out of range"),
    ({"learning_rate": 2.0}, "learning rate 2.0 is out of range"),
    ({"validation_share": 0.9}, "validation share 0.9 is out of range"),
)
def test_options_of_all_trainings(options, message):
    with pytest.raises(OptionError, match=message):
        TrainingOptions(**options)


TWO = """
import sys
import torch
from accelerate import PartialState
from pathlib import Path
from tests.train.test_tasks import TOGETHER, alike
torch.cpu.get_capabilities = dict
target, text, output = sys.argv[1:]
for name in TOGETHER:
    alike(name, target, Path(text), Path(output) / name).run()
assert PartialState().num_processes == 2
"""
TOGETHER = {
    "draft": replace(KINDS["draft"].settings, regenerate=True),
    "eagle": KINDS["eagle"].settings,
    "stream": KINDS["stream"].settings,
}


def alike(name, target, text, output):
    options = replace(OPTIONS, steps=2)
    return made(KINDS[name].task, target, output, [text], TOGETHER[name], options)


def test_two_processes_learn_what_one_learns(targets, tmp_path, monkeypatch):
    """Each has a part of batch and texts; bfloat16 would round parts otherwise."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    target, text = targets("draft")
    script = tmp_path / "two.py"
    script.write_text(TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", script, target, text, tmp_path / "two"]
    settings_of_machine = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings_of_machine}
    printed(*command, env=environment, timeout=240)
    for name in TOGETHER:
        one = alike(name, target, text, tmp_path / "one" / name)
        one.run()
        expected = weights_of(one)
        one.folder.path = tmp_path / "two" / name
        for key, tensor in weights_of(one).items():
            # They differ by 7e-8 at most. Half of a batch would differ by 1e-3.
            distance = (tensor.float() - expected[key].float()).norm()
            assert distance <= 1e-5 * expected[key].float().norm() + 1e-9, key


def test_processes_that_would_be_alone_are_refused(targets, tmp_path, monkeypatch):
    """Each would learn everything, and write into the same folder."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = prepared(targets, "draft", tmp_path / "out")
    with pytest.raises(OptionError, match="2 processes were started, and each"):
        run.run()
    with pytest.raises(OptionError, match="ACCELERATE_USE_CPU=true"):
        prepared(targets, "draft", tmp_path / "out", {"regenerate": True})
