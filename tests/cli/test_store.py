import json
import urllib.request

import numpy as np
import pytest

import jetdraft as package
from jetdraft.bundle import Bundle
from jetdraft.learning import lessons as module
from jetdraft.learning.lessons import LESSONS_FILE, Lesson, Lessons, WeightSets
from jetdraft.runtime.text.codec import TextCodec
from tests.programs import assert_refused, jetdraft, succeed
from tests.server.serving import started
from tests.toy_drafter import arrays_of, put_on_trial, random_arrays

SHORT = ("--max-new-tokens", "8", "--threads", "1")


@pytest.fixture
def store(bundle, tmp_path):
    file = tmp_path / "store.sqlite"
    for prompt, method in ((" the self", "draft"), (" def return", "auto")):
        of_ann = ("--store", file, "--drafting", "user=ann", "--method", method)
        succeed("generate", bundle, "-p", prompt, *of_ann, *SHORT)
    return file


def test_list_shows_what_is_kept(bundle, store):
    shown = succeed("store", "list", bundle, store, "--user", "ann")
    first, second = shown.stdout.splitlines()
    assert "def return" in first
    assert "the self" in second
    fields = jetdraft("store", "list", bundle, store, "--user", "ann", "--json")
    entries = json.loads(fields.stdout)["entries"]
    assert [entry["prompt"] for entry in entries] == [" def return", " the self"]
    assert jetdraft("store", "list", bundle, store).stdout == ""


def test_list_shows_what_is_learned(bundle, tmp_path):
    opened = Bundle.open(bundle)
    lessons = Lessons(tmp_path, opened.tokenizer_sha256, 512)
    places, ids = np.array([1, 3]), np.array([[7, 8], [9, 10]])
    logits = np.zeros(ids.shape, np.float32)
    lessons.add(Lesson(np.arange(20, 25), places, ids, logits), user="ann")
    lessons.add(Lesson(np.arange(40, 44), places, ids, logits), user="ann")
    lessons.add(Lesson(np.arange(30, 34), places[:1], ids[:1], logits[:1]), user="bo")
    assert jetdraft("store", "list", bundle, tmp_path).stdout.splitlines() == [
        "weights: the bundle's own drafter",
        "lessons of --user 'ann': 2",
        "lessons of --user 'bo': 1",
    ]
    name = put_on_trial(tmp_path, bundle, {"matrix": np.ones((2, 2), np.float32)})
    shown = succeed("store", "list", bundle, tmp_path, "--user", "ann")
    weights, *latest_first = shown.stdout.splitlines()
    assert weights == (
        f"weights: the learned set {name[:12]}, on trial against the bundle's own "
        "drafter"
    )
    assert latest_first.pop() == "lessons of --user 'bo': 1"
    text = TextCodec(opened.tokenizer).decode
    texts = [text(list(ids)) for ids in (range(40, 44), range(20, 25))]
    assert latest_first == [f"   2 wrong  {words}" for words in texts]
    fields = jetdraft("store", "list", bundle, tmp_path, "--user", "bo", "--json")
    kept = json.loads(fields.stdout)
    assert (kept["weights"], kept["on_trial_against"]) == (name, "")
    assert kept["others"] == {"ann": 2}
    assert kept["lessons"] == [{"wrong_places": 1, "text": text([30, 31, 32, 33])}]


def test_weights_without_lessons_are_cleared(bundle, tmp_path):
    name = put_on_trial(tmp_path, bundle, {"matrix": np.ones((2, 2), np.float32)})
    assert name[:12] in jetdraft("store", "list", bundle, tmp_path).stdout
    assert jetdraft("store", "clear", bundle, tmp_path).exit_code == 0
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("verb", ["list", "clear"])
def test_a_user_whose_name_cannot_be_shown(bundle, tmp_path, verb):
    Lessons(tmp_path, Bundle.open(bundle).tokenizer_sha256, 512)
    done = jetdraft("store", verb, bundle, tmp_path, "--user", "\udcff")
    assert_refused(done, "unprintable characters")


def test_clear_forgets(bundle, store):
    done = jetdraft("store", "clear", bundle, store, "--user", "ann")
    assert "2 entries removed" in done.stderr
    assert jetdraft("store", "list", bundle, store, "--user", "ann").stdout == ""


