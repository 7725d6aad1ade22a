"""Learning from use on the command line: off by default, cleared on demand."""

import json
import urllib.request

import jetdraft as package
from jetdraft.bundle import Bundle
from jetdraft.learning.lessons import LESSONS_FILE, Lessons, WeightSets, drafter_sha256
from tests.cli.running import assert_refused, jetdraft
from tests.server.serving import started
from tests.toy_drafter import arrays_of, put_on_trial, random_arrays


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
        bundle = Bundle.open(toy)
        lessons = Lessons(tmp_path, bundle.tokenizer_sha256, 384)
        left.append(lessons.read())
        clear(sets)

    monkeypatch.setattr(WeightSets, "clear", recorded)
    jetdraft("store", "clear", toy, tmp_path)
    assert left == [[]]


def test_a_folder_that_learned_nothing_is_not_cleared(toy, tmp_path):
    (tmp_path / "notes").write_text("what I have to do")
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
    assert_refused(listed, "without lessons and learned weights")
    assert [file.name for file in (tmp_path / "learned").iterdir()] == ["notes"]
    learn(toy, tmp_path / "learned")
    assert_refused(jetdraft(*command), "no checkpoint at", "drafter")
    assert_refused(
        jetdraft(*command, "--watts", 5, "--from", tmp_path), "no power monitors"
    )
    assert_refused(jetdraft(*command, "--steps", 0, "--from", tmp_path), "steps 0")


def test_a_list_names_the_other_users(toy, tmp_path):
    learn(toy, tmp_path, drafting={"user": "ann"})
    listed = jetdraft("store", "list", toy, tmp_path)
    assert listed.stdout.splitlines() == [
        "weights: the bundle's own drafter",
        "lessons of --user 'ann': 1",
    ]
    listed = jetdraft("store", "list", toy, tmp_path, "--json")
    assert json.loads(listed.stdout)["others"] == {"ann": 1}


def test_the_server_learns_for_each_client(toy, tmp_path):
    folder = tmp_path / "learned"
    body = {"prompt": "The robot sees", "method": "draft", "num_draft_tokens": 4}
    own = {n: array for n, array in arrays_of(toy).items() if array.ndim == 2}
    name = put_on_trial(folder, toy, own)
    WeightSets(folder, drafter_sha256(Bundle.open(toy))).settle(name, keep=True)
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
