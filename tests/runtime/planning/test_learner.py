import gc
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

import jetdraft
from jetdraft import Bundle, OptionError, StoreError
from jetdraft.learning import lessons
from jetdraft.learning.lessons import EARLY_TOKENS, VERDICT_TOKENS, Choice, Lessons
from tests.toy_drafter import arrays_of, choose, put_on_trial, random_arrays

PROMPTS = ("The robot sees", "A man likes", "Hello", "Sue finds a", "The cat", "Go")
DRAFTED = {"method": "draft", "num_draft_tokens": 4, "max_new_tokens": 48}
WRONG = {
    "another shape": {"model.embed_tokens.weight": np.ones((3, 3), np.float32)},
    "another type": {"model.embed_tokens.weight": np.ones((384, 32), np.float16)},
    "an unknown array": {"no such weight": np.ones((4, 4), np.float32)},
    "not a number": {"model.embed_tokens.weight": np.full((384, 32), np.nan, "f4")},
}


@pytest.fixture(scope="module")
def plain(toy):
    with jetdraft.load(toy, threads=1) as model:
        return {p: model.generate(p, method="none", max_new_tokens=48) for p in PROMPTS}


def load(toy, folder, **options):
    return jetdraft.load(toy, threads=1, learn=folder, **options)


@pytest.fixture
def model(toy, tmp_path):
    with load(toy, tmp_path) as model:
        yield model


def read(folder, model):
    contract = model.bundle.target.contract
    return Lessons(folder, model.bundle.tokenizer_sha256, contract.vocab_size).read()


def chosen(folder, toy, arrays):
    """Put weights in a folder as if their trial were over, and they were kept."""
    name = put_on_trial(folder, toy, arrays)
    choose(folder, Choice(name, None, lessons.drafter_sha256(Bundle.open(toy))))


def rounds(model, count, plain, **options):
    """Generate texts until `count` drafted tokens were evaluated; gives the rate."""
    accepted = evaluated = number = 0
    while evaluated < count:
        prompt = PROMPTS[number % len(PROMPTS)]
        result = model.generate(prompt, **{**DRAFTED, **options})
        assert result.token_ids == plain[prompt].token_ids
        share = result.stats.by_method["draft"]
        accepted += share.accepted_tokens
        evaluated += share.evaluated_tokens
        number += 1
    return accepted / evaluated


def test_nothing_is_kept_without_the_option(toy, tmp_path, monkeypatch, plain):
    monkeypatch.chdir(tmp_path)
    with jetdraft.load(toy, threads=1) as model:
        assert model.parts.learning is None
        before = {file: file.stat().st_mtime_ns for file in toy.rglob("*")}
        rounds(model, 50, plain)
        assert {file: file.stat().st_mtime_ns for file in toy.rglob("*")} == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tree", ["chain", "best"])
@pytest.mark.parametrize("exact", [True, False])
def test_wrong_places_are_where_the_target_spoke(model, tmp_path, tree, exact):
    result = model.generate(
        "The robot sees", **DRAFTED, drafting={"tree": tree}, exact=exact
    )
    [one] = read(tmp_path, model)
    prompt = model.parts.text.encode("The robot sees")
    text = [*prompt, *result.token_ids]
    assert one.tokens.tolist() == text
    assert len(one.places) == len(set(one.places))
    assert min(one.places) >= len(prompt)
    share = result.stats.by_method["draft"]
    wrong = share.evaluated_tokens - share.accepted_tokens
    assert abs(len(one.places) - wrong) <= 1, "the last may be beyond the limit"
    assert one.ids.shape == (len(one.places), lessons.CANDIDATES)
    for place, ids, logits in zip(one.places, one.ids, one.logits, strict=True):
        again = model.generate(
            token_ids=text[:place], method="none", max_new_tokens=1, logprobs=1
        )
        assert ids[0] == text[place] == again.token_ids[0]
        assert (np.diff(logits) <= 0).all()


