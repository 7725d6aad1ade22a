import itertools
import json
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

import jetdraft as package
from jetdraft import Bundle, DataError
from jetdraft.cli.console import ProgressBars
from tests import cases
from tests.programs import ROOT, assert_refused, jetdraft, succeed
from tests.quant.test_sensitivity import TEXT
from tests.server.serving import until
from tests.tiny import llama_config, save_checkpoint, tokenizer
from tools.recipes.__main__ import main as command
from tools.recipes.bars import bars
from tools.recipes.picture import Panel, draw_points
from tools.recipes.quality import Quality, compare
from tools.recipes.report import PairFigures, Report, TargetFigures
from tools.texts import SIGNS, WHOLE_TEXT, TextFigures, main, text_figures

recipes = partial(jetdraft, command=command)
RECIPES = "int4-rtn-b32,int4-gptq-b32,int8-rtn-b32"
POINTS = {"small": (0.1, 100.0), "beaten": (0.2, 120.0), "exact": (0.01, 400.0)}
POINTS |= {"as good": (0.1, 100.0), "middle": (0.05, 200.0), "larger": (0.05, 210.0)}
ENGLISH, RUSSIAN = "the self the 1 2", "да the"


@pytest.fixture(scope="module")
def report(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    target = save_checkpoint(folder / "target", llama_config(num_hidden_layers=1))
    (folder / "text.txt").write_text(TEXT)
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressBars, "__call__", lambda _, *step: steps.append(step))
        result = recipes(
            *(target, "--drafter", pair.drafter, "--threads=1"),
            *("--recipes", RECIPES, "--drafter-recipes", "int4-rtn-b32"),
            *("--text", folder / "text.txt", "--calibration", folder / "text.txt"),
            *("--output", folder / "out.json", "--picture", folder / "front.png"),
        )
    assert result.exit_code == 0, result.stderr
    _, done, total = zip(*steps, strict=True)
    assert list(done) == list(range(total[0])), "every step is announced"
    return json.loads((folder / "out.json").read_text()), result.stdout, folder


def test_every_recipe_has_a_row(report):
    found, shown, folder = report
    if find_spec("matplotlib"):
        assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    assert [row["recipe"] for row in found["rows"]] == ["none", *RECIPES.split(",")]
    for row in found["rows"]:
        assert set(row["pass_ms"]) == {"1", "2", "4", "8"}
        assert min(row["pass_ms"].values()) > 0
        assert row["resident_mb"] > 20
        assert row["recipe"] in shown


def test_the_unquantized_model_is_its_own_measure(report):
    full, *rest = report[0]["rows"]
    assert full["kl_mean"] == full["kl_p99"] == 0.0
    assert full["top1_agreement"] == 1.0
    assert all(row["kl_mean"] > 0 for row in rest)
    assert all(row["kl_p99"] >= row["kl_mean"] for row in rest)


def test_bits_cost_bytes_and_save_quality(report):
    rows = {row["recipe"]: row for row in report[0]["rows"]}
    four, gptq, eight = (rows[name] for name in RECIPES.split(","))
    assert four["bytes"] < eight["bytes"] < rows["none"]["bytes"]
    assert eight["kl_mean"] < 0.1 * four["kl_mean"]
    assert eight["top1_agreement"] > four["top1_agreement"]
    # An algorithm costs no bytes.
    assert abs(gptq["bytes"] / four["bytes"] - 1) < 0.01
    # Quantized activations cost a model this small as much again.
    assert gptq["kl_mean"] < four["kl_mean"]


def test_every_combination_of_a_pair(report):
    pairs = report[0]["pairs"]
    assert {(pair["target"], pair["drafter"]) for pair in pairs} == {
        (target, drafter)
        for target in ("none", *RECIPES.split(","))
        for drafter in ("none", "int4-rtn-b32")
    }
    assert all(0 <= pair["acceptance_rate"] <= 1 for pair in pairs)
    assert all(pair["speedup"] > 0 for pair in pairs)


@cases(
    "option, value, said",
    ("--recipes", "int4-b31", "unknown block size 31"),
    ("--drafter-recipes", "int9", "unknown quantization 'int9'"),
    ("--drafter-recipes", "int4", "give --drafter too"),
    ("--text", "nothing.txt", "no file at nothing.txt"),
    ("--calibration", "nothing.txt", "no file at nothing.txt"),
    ("--output", "no/where", "its folder is missing"),
)
def test_bad_input_is_refused(pair, tmp_path, option, value, said):
    out = ("--output", tmp_path / "out") if option != "--output" else ()
    assert_refused(recipes(pair.target, *out, option, value), said)
    assert not (tmp_path / "out").exists()


def test_a_text_without_tokens_is_refused(pair, tmp_path):
    out = ("--output", tmp_path / "out", "--recipes", "int4-gptq-b32")
    for option, text in itertools.product(("--text", "--calibration"), ("", " \n")):
        (tmp_path / "empty.txt").write_text(text)
        result = recipes(pair.target, option, tmp_path / "empty.txt", *out)
        assert_refused(result, "has no text in it")
    assert not (tmp_path / "out").exists()