@pytest.mark.filterwarnings("default")
def test_a_damaged_store_is_one_warning(bundle, store):
    content = bytearray(store.read_bytes())
    content[4096:] = b"x" * (len(content) - 4096)
    store.write_bytes(content)
    done = succeed("generate", bundle, "-p", " the self", "--store", store, *SHORT)
    warning, stats = done.stderr.splitlines()
    assert warning.startswith("warning: the store")
    assert stats.startswith("[8 tokens")
    assert store.with_name("store.sqlite.damaged").is_file()


def test_something_else_is_no_store(bundle, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("what I have to do\n" * 20)
    done = jetdraft("generate", bundle, "-p", " the self", "--store", notes, *SHORT)
    assert_refused(done, "is not a store of responses")
    listed = jetdraft("store", "list", bundle, notes)
    assert_refused(listed, "is not a store of responses")
    assert notes.read_text().startswith("what I have")
    folder = jetdraft("generate", bundle, "-p", " the", "--store", tmp_path, *SHORT)
    assert_refused(folder, "something")


def learn(toy, folder, **options):
    drafted = {"method": "draft", "num_draft_tokens": 4, "max_new_tokens": 40}
    with package.load(toy, threads=1, learn=folder) as model:
        model.generate("The robot sees", **drafted, **options)


def test_clear_erases_lessons_and_weights(toy, tmp_path):
    folder = tmp_path / "learned"
    learn(toy, folder, drafting={"user": "ann"})
    learn(toy, folder)
    name = put_on_trial(folder, toy, random_arrays(toy))
    done = jetdraft("store", "clear", toy, folder, "--user", "ann")
    assert "1 entry removed" in done.stderr
    assert b"ann" not in (folder / LESSONS_FILE).read_bytes()
    assert not (folder / name).exists()
    assert "1 entry removed" in jetdraft("store", "clear", toy, folder).stderr
    learn(toy, folder)


def test_weights_are_cleared_after_the_lessons(toy, tmp_path, monkeypatch):
    """A training may read lessons up to then, and publishes nothing of them."""
    learn(toy, tmp_path)
    clear, left = WeightSets.clear, []

    def recorded(sets):
        left.append(Lessons(tmp_path, Bundle.open(toy).tokenizer_sha256, 384).read())
        clear(sets)

    monkeypatch.setattr(WeightSets, "clear", recorded)
    jetdraft("store", "clear", toy, tmp_path)
    assert left == [[]]


def test_what_was_never_kept_is_neither_listed_nor_cleared(bundle, toy, tmp_path):
    (tmp_path / "notes").write_text("what I have to do")
    missing = tmp_path / "no.sqlite"
    assert_refused(jetdraft("store", "list", bundle, missing), "no store")
    assert_refused(jetdraft("store", "clear", toy, tmp_path), "store")
    assert [file.name for file in tmp_path.iterdir()] == ["notes"]


def test_refusals(toy, tmp_path):
    command = ("train", "use", toy, tmp_path / "learned")
    assert_refused(jetdraft(*command), "no lessons are kept", "serve --learn")
    assert not (tmp_path / "learned").exists()
    (tmp_path / "learned").mkdir()
    assert_refused(jetdraft(*command), "no lessons are kept")
    (tmp_path / "learned/notes").write_text("what I have to do")
    assert_refused(jetdraft(*command, "--background"), "no lessons are kept")
    listed = jetdraft("store", "list", toy, tmp_path / "learned")
    assert_refused(listed, "no store, lessons or learned weights at")
    assert [file.name for file in (tmp_path / "learned").iterdir()] == ["notes"]
    learn(toy, tmp_path / "learned")
    assert_refused(jetdraft(*command), "no checkpoint at", "drafter")
    assert_refused(
        jetdraft(*command, "--watts", 5, "--from", tmp_path), "no power monitors"
    )
    assert_refused(jetdraft(*command, "--steps", 0, "--from", tmp_path), "steps 0")


def test_the_server_learns_for_each_client(toy, tmp_path):
    folder = tmp_path / "learned"
    body = {"prompt": "The robot sees", "method": "draft", "num_draft_tokens": 4}
    own = {n: array for n, array in arrays_of(toy).items() if array.ndim == 2}
    name = put_on_trial(folder, toy, own)
    WeightSets(folder, module.drafter_sha256(Bundle.open(toy))).settle(name, keep=True)
    with started(toy, "--learn", folder) as (process, url):
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({**body, "max_tokens": 40, "temperature": 0}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["choices"][0]["text"]
        process.terminate()
        assert f"the learned set {name[:12]} drafts\n" in process.stderr.read()
    cleared = jetdraft("store", "clear", toy, folder, "--user", "127.0.0.1")
    assert "1 entry removed" in cleared.stderr
