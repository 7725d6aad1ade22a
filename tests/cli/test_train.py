import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import click
import pytest

from jetdraft.cli.train import command as trainers
from tests import cases
from tests.programs import INTERRUPTIBLE, assert_refused, jetdraft, succeed, without
from tests.tiny import llama_config, save_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
QUICK = ("--gamma", "2", "--sequence-length", "24", "--batch-size", "2")
DRAFTER = ("--sequence-length", 24, "--batch-size", 2, "--steps", 2)
COMMON = {
    *("--data", "--steps", "--batch-size", "--sequence-length", "--learning-rate"),
    *("--validation-share", "--validate-every", "--seed", "--output"),
}


@pytest.fixture(scope="module")
def target(pair) -> Path:
    return pair.target


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("for self in range print return " * 60)
    return file


def test_from_a_text_to_drafts(target, text, tmp_path):
    checkpoint, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    command = ("train", "stream", target, "--data", text, "-o", checkpoint)
    trained = succeed(*command, "--steps", 3, *QUICK)
    assert "training 1152 weights of the streams" in trained.stderr
    assert "step 3: validation loss" in trained.stderr
    sizes = ("--capacity", 128, "--max-width", 32)
    exported = succeed("export", checkpoint, "-o", bundle, *sizes)
    assert "stream" in exported.stderr
    shown = jetdraft("check", "--no-run", bundle).stdout
    assert all(w in shown for w in ("streams  ", " gamma 2,", " layers 2,", "lossless"))
    how = ("--max-new-tokens", "24", "--threads", "1", "--json")
    write = ("generate", bundle, "-p", " self", *how, "--method")
    plain, drawn = (json.loads(jetdraft(*write, m).stdout) for m in ("none", "stream"))
    assert drawn["token_ids"] == plain["token_ids"]
    assert drawn["stats"]["drafted_tokens"] > 0


@pytest.mark.skipif(not hasattr(signal, "SIGINT"), reason="needs signals")
def test_ctrl_c_saves_and_says_how_to_go_on(target, text, tmp_path):
    output = tmp_path / "out"
    words = ("train", "stream", target, "--data", text, "-o", output, *QUICK)
    steps = ("--steps", "100000", "--validate-every", "5")
    command = [sys.executable, "-c", INTERRUPTIBLE, *map(str, words), *steps]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 5"):
                break
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command again to resume" in rest
    assert json.loads((output / "streams.json").read_text())["step"] >= 5
    assert (output / "training.pt").is_file()


def test_a_trigram_table_is_counted_and_used(bundle, text, tmp_path):
    table = tmp_path / "table.npz"
    done = succeed("train", "trigram", text, "--bundle", bundle, "-o", table)
    assert "pairs" in done.stderr
    how = ("--method", "trigram", "--drafting", f"table={table}")
    succeed("generate", bundle, "-p", " the self", *how, "-n", 8, "--threads", 1)


@cases(
    "name, content, words",
    ("missing.txt", None, "no data file"),
    ("short.txt", b"", "fewer than three tokens"),
    ("binary.txt", b"\xff\xfe\x00", "not text"),
)
def test_a_bad_corpus_leaves_no_table(bundle, tmp_path, name, content, words):
    corpus, table = tmp_path / name, tmp_path / "table.npz"
    if content is not None:
        corpus.write_bytes(content)
    done = jetdraft("train", "trigram", corpus, "--bundle", bundle, "-o", table)
    assert_refused(done, words)
    assert not list(tmp_path.glob("table*"))


def test_a_table_replaces_no_file(bundle, text):
    done = jetdraft("train", "trigram", text, "--bundle", bundle, "-o", text)
    assert_refused(done, "exists; choose another file")
    assert text.read_text().startswith("for self")


def test_an_acceptance_head_is_learned_and_used(bundle, tmp_path):
    own = shutil.copytree(bundle, tmp_path / "own")
    how = ("--max-new-tokens", "40", "--threads", "1")
    assert "drafted tokens" in succeed("train", "acceptance", own, *how).stderr
    learned = ("--method", "draft", "--drafting", "stopping=learned", *how)
    assert jetdraft("generate", own, "-p", " the self", *learned).exit_code == 0
    missing = jetdraft("generate", bundle, "-p", " x", *learned)
    assert_refused(missing, "train acceptance")


