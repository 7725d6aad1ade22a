import json
import os
import random
import sqlite3
import stat
import subprocess
import sys
import warnings
from contextlib import closing, suppress

import numpy as np
import pytest

from jetdraft import Bundle, StoreError
from jetdraft.learning import lessons as module
from jetdraft.learning.lessons import EARLY_TOKENS, LESSONS_FILE, VERDICT_TOKENS, Tally
from jetdraft.runtime.history.store import Entry, ResponseStore
from tests import cases
from tests.programs import ROOT, printed
from tests.toy_drafter import put_on_trial

VOCABULARY = 100
POISON = [
    *((name, b"") for name in ("tokens", "places", "ids")),
    *((name, "text") for name in ("tokens", "logits", "kept")),
    ("tokens", np.array([VOCABULARY, 1], np.uint32).tobytes()),
    *(("tokens", value) for value in (b"123", 7)),
    ("tokens", b"\0" * (4 * module.MAX_TOKENS + 4)),
    *(("places", np.array([place], np.uint32).tobytes()) for place in (0, 2)),
    ("places", np.ones(module.MAX_PLACES + 1, np.uint32).tobytes()),
    ("ids", np.array([1, VOCABULARY], np.uint32).tobytes()),
    *(("logits", np.float32(value).tobytes()) for value in ([1, np.nan], [1])),
    ("kept", 1e300),
]
ONES = {"matrix": np.ones((4, 4), np.float32)}
TWOS = {"matrix": np.full((4, 4), 2, np.float32)}
NOT_FINITE = np.float32([[np.nan, 1.0]]), np.float16([[np.inf, 1.0]])
REST = {"before": None, "base": ""}
NO_CHOICES = [REST | {"name": "../../etc"}, REST | {"name": 7}, {"name": ""}]


def open_lessons(folder):
    return module.Lessons(folder, "tokens", VOCABULARY)


def lesson(*tokens, places=(1,), best=7):
    ids = np.full((len(places), 2), best)
    logits = np.ones(ids.shape, np.float32)
    return module.Lesson(np.array(tokens), np.array(places), ids, logits)


def tokens(lessons):
    return [one.tokens.tolist() for one in lessons.read()]


def test_lessons_come_back_latest_first(tmp_path):
    lessons = open_lessons(tmp_path / "new" / "folder")
    lessons.add(lesson(5, 6, 8, places=(1, 2)))
    lessons.add(lesson(9, 9), "ann")
    first, second = open_lessons(tmp_path / "new" / "folder").read()
    assert first.tokens.tolist() == [9, 9]
    assert second.places.tolist() == [1, 2]
    assert second.ids.tolist() == [[7, 7], [7, 7]]
    assert second.logits.dtype == np.float32


def test_only_its_owner_can_list_the_folder(tmp_path):
    open_lessons(tmp_path / "learned").add(lesson(5, 6))
    assert stat.S_IMODE((tmp_path / "learned").stat().st_mode) == 0o700


def test_their_number_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LESSONS", 2)
    monkeypatch.setattr(module, "MAX_IN_ALL", 3)
    lessons = open_lessons(tmp_path)
    for token in range(4):
        lessons.add(lesson(token, 6), "ann")
    assert tokens(lessons) == [[3, 6], [2, 6]]
    for user in ("bob", "eve"):
        lessons.add(lesson(9, 9), user)
    assert tokens(lessons) == [[9, 9], [9, 9], [3, 6]]


def test_old_lessons_go(tmp_path):
    lessons = open_lessons(tmp_path)
    lessons.add(lesson(5, 6))
    with closing(sqlite3.connect(tmp_path / LESSONS_FILE)) as database, database:
        database.execute("update lessons set kept = 1000")
    assert tokens(lessons) == []
    lessons.add(lesson(7, 6))
    with closing(sqlite3.connect(tmp_path / LESSONS_FILE)) as database:
        [(count,)] = database.execute("select count(*) from lessons")
    assert count == 1