def test_a_place_with_something_else_is_refused(pair, tmp_path):
    (tmp_path / "precious").write_text("precious")
    result = recipes(pair.target, "--output", tmp_path)
    assert_refused(result, "is a folder")
    result = recipes(pair.target, "-o", tmp_path / "precious")
    assert_refused(result, "holds no report")
    assert (tmp_path / "precious").read_text() == "precious"


def test_without_a_text_the_model_writes_one(pair, report, tmp_path):
    out = shutil.copy(report[2] / "out.json", tmp_path / "out")
    twice = "int8-gptq-b32,none,int8-gptq-b32"
    how = ("--recipes", twice, "--output", out, "--threads=1")
    succeed(pair.drafter, *how, command=command)
    found = json.loads(out.read_text())
    assert found["text"] == "a text of the model"
    assert [row["recipe"] for row in found["rows"]] == ["none", "int8-gptq-b32"]
    assert 0 < found["rows"][1]["kl_mean"] < 0.1


def test_a_run_that_is_ended_leaves_nothing(pair, tmp_path):
    started = [sys.executable, "-m", "tools.recipes", str(pair.target)]
    started += ["--recipes", "int4", "--output", str(tmp_path / "out")]
    process = subprocess.Popen(started, cwd=ROOT)
    until(lambda: [*tmp_path.iterdir()])
    process.terminate()
    assert process.wait(60) == 143
    assert list(tmp_path.iterdir()) == []


def row(recipe, size, kl, top1, times):
    relative = dict(zip((1, 2, 4, 8), times, strict=True))
    return TargetFigures(recipe, size, 0.0, kl, 0.0, top1, 0.0, {}, relative)


def test_each_line_has_the_best_comparable_recipe():
    rows = [
        row("none", 800, 0.0, 1.0, (1.0, 1.0, 1.0, 1.0)),
        row("int8-rtn-b32", 200, 0.001, 0.99, (2.0, 2.0, 2.0, 2.0)),
        row("int8-gptq-b32", 200, 0.001, 0.98, (2.0, 2.0, 2.0, 2.0)),
        row("int4-rtn-b32", 100, 0.04, 0.9, (4.0, 4.0, 2.0, 2.0)),
        row("int4-gptq-b128", 102, 0.01, 0.9, (5.0, 4.0, 3.0, 2.0)),
        row("int4-k_quant-b32", 103, 0.001, 0.9, (5.0, 4.0, 3.0, 2.0)),
    ]
    pairs = [
        PairFigures("none", "none", 0.8, 1.0, 1.0),
        PairFigures("none", "int4-rtn-b32", 0.77, 1.0, 1.0),
        PairFigures("int8-rtn-b32", "none", 0.7, 1.0, 1.0),
        PairFigures("int8-rtn-b32", "int4-rtn-b32", 0.71, 1.0, 1.0),
    ]
    assert bars(Report("t", "d", "x", rows, pairs)) == [
        "best int4: int4-gptq-b128, 0.25 of the KL of int4-rtn-b32 in 1.02 of its "
        "bytes, 1.25x as fast at 1 row, 1.50x at 4",
        "best int8: int8-rtn-b32, the same best token in 0.9900 of places",
        "drafter int4-rtn-b32: acceptance 0.740, -0.010 to its floats",
    ]


def test_what_is_alone_is_not_compared():
    floats = row("none", 8, 0.0, 1.0, (1.0,) * 4)
    four_bits = row("int4-rtn-b32", 100, 0.04, 0.9, (4.0,) * 4)
    for alone, lines in (floats, []), (four_bits, ["best int4: int4-rtn-b32"]):
        assert bars(Report("t", None, "x", [alone])) == lines


def test_the_front_has_the_points_that_no_point_beats():
    front = [(0.01, 400.0), (0.05, 200.0), (0.1, 100.0)]
    assert Panel("MB", POINTS, rises=False).front() == front
    assert Panel("MB", POINTS, rises=True).front() == front[:1]


def test_a_picture_names_each_point_once(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn, save = [], figure.savefig

    def seen(picture, *arguments, **options):
        drawn.append(picture)
        save(picture, *arguments, **options)

    monkeypatch.setattr(figure, "savefig", seen)
    panels = [Panel("MB", POINTS, False), Panel("speed-up", POINTS, True)]
    draw_points(tmp_path / "front.png", panels, "mean KL")
    (picture,) = drawn
    (legend,) = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == list(POINTS)
    assert [axes.get_xlabel() for axes in picture.axes] == ["mean KL (log scale)"] * 2
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_kl_top_1_and_perplexity_of_two_distributions():
    p = np.log(np.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]], np.float32)) + 3
    q = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]], np.float32)) - 7
    quality = Quality()
    quality.add(p, q, [1])
    first = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert quality.kl_mean == pytest.approx(first / 2, abs=1e-6)
    assert quality.kl_p99 == pytest.approx(0.99 * first, abs=1e-6)
    assert quality.top1_agreement == 0.5
    assert quality.perplexity == pytest.approx(2.0, abs=1e-5)