def test_long_texts_keep_their_end(model, tmp_path, monkeypatch):
    monkeypatch.setattr("jetdraft.runtime.planning.planner.MAX_TOKENS", 24)
    monkeypatch.setattr("jetdraft.runtime.planning.planner.MAX_PLACES", 3)
    result = model.generate("The robot sees", **DRAFTED)
    [lesson] = read(tmp_path, model)
    assert lesson.tokens.tolist() == result.token_ids[-24:]
    assert 1 <= len(lesson.places) <= 3
    assert lesson.ids[:, 0].tolist() == lesson.tokens[lesson.places].tolist()


def test_each_user_has_lessons(model, tmp_path):
    model.generate("The robot sees", method="none", max_new_tokens=32)
    assert read(tmp_path, model) == [], "plain decoding teaches nothing"
    model.generate("The robot sees", **DRAFTED, drafting={"user": "ann"})
    assert len(read(tmp_path, model)) == 1
    kept = Lessons(tmp_path, model.bundle.tokenizer_sha256, 384)
    assert (kept.clear("bob"), kept.clear("ann")) == (0, 1)


def test_new_weights_wait_for_a_rate_before_them(toy, tmp_path, plain):
    same = {"model.embed_tokens.weight": arrays_of(toy)["model.embed_tokens.weight"]}
    with load(toy, tmp_path) as model:
        name, weights = put_on_trial(tmp_path, toy, same), model.parts.learning.weights
        target = model.parts.target.sessions.any.session
        before = model.parts.drafter.sessions.any.session
        rounds(model, VERDICT_TOKENS, plain)
        assert model.parts.drafter.sessions.any.session is before
        rounds(model, 1, plain)
        assert model.parts.drafter.sessions.any.session is not before
        assert model.parts.target.sessions.any.session is target
        rounds(model, VERDICT_TOKENS - 1, plain)
        choice = weights._sets.read_choice()
        assert (choice.name, choice.before) in ((name, None), ("", None))
    with load(toy, tmp_path) as model:  # what was kept drafts from the beginning
        rounds(model, 1, plain)
        assert model.parts.learning.weights._name == choice.name


def test_bad_weights_are_taken_back(toy, tmp_path, plain, caplog):
    caplog.set_level("INFO", "jetdraft.learning")
    with load(toy, tmp_path) as model:
        sets = model.parts.learning.weights._sets
        good = rounds(model, VERDICT_TOKENS, plain)
        name = put_on_trial(tmp_path, toy, random_arrays(toy))
        assert rounds(model, EARLY_TOKENS, plain) < good / 2
        assert sets.read_choice().name == "", "the verdict needs no more tokens"
        assert not (tmp_path / name).exists()
        assert rounds(model, VERDICT_TOKENS, plain) == pytest.approx(good, abs=0.1)
    learned, verdict, own = caplog.messages
    assert learned == f"the learned set {name[:12]} drafts on trial"
    assert verdict.startswith(f"the learned set {name[:12]} is taken back: 0.")
    assert own == "the bundle's own drafter drafts"


def test_a_swap_computes_the_drafters_buffers_again(toy, tmp_path):
    arrays, prompt = random_arrays(toy, 3), "The robot sees"
    chosen(tmp_path / "new", toy, arrays)
    with load(toy, tmp_path / "new") as model:
        fresh = model.generate(prompt, **DRAFTED).stats.to_json()
    with load(toy, tmp_path / "old") as model:
        model.generate(prompt, **DRAFTED)
        chosen(tmp_path / "old", toy, arrays)
        swapped = model.generate(prompt, **DRAFTED).stats.to_json()
    for key in ("drafted_tokens", "accepted_by_position", "rounds_by_choice"):
        assert swapped[key] == fresh[key]


@pytest.mark.parametrize("arrays", WRONG.values(), ids=WRONG)
def test_weights_that_do_not_fit_are_refused(model, toy, tmp_path, plain, arrays):
    rounds(model, VERDICT_TOKENS, plain)
    put_on_trial(tmp_path, toy, arrays)
    with pytest.warns(UserWarning, match="no weights were swapped"):
        rounds(model, 1, plain)
    rounds(model, VERDICT_TOKENS, plain)
    assert model.parts.learning.weights._sets.read_choice().name == ""