@pytest.mark.parametrize(("column", "value"), POISON)
def test_a_poisoned_row_is_left_out(tmp_path, column, value):
    lessons = open_lessons(tmp_path)
    lessons.add(lesson(1, 2))
    lessons.add(lesson(5, 6))
    with closing(sqlite3.connect(tmp_path / LESSONS_FILE)) as database, database:
        database.execute(f"update lessons set {column} = ? where id = 1", (value,))
    assert tokens(lessons) == [[5, 6]]


def test_a_file_that_is_damaged_meanwhile_is_said(tmp_path):
    lessons = open_lessons(tmp_path)
    lessons.add(lesson(5, 6))
    content = bytearray((tmp_path / LESSONS_FILE).read_bytes())
    content[200:] = b"x" * (len(content) - 200)
    (tmp_path / LESSONS_FILE).write_bytes(content)
    with pytest.warns(UserWarning, match="could not be kept"):
        lessons.add(lesson(5, 6))
    with pytest.raises(StoreError, match="cannot read"):
        lessons.read()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "notes").write_text("what I have to do")
    with pytest.raises(StoreError, match="cannot make the folder"):
        open_lessons(tmp_path / "notes")


@pytest.fixture
def sets(toy, tmp_path):
    return module.WeightSets(tmp_path, module.drafter_sha256(Bundle.open(toy)))


def test_a_trial_is_kept_or_taken_back(toy, sets):
    one = put_on_trial(sets.folder, toy, ONES)
    assert (sets.read_choice().name, sets.read_choice().before) == (one, "")
    assert sets.arrays(one)["matrix"].tolist() == ONES["matrix"].tolist()
    sets.settle(one, keep=True)
    two = put_on_trial(sets.folder, toy, TWOS, before=one)
    sets.settle(one, keep=False)
    assert sets.read_choice().name == two, "only the trial of the chosen set ends"
    sets.settle(two, keep=False)
    sets.settle(two, keep=True)
    assert (sets.read_choice().name, sets.read_choice().before) == (one, None)
    assert not (sets.folder / two).exists()
    sets.clear()
    assert sets.read_choice().name == ""
    assert not (sets.folder / one).exists()


def test_only_sets_are_swept(toy, sets):
    for name in ("notes", "0" * 63, ".partial"):
        (sets.folder / name).mkdir()
    (sets.folder / ".partial-killed").mkdir()
    sets.clear()
    left = {entry.name for entry in sets.folder.iterdir()}
    assert left == {"notes", "0" * 63, ".partial", "lock", module.CHOICE_FILE}


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-200] ^= 1
    file.write_bytes(content)


def replace_by_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


@cases(
    "array, damage",
    *((ONES["matrix"], damage) for damage in (flip_a_bit, replace_by_a_pipe)),
    *((array, None) for array in (*NOT_FINITE, np.array([3, 4]), np.array(["text"]))),
)
def test_damaged_and_missing_arrays_are_refused(toy, sets, array, damage):
    name = put_on_trial(sets.folder, toy, {"matrix": array})
    if damage:
        damage(sets.folder / name / module.ARRAYS)
    for each in (name, "0" * 64):
        with pytest.raises(StoreError, match="damaged or missing"):
            sets.arrays(each)


@pytest.mark.parametrize("text", ["no JSON", "[]", *map(json.dumps, NO_CHOICES)])
def test_a_malformed_choice_chooses_no_set(sets, text):
    (sets.folder / module.CHOICE_FILE).write_text(text)
    sets.check()
    assert (sets.read_choice().name, sets.read_choice().before) == ("", None)


def test_sets_of_another_drafter_are_refused(toy, sets):
    name = put_on_trial(sets.folder, toy, ONES)
    other = module.WeightSets(sets.folder, "0" * 64)
    with pytest.raises(StoreError, match="another drafter"):
        other.check()
    assert other.read_choice().name == ""
    other.settle(name, keep=True)
    assert other.read_choice().name == ""


def test_a_folder_that_cannot_be_written_only_warns(toy, sets):
    name = put_on_trial(sets.folder, toy, ONES)
    (sets.folder / "lock").mkdir()
    with pytest.warns(UserWarning, match="no verdict"):
        sets.settle(name, keep=False)
    assert sets.read_choice().name == name