def test_a_model_agrees_with_itself(bundle, model):
    other = package.load(bundle, threads=1)
    windows = [list(range(1, 100)), [5, 6, 7]]
    quality = compare(model.parts.target, other.parts.target, windows)
    assert (quality.kl_mean, quality.top1_agreement) == (0.0, 1.0)
    assert quality.counted == 98 + 2
    assert model.parts.target.cache.length == 0


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer().save(str(path))
    return path


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str | bytes):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def rows_of(file, *texts, **more) -> dict[tuple[str, str], TextFigures]:
    return {(row.text, row.script): row for row in text_figures(file, texts, **more)}


def test_every_character_and_token_counts_once(file, write):
    rows = rows_of(file, write("en", ENGLISH), write("ru", RUSSIAN))
    for name, text in (("en", ENGLISH), ("ru", RUSSIAN)):
        whole = rows.pop((name, WHOLE_TEXT))
        ids = tokenizer().encode(text, add_special_tokens=False).ids
        assert (whole.characters, whole.tokens) == (len(text), len(ids))
        parts = [row for (of, _), row in rows.items() if of == name]
        assert sum(part.characters for part in parts) == whole.characters
        assert sum(part.tokens for part in parts) == whole.tokens
    assert {script for _, script in rows} == {"latin", "cyrillic", SIGNS}


def test_the_whole_text_counts_though_the_file_truncates(file, write, tmp_path):
    made = tokenizer()
    made.enable_truncation(2)
    made.enable_padding(length=2)
    made.save(str(tmp_path / "tokenizer.json"))
    text = write("en", ENGLISH)
    assert rows_of(tmp_path / "tokenizer.json", text) == rows_of(file, text)


def test_a_script_without_merges_takes_a_token_for_each_byte(file, write):
    rows = rows_of(file, write("ru", RUSSIAN))
    assert rows["ru", "cyrillic"].tokens == 4
    assert rows["ru", "cyrillic"].characters_per_token == 0.5
    assert rows["ru", "latin"].characters_per_token == 4.0  # " the"


def test_a_draft_vocabulary_covers_the_tokens_that_are_in_it(file, write):
    the, text = tokenizer().encode(" the").ids, write("en", " the the self")
    row = rows_of(file, text, draft_vocabulary=the)["en", WHOLE_TEXT]
    assert row.coverage == 2 / row.tokens
    assert rows_of(file, text)["en", WHOLE_TEXT].coverage is None


def test_the_most_frequent_tokens_are_measured_on_other_text(file, write):
    """The first half repeats a token that the second half lacks."""
    row = rows_of(file, write("en", " the" * 8 + " self" * 8), most_frequent=1)
    assert (row["en", WHOLE_TEXT].tokens, row["en", WHOLE_TEXT].coverage) == (16, 0.0)
    mixed = rows_of(file, write("en", "д " + " the" * 40), most_frequent=1)
    assert mixed["en", "cyrillic"].coverage is None  # the second half has none
    both = rows_of(file, write("en", " the self" * 8), most_frequent=2)
    assert both["en", WHOLE_TEXT].coverage == 1.0


@pytest.mark.parametrize("text", ["", "1", b"\xff\xfe"])
def test_a_file_without_text_is_refused(file, write, text):
    with pytest.raises(DataError, match="x"):
        text_figures(file, [write("x", text)])


def test_what_is_no_tokenizer_is_refused(write):
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        text_figures(write("tokenizer.json", "{}"), [write("x", ENGLISH)])


def test_the_program_says_what_the_tokenizer_makes_of_texts(bundle, write, tmp_path):
    text = write("english.txt", "the self the self 12")
    lines = jetdraft(bundle, text, command=main).stdout.splitlines()
    shown = [line.split()[:2] for line in lines]
    assert shown == [["english.txt", part] for part in ("all", "latin", "signs")]
    fields = json.loads(jetdraft(bundle, text, "--json", command=main).stdout)
    assert fields[0]["characters"] == 20
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    text = write("english.txt", " the self" * 40)
    how = (tmp_path, text, "--draft-vocab", 1, "--json")
    assert json.loads(jetdraft(*how, command=main).stdout)[0]["coverage"] == 0.5
    assert_refused(jetdraft(bundle, tmp_path / "x", command=main), "no data file")
    (tmp_path / "tokenizer.json").unlink()
    assert_refused(jetdraft(*how, command=main), "is not a tokenizer.json")


def test_the_draft_vocabulary_of_a_bundle_is_looked_for(bundle, write, monkeypatch):
    the = tokenizer().encode(" the", add_special_tokens=False).ids
    monkeypatch.setattr(Bundle, "draft_vocabulary", lambda *_: np.array(the))
    text = write("english.txt", " the self" * 40)
    fields = json.loads(jetdraft(bundle, text, "--json", command=main).stdout)
    assert fields[0]["coverage"] == 0.5