def test_trainers_are_listed_without_torch():
    listed, refused, table = (
        without("torch", "train", *arguments)
        for arguments in (["--help"], ["stream", "x"], ["trigram", "--help"])
    )
    assert listed.returncode == table.returncode == 0
    assert all(name in listed.stdout for name in ("stream", "acceptance", "trigram"))
    assert refused.returncode == 2
    said = "error: training needs torch; pip install 'jetdraft[cpu,train]'\n"
    assert refused.stderr == said


def test_a_head_from_a_text(tmp_path, text):
    target = save_checkpoint(tmp_path / "target", llama_config(num_hidden_layers=6))
    sizes = ("--sequence-length", 24, "--batch-size", 2, "--unrolled", 2, "--steps", 2)
    command = ("train", "eagle", target, "--data", text, "-o", tmp_path / "head")
    trained = succeed(*command, "--draft-vocab", 50, *sizes)
    assert "weights of a head (eagle3) over 50 tokens" in trained.stderr
    assert "step 2: validation loss" in trained.stderr
    assert "right by place" in trained.stderr
    fields = json.loads((tmp_path / "head" / "config.json").read_text())
    assert fields["draft_vocab_size"] == 50
    other = (*command[:-1], tmp_path / "other")
    assert_refused(jetdraft(*other, *sizes, "--kind", "eagle9"), "unknown kind")
    assert_refused(jetdraft(*other, *sizes, "--taps", "a,b"), "comma list of integers")


def test_a_drafter_from_a_text(target, tmp_path, text):
    command = ("train", "draft", target, "--data", text, "-o", tmp_path / "drafter")
    sizes = ("--layers", 1, "--hidden-size", 32, "--draft-vocab", 50)
    trained = succeed(*command, *sizes, *DRAFTER)
    assert "training a drafter of width 32, layers: 1" in trained.stderr
    assert "step 2: validation loss" in trained.stderr
    assert "accepted by place at T = 1" in trained.stderr
    assert "a drafter of 2 steps" in trained.stderr
    fields = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert fields["hidden_size"] == 32
    own, expected = (
        json.loads((folder / "tokenizer.json").read_text())["model"]
        for folder in (tmp_path / "drafter", target)
    )
    assert own == expected
    other = (*command[:-1], tmp_path / "layers", "--from-layers", "0,2")
    layers = succeed(*other, *DRAFTER)
    assert "training a drafter of width 64, layers: 2" in layers.stderr


@pytest.mark.parametrize("name", trainers.list_commands(click.Context(trainers)))
def test_all_trainings_have_the_same_options_and_a_row_of_their_own(name):
    command = trainers.get_command(click.Context(trainers), name)
    options = [p for p in command.params if isinstance(p, click.Option)]
    flags = [next(n for n in p.opts if n.startswith("--")) for p in options]
    if name not in ("trigram", "acceptance", "use"):
        assert set(flags) >= COMMON
    own = ", ".join(f"`{flag}`" for flag in flags if flag not in COMMON)
    assert f"| `{name}` | {own} |" in PAGE.read_text()


def test_ctrl_c_before_the_first_step_is_one_line(target, text, tmp_path, monkeypatch):
    write = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("jetdraft.train.task.continuations", write)
    command = ("train", "draft", target, "--data", text, "-o", tmp_path / "out")
    stopped = jetdraft(*command, "--regenerate", *DRAFTER)
    assert stopped.exit_code == 130
    assert stopped.stderr == "stopped; run the same command again to resume\n"
    monkeypatch.undo()
    assert jetdraft(*command, "--regenerate", *DRAFTER).exit_code == 0


@cases(
    "line, said",
    ("stream --sequence-length 5", "too short for 4 streams"),
    ("draft --from-layers a,b", "is not a comma list of integers"),
    ("draft --beta 0.3", "leave --beta out"),
    ("kangaroo --exit-layer 9", "give 1 to 2"),
)
def test_bad_options_are_one_line_before_anything_is_written(
    target, text, tmp_path, line, said
):
    name, *options = line.split()
    output = tmp_path / "out"
    result = jetdraft("train", name, target, "--data", text, "-o", output, *options)
    assert_refused(result, said)
    assert not output.exists()