def test_a_kill_leaves_one_whole_set(tmp_path):
    report = printed(sys.executable, "-m", "tests.swap_kills", tmp_path, "30")
    steps = json.loads(report)
    assert set(steps["publish"]["found"]) == {"1.0", "2.0"}
    assert set(steps["back"]["found"]) == {"2.0", "1.0"}
    assert set(steps["keep"]["found"]) == {"2.0"}
    assert set(steps["clear"]["found"]) == {"2.0", "own"}


def tally(accepted, evaluated):
    made = Tally()
    made.add(accepted, evaluated)
    return made


def test_only_the_latest_generations_count():
    made = Tally()
    made.add(0, 100)
    for _ in range(4):
        made.add(50, 100)
        assert made.is_full == (made.evaluated >= VERDICT_TOKENS)
    assert (made.accepted, made.evaluated, made.rate) == (150, 300, 0.5)


@cases(
    "before, after, verdict",
    ((128, 256), (0, EARLY_TOKENS - 1), None),
    ((128, 256), (0, EARLY_TOKENS), False),
    ((128, 256), (28, EARLY_TOKENS), None),
    ((128, 256), (EARLY_TOKENS, EARLY_TOKENS), None),
    ((128, 256), (127, VERDICT_TOKENS), False),
    ((128, 256), (128, VERDICT_TOKENS), True),
    ((0, 256), (0, VERDICT_TOKENS), True),
    ((256, 256), (EARLY_TOKENS, EARLY_TOKENS), None),
)
def test_verdicts(before, after, verdict):
    assert module.judge_trial(tally(*before), tally(*after)) is verdict


def trial(draw, old, new):
    """The verdict on weights of two true rates, with ten tokens a generation."""
    before, after = Tally(), Tally()
    while not before.is_full:
        before.add(sum(draw.random() < old for _ in range(10)), 10)
    while (verdict := module.judge_trial(before, after)) is None:
        after.add(sum(draw.random() < new for _ in range(10)), 10)
    return verdict, after.evaluated


def test_how_often_chance_decides():
    draw = random.Random(0)
    kept = {
        new: sum(trial(draw, 0.5, new)[0] for _ in range(400)) / 400
        for new in (0.4, 0.456, 0.5, 0.6)
    }
    assert kept[0.4] < 0.03
    assert 0.10 < kept[0.456] < 0.22  # one standard error
    assert 0.42 < kept[0.5] < 0.60
    assert kept[0.6] > 0.97
    verdict, tokens = trial(draw, 0.6, 0.05)
    assert not verdict
    assert tokens < EARLY_TOKENS + 20, "clear losses end early"


class Responses:
    name = "store.sqlite"

    def open(self, folder, tokenizer="tokens"):
        return ResponseStore(folder / self.name, tokenizer)

    def add(self, store, token, user="", size=2):
        vector = np.zeros(0, np.float32)
        store.of(user).add(Entry([token], list(range(1, 1 + size)), vector))

    def tokens(self, store):
        return [entry.prompt[0] for entry in store.entries]


class Taught:
    name = LESSONS_FILE

    def open(self, folder, tokenizer="tokens"):
        return module.Lessons(folder, tokenizer, 100)

    def add(self, store, token, user="", size=2):
        store.add(lesson(token, *[6] * (size - 1)), user)

    def tokens(self, store):
        return [int(lesson.tokens[0]) for lesson in store.read()]


@pytest.fixture(params=[Responses(), Taught()], ids=lambda kind: type(kind).__name__)
def kind(request):
    return request.param


def test_only_its_owner_can_read_it(kind, tmp_path):
    (tmp_path / kind.name).touch(mode=0o644)
    kind.add(kind.open(tmp_path), 5)
    assert stat.S_IMODE((tmp_path / kind.name).stat().st_mode) == 0o600


def test_another_tokenizer_is_refused(kind, tmp_path):
    kind.add(kind.open(tmp_path), 5)
    with pytest.raises(StoreError, match="another tokenizer"):
        kind.open(tmp_path, "others")
    assert kind.tokens(kind.open(tmp_path)) == [5]