def test_huge_weights_change_no_text(model, toy, tmp_path, plain):
    """Numbers that overflow give logits that are no numbers."""
    huge = {name: array * 1e30 for name, array in random_arrays(toy).items()}
    rounds(model, VERDICT_TOKENS, plain)
    put_on_trial(tmp_path, toy, huge)
    rounds(model, EARLY_TOKENS, plain)
    rounds(model, EARLY_TOKENS, plain, temperature=0.0, drafting={"tree": "best"})


def test_a_trial_against_itself_is_none(model, toy, tmp_path, plain):
    """Nobody writes such a choice, but it must not end a text."""
    name = put_on_trial(tmp_path, toy, random_arrays(toy))
    choose(tmp_path, Choice(name, name, lessons.drafter_sha256(Bundle.open(toy))))
    rounds(model, EARLY_TOKENS, plain)
    assert model.parts.learning.weights._name == name


def test_poisoned_lessons_change_no_text(model, tmp_path, plain):
    rounds(model, 20, plain)
    with (
        closing(sqlite3.connect(tmp_path / lessons.LESSONS_FILE)) as database,
        database,
    ):
        database.execute("update lessons set ids = ?, tokens = 'x'", (b"x" * 7,))
    rounds(model, 20, plain)
    (tmp_path / lessons.LESSONS_FILE).write_bytes(b"\x00\xff" * 5000)
    with pytest.warns(UserWarning, match="could not be kept"):
        rounds(model, 20, plain)


def test_later_twins_take_the_same_weights(toy, tmp_path, plain):
    chosen(tmp_path, toy, random_arrays(toy))
    with load(toy, tmp_path) as model:
        for _ in range(2):  # the first takes its session with it
            with model.twin() as twin:
                assert rounds(twin, 50, plain) < 0.4
            del twin
            gc.collect()


def test_twins_take_the_same_weights(model, toy, tmp_path, plain):
    twin = model.twin()
    rounds(model, VERDICT_TOKENS, plain)
    put_on_trial(tmp_path, toy, random_arrays(toy))
    rounds(model, 1, plain)
    assert rounds(twin, 1, plain) < 0.4, "the twin swaps too"
    rounds(twin, EARLY_TOKENS, plain)
    assert model.parts.learning.weights._sets.read_choice().name == ""
    rounds(model, 1, plain)
    rounds(twin, 1, plain)
    mine, its = (m.parts.drafter.sessions.any.session for m in (model, twin))
    assert mine is its
    twin.close()


USER = """\
import sys
import jetdraft

with jetdraft.load(sys.argv[1], threads=1, learn=sys.argv[2]) as model:
    for number in range(12):
        result = model.generate(
            f"The robot sees {number}", method="draft", num_draft_tokens=4,
            max_new_tokens=48, drafting={"user": sys.argv[3]},
        )
        print(result.text)
"""


def test_two_processes_share_a_folder(toy, tmp_path):
    put_on_trial(tmp_path / "learned", toy, random_arrays(toy))
    program = [sys.executable, "-W", "error", "-c", USER, toy, tmp_path / "learned"]
    users = [
        subprocess.Popen([*program, user], stdout=subprocess.PIPE)
        for user in ("ann", "bob")
    ]
    one, other = (user.communicate()[0] for user in users)
    assert [user.returncode for user in users] == [0, 0]
    assert one == other != b""
    with load(toy, tmp_path / "learned") as model:
        kept = model.parts.learning.lessons
        assert (len(kept.read()), kept.clear("ann")) == (24, 12)


def test_a_drafter_is_needed(toy, tmp_path):
    with pytest.raises(OptionError, match="only a drafter model, or a head"):
        load(toy, tmp_path / "no", drafter_provider="off")
    with pytest.raises(OptionError, match="learn 3 is not a path"):
        load(toy, 3)
    assert not (tmp_path / "no").exists()


def test_another_drafters_weights_are_refused(toy, tmp_path):
    put_on_trial(tmp_path, toy, random_arrays(toy))
    choose(tmp_path, Choice("", None, "0" * 64))
    with pytest.raises(StoreError, match="another drafter"):
        load(toy, tmp_path)
    shutil.rmtree(tmp_path)
    load(toy, tmp_path).close()
    assert lessons.LESSONS_FILE in {file.name for file in tmp_path.iterdir()}