@cases("first, last, fill", (0, 60, b"x"), (4096, 8096, b"x"), (0, None, b"\0"))
def test_a_damaged_file_is_moved_aside(kind, tmp_path, first, last, fill):
    store, file = kind.open(tmp_path), tmp_path / kind.name
    for token in range(50):
        kind.add(store, token, size=500)
    content = bytearray(file.read_bytes())
    content[first:last] = fill * len(content[first:last])
    for number in ("", "-2"):
        file.write_bytes(content)
        with pytest.warns(UserWarning, match="is damaged; it was moved"):
            again = kind.open(tmp_path)
        assert kind.tokens(again) == []
        assert (tmp_path / f"{kind.name}.damaged{number}").read_bytes() == content
    kind.add(again, 5)
    assert kind.tokens(kind.open(tmp_path)) == [5]
    again.clear()
    left = [path.name for path in tmp_path.iterdir()]
    assert left == [kind.name], "nobody knows whose texts the others hold"


def test_random_damage_never_ends_in_anything_else(kind, tmp_path):
    store, file = kind.open(tmp_path), tmp_path / kind.name
    for token in range(20):
        kind.add(store, token, size=100)
    content, chance = file.read_bytes(), random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(40):
            damaged[chance.randrange(100, len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(StoreError):
                kind.add(kind.open(tmp_path), 5)


def other_database():
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("create table notes (text)")
        return database.serialize()


TEXT, ZEROS_AND_MORE = b"what I have to do\n" * 10, bytes(5000) + b"precious"


@pytest.mark.parametrize("before", [other_database(), TEXT, ZEROS_AND_MORE])
def test_what_is_something_else_is_left_alone(kind, tmp_path, before):
    file = tmp_path / kind.name
    file.write_bytes(before)
    file.chmod(0o644)
    with pytest.raises(StoreError, match="not a store of responses; choose another"):
        kind.open(tmp_path)
    assert file.read_bytes() == before
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == [kind.name]


def test_a_folder_is_no_store(kind, tmp_path):
    (tmp_path / kind.name).mkdir(mode=0o755)
    with pytest.raises(StoreError, match="not a store of responses"):
        kind.open(tmp_path)
    assert stat.S_IMODE((tmp_path / kind.name).stat().st_mode) == 0o755


def test_users_clear_only_what_is_theirs(kind, tmp_path):
    store = kind.open(tmp_path)
    kind.add(store, 5, "ann")
    kind.add(store, 77)
    do = (store.of("ann").clear,) if kind.name != LESSONS_FILE else (store.clear, "ann")
    assert do[0](*do[1:]) == 1
    assert kind.tokens(kind.open(tmp_path)) == [77]
    assert b"ann" not in (tmp_path / kind.name).read_bytes(), "erased, not unlinked"


def test_a_lock_of_another_process_is_said(kind, tmp_path, monkeypatch):
    store, connect = kind.open(tmp_path), sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda file, timeout=0: connect(file, 0.01))
    with closing(connect(tmp_path / kind.name)) as other:
        other.execute("begin exclusive")
        with pytest.raises(StoreError, match="cannot clear"):
            store.clear()
        with pytest.raises(StoreError, match="cannot use"):
            kind.open(tmp_path)
        with pytest.warns(UserWarning, match="could not be kept"):
            kind.add(store, 5)
    assert os.listdir(tmp_path) == [kind.name]


def test_a_file_that_was_removed_is_made_again(kind, tmp_path):
    store = kind.open(tmp_path)
    (tmp_path / kind.name).unlink()
    kind.add(store, 5)
    assert kind.tokens(store) == kind.tokens(kind.open(tmp_path)) == [5]


def write(name, folder, first):
    kind = {"Responses": Responses, "Taught": Taught}[name]()
    for token in range(first, first + 20):
        kind.add(kind.open(folder), token)


def test_two_processes_share_a_file(kind, tmp_path):
    code = (
        "import sys; from pathlib import Path;"
        " from tests.learning.test_lessons import write;"
        " write(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))"
    )
    command = [sys.executable, "-W", "error", "-c", code, type(kind).__name__, tmp_path]
    running = [subprocess.Popen([*command, str(t)], cwd=ROOT) for t in (0, 50)]
    assert [process.wait() for process in running] == [0, 0]
    assert sorted(kind.tokens(kind.open(tmp_path))) == [*range(20), *range(50, 70)]
