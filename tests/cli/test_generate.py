import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

import jetdraft as package
from tests import whispers
from tests.programs import (
    INTERRUPTIBLE,
    assert_refused,
    ended,
    jetdraft,
    several,
    succeed,
)
from tests.runtime.test_conversation import TEMPLATE, with_template

PROMPT = " the self"
GIVEN = ("--prompt", PROMPT)
SHORT = ("--max-new-tokens", "24", "--threads", "1")
METRICS = {
    *("acceptance_rate", "tokens_per_pass", "accepted_by_position"),
    *("tokens_per_second", "time_to_first_token"),
}
# Slow enough to interrupt. A shell may have switched Ctrl-C off in the background.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from jetdraft.cli import main
from jetdraft.runtime.sampling.chooser import Chooser
choose, rounds = Chooser.choose, 0
def slowly(*arguments):
    global rounds
    rounds += 1
    if rounds == 20:
        print("started", file=sys.stderr, flush=True)
    time.sleep(0.02)
    return choose(*arguments)
Chooser.choose = slowly
main(sys.argv[1:])
"""
ASKS = "\x1b[?2004h> "  # It takes pasted lines.
BRIEF = ("--max-new-tokens", "8", "--threads", "1")


def test_text_goes_to_stdout_and_one_line_of_stats_to_stderr(bundle, model):
    result = succeed("generate", bundle, *GIVEN, *SHORT)
    expected = model.generate(PROMPT, max_new_tokens=24)
    assert result.stdout == expected.text + "\n"
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"[{len(expected.token_ids)} tokens in ")
    assert "tokens/s" in result.stderr


@pytest.fixture
def new_bundle(copied_bundle):
    shutil.rmtree(copied_bundle / "profiles")
    return copied_bundle


def test_the_first_text_announces_what_it_waits_for(new_bundle):
    first, second = (
        jetdraft("generate", new_bundle, *GIVEN, *SHORT).stderr.splitlines()
        for _ in range(2)
    )
    assert len(first) == 2
    assert first[0].startswith("first run on this machine: ")
    assert len(second) == 1


@pytest.mark.parametrize(
    "wrong", [("--top-p", 2), ("--regex", "("), ("--stop", ""), ("--method", "stream")]
)
def test_a_refusal_announces_nothing(new_bundle, wrong):
    assert_refused(jetdraft("generate", new_bundle, *GIVEN, *SHORT, *wrong))


def test_json_is_one_object_and_nothing_else(bundle, model):
    # A fixed method and length: what auto drafts depends on measured times.
    fixed = ("--method", "draft", "--num-draft-tokens", "3")
    result = succeed("generate", bundle, *GIVEN, *fixed, "--json", *SHORT)
    assert result.stderr == ""
    found = json.loads(result.stdout)
    same = {"method": "draft", "num_draft_tokens": 3, "max_new_tokens": 24}
    expected = model.generate(PROMPT, **same)
    assert set(found) == {
        *("text", "token_ids", "from_draft", "prompt_tokens", "finish_reason", "stats")
    }
    assert found["from_draft"] == expected.from_draft
    assert found["finish_reason"] == expected.finish_reason
    assert found["text"] == expected.text
    assert found["token_ids"] == expected.token_ids
    assert found["prompt_tokens"] == len(model.parts.text.encode(PROMPT))
    assert set(found["stats"]) >= METRICS
    assert found["stats"]["new_tokens"] == len(expected.token_ids)
    assert found["stats"]["method"] == "draft"


def test_a_chat_template_is_used_unless_the_prompt_is_raw(toy):
    with package.load(toy, threads=1) as model:
        reply = model.chat([{"role": "user", "content": "Hello"}], max_new_tokens=24)
        continued = model.generate("Hello", max_new_tokens=24)
    assert reply.text != continued.text
    for way, expected in {(): reply, ("--raw",): continued}.items():
        result = jetdraft("generate", toy, "-p", "Hello", *way, "--json", *SHORT)
        found = json.loads(result.stdout)
        assert found["text"] == expected.text
        assert found["prompt_tokens"] == expected.prompt_tokens


def test_a_template_matters_only_where_it_is_used(bundle, tmp_path):
    folder = with_template(bundle, tmp_path / "bundle", "{% if %}")
    assert_refused(jetdraft("generate", folder, *GIVEN, *SHORT), "broken in line 1")
    assert jetdraft("generate", folder, *GIVEN, "--raw", *SHORT).exit_code == 0
    for other, said in ((folder, "broken in line 1"), (bundle, "no chat template")):
        assert_refused(jetdraft("chat", other, *BRIEF, stdin="hello\n"), said)


def test_constraints_are_files_or_an_expression(bundle, model, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["left", "right"]}')
    grammar.write_text('start: "go " ("left" | "right")')
    for given, option in (
        (("--json-schema", schema), {"json_schema": schema.read_text()}),
        (("--grammar", grammar), {"grammar": grammar.read_text()}),
        (("--regex", "[lr]{3}"), {"regex": "[lr]{3}"}),
    ):
        result = jetdraft("generate", bundle, *GIVEN, *given, *SHORT)
        assert result.stdout == model.generate(PROMPT, **option).text + "\n"


def test_options_reach_the_generation(bundle, model):
    options = {"method": "draft", "num_draft_tokens": 2, "temperature": 0.9}
    options |= {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7}
    options |= {"repetition_penalty": 1.2}
    flags = [f"--{n.replace('_', '-')}={value}" for n, value in options.items()]
    options |= {"ignore_eos": True, "exact": False}
    free = model.generate(PROMPT, max_new_tokens=24, **options)
    stop = [free.text[-2:], "never"]
    flags += ["--ignore-eos", "--no-exact", "--stop", stop[0], "--stop", stop[1]]
    result = jetdraft("generate", bundle, *GIVEN, *flags, "--json", *SHORT)
    found = json.loads(result.stdout)
    expected = model.generate(PROMPT, max_new_tokens=24, stop=stop, **options)
    greedy = model.generate(PROMPT, max_new_tokens=24)
    assert found["token_ids"] == expected.token_ids != greedy.token_ids
    assert found["text"] == expected.text != free.text
    assert found["stats"]["exact"] is False
    assert len(found["stats"]["accepted_by_position"]) <= 2


@pytest.mark.parametrize("way", ["file", "stdin"])
def test_prompt_comes_from_a_file_or_stdin(bundle, model, tmp_path, way):
    prompt = "def für(self):\n    return"
    if way == "file":
        (tmp_path / "prompt").write_text(prompt, encoding="utf-8")
        arguments, given = ("--prompt-file", tmp_path / "prompt"), None
    else:
        arguments, given = ("-p", "-"), prompt
    result = jetdraft("generate", bundle, *arguments, *SHORT, stdin=given)
    assert result.stdout == model.generate(prompt, max_new_tokens=24).text + "\n"


def test_standard_streams_may_be_closed(bundle, tmp_path):
    store = tmp_path / "store"
    command = ["generate", bundle, "-n", "4", "--threads", "1", "--store", store, "-p"]
    both = several([*command, "-"], [*command, "def f():"])
    closed = ["sh", "-c", 'exec "$@" <&- >&-', "sh"]
    done = ended(*closed, *both)
    assert done.returncode == 0
    refused, code, *_, last = done.stderr.splitlines()
    assert "the prompt is empty" in refused
    assert (code, last) == ("code 2", "code 0"), done.stderr
    assert store.read_bytes().startswith(b"SQLite format 3")


def test_too_little_memory_is_one_line(bundle, monkeypatch):
    none_left = Mock(side_effect=MemoryError)
    monkeypatch.setattr("jetdraft.runtime.passes.buffers.np.zeros", none_left)
    result = jetdraft("generate", bundle, "-p", "x", *SHORT)
    assert_refused(result, "there is not enough memory")


def test_an_error_that_cannot_be_printed_is_an_error_all_the_same():
    command = [sys.executable, "-m", "jetdraft", "doctor", "--device", "none"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, check=False, stderr=full)
    assert done.returncode == 2


def test_a_locale_without_the_letters_of_a_text_loses_nothing(bundle):
    command = ["generate", bundle, "-p", "x", "--regex", "ä漢", "--threads", "1"]
    both = several(command, [*command, "--json"])
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(both, check=True, capture_output=True, env=environment)
    text, fields = done.stdout.splitlines()
    assert (text, json.loads(fields)["text"]) == (b"\xe4\\u6f22", "ä漢")


def interrupted(*arguments: object) -> tuple[str, str]:
    """Both outputs of a command to which Ctrl-C happens in the 20th round or later."""
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    ) as process:
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert first == "started\n"
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    return stdout, stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_interrupt_keeps_the_text_so_far(bundle, model, form):
    options = ["--max-new-tokens=240", "--ignore-eos", "--threads=1", "--method=none"]
    if form == "json":
        options.append("--json")
    stdout, stderr = interrupted("generate", bundle, *GIVEN, *options)
    whole = model.generate(PROMPT, max_new_tokens=240, ignore_eos=True)
    if form == "text":
        text = stdout.removesuffix("\n")
        assert whole.text.startswith(text)
        assert 0 < len(text) < len(whole.text)
        assert stderr.endswith("interrupted]\n")
    else:
        found = json.loads(stdout)
        count = len(found["token_ids"])
        assert 19 <= count < 240
        assert found["token_ids"] == whole.token_ids[:count]
        assert found["stats"]["finish_reason"] == "interrupted"


def test_explain_says_what_each_method_did(bundle):
    done = succeed("generate", bundle, *GIVEN, "--explain", *SHORT)
    _, reference, header, *rows = done.stderr.splitlines()
    assert reference.startswith("one by one a token takes ")
    assert " ".join(header.split()) == "method rounds drafted accepted tokens saved"
    assert all(row.split()[0] in ("none", "draft", "lookup", "off") for row in rows)
    assert sum(int(row.split()[4]) for row in rows if row.endswith(" ms")) == 24


@pytest.mark.parametrize(
    ("method", "why"),
    [("none", "no method was asked for"), ("lookup", "nothing was proposed")],
)
def test_explain_says_why_drafting_was_off(bundle, method, why):
    done = jetdraft("generate", bundle, *GIVEN, "--explain", "--method", method, *SHORT)
    assert why in done.stderr


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("sounds") / "tone.wav"
    file.write_bytes(whispers.wav(whispers.sound(1.5)))
    return file


def test_it_prints_segments_or_json(whisper, file):
    with package.load(whisper / "bundle", threads=1) as model:
        wanted = model.transcribe(file, language="de")
    shown = succeed("transcribe", whisper / "bundle", file, "--language", "de")
    lines = shown.stdout.splitlines()
    assert len(lines) == len(wanted.segments)
    assert all(re.match(r"\[[\d:.]{12} --> [\d:.]{12}\]", line) for line in lines)
    assert "tokens/pass" in shown.stderr
    flags = ("--json", "--language", "de")
    fields = json.loads(jetdraft("transcribe", whisper / "bundle", file, *flags).stdout)
    assert fields["text"] == wanted.text
    assert fields["token_ids"] == wanted.token_ids
    assert (fields["language"], fields["seconds"]) == ("de", 1.5)
    assert [part["start"] for part in fields["segments"]] == [
        segment.start for segment in wanted.segments
    ]


@pytest.mark.filterwarnings("default::UserWarning")
def test_a_file_that_is_cut_off_is_told(whisper, file, tmp_path):
    cut = tmp_path / "cut.wav"
    cut.write_bytes(file.read_bytes()[:-9000])
    shown = succeed("transcribe", whisper / "bundle", cut, "--language", "de")
    assert "warning: " in shown.stderr
    assert "is cut off: its header says 1.50 s" in shown.stderr


def test_bad_files_and_bundles_are_refused(whisper, bundle, file, tmp_path):
    heard, empty = whisper / "bundle", tmp_path / "empty.wav"
    empty.write_bytes(b"")
    assert_refused(jetdraft("transcribe", heard, empty), "is empty")
    missing = tmp_path / "missing.wav"
    assert_refused(jetdraft("transcribe", heard, missing), "there is no file")
    program = jetdraft("transcribe", heard, __file__)
    assert_refused(program, "is not a WAV file", "ffmpeg")
    assert_refused(jetdraft("transcribe", bundle, file), "hears nothing")
    wrong = jetdraft("transcribe", heard, file, "--language", "xx")
    assert_refused(wrong, "no language 'xx'")
    assert_refused(jetdraft("generate", heard, "-p", "hi"), "jetdraft transcribe")
    result = jetdraft("chat", heard, stdin="hello\n")
    assert_refused(result, "hears, and reads no text", "jetdraft transcribe")
    for verb in ("check", "bench"):
        result = jetdraft(verb, heard)
        assert result.exit_code == 2
        assert "error: the bundle's model hears, and reads no text" in result.stderr


@pytest.fixture(scope="module")
def chatty(bundle, tmp_path_factory):
    return with_template(bundle, tmp_path_factory.mktemp("chat") / "bundle", TEMPLATE)


def test_lines_are_turns_and_orders_are_obeyed(chatty, tmp_path):
    file = tmp_path / "talk.json"
    lines = ["hello", "/stats", "and then", "/save " + str(file), "/reset", "/stats"]
    lines += ["/nothing", "", "once more", "/quit"]
    given = ("--system", "be brief", *BRIEF)
    result = succeed("chat", chatty, *given, stdin="\n".join([*lines, "unread"]))
    model = package.load(chatty, threads=1)
    messages = [{"role": "system", "content": "be brief"}]
    for said in ("hello", "and then"):
        messages.append({"role": "user", "content": said})
        reply = model.chat(messages, max_new_tokens=8)
        messages.append({"role": "assistant", "content": reply.text})
        assert reply.text in result.stdout
    assert json.loads(file.read_text()) == messages
    assert "tokens in" in result.stderr
    assert "tokens kept" in result.stderr
    assert "there is no reply yet" in result.stderr
    assert "no command '/nothing'; there are\n/stats" in result.stderr


@pytest.mark.parametrize("order", ["/save {}/none/talk.json", "/load {}/talk.json"])
def test_an_order_that_fails_ends_no_talk_and_shows_in_the_exit_code(
    chatty, tmp_path, order
):
    kept = tmp_path / "kept.json"
    lines = ["hello", order.format(tmp_path), f"/save {kept}"]
    result = jetdraft("chat", chatty, *BRIEF, stdin="\n".join(lines))
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert order[:5] == "/save" or "; give a file of /save\n" in result.stderr
    assert json.loads(kept.read_text())[0]["content"] == "hello"


def test_lines_that_never_end_or_are_no_text_are_refused(chatty, monkeypatch):
    monkeypatch.setattr("jetdraft.cli.console.MAX_INPUT_CHARS", 1000)
    for said, refusal in ("a" * 1001, "more than 1000"), (b"a\xff", "UTF-8"):
        result = jetdraft("chat", chatty, *BRIEF, stdin=said)
        assert_refused(result, "a line of standard input", refusal)


def read_until(fd, wanted, seconds=60.0):
    shown, end = "", time.monotonic() + seconds
    while wanted not in shown:
        ready, _, _ = select.select([fd], [], [], 0.1)
        assert time.monotonic() < end, shown
        if ready:
            shown += os.read(fd, 4096).decode(errors="replace")
    return shown


@contextmanager
def terminal(*arguments):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", INTERRUPTIBLE, "chat", *map(str, arguments)]
    how = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    how |= {"start_new_session": True, "env": {**os.environ, "TERM": "xterm"}}
    process = subprocess.Popen([*command, "--threads", "1"], **how)
    os.close(theirs)
    yield process, ours
    os.write(ours, b"\x04")
    assert process.wait(30) == 0
    os.close(ours)


def test_a_terminal_shows_the_context_and_thoughts_and_takes_pastes(bundle, tmp_path):
    source = TEMPLATE + "{% if thinks %}<think>{% endif %}{# </think> #}"
    folder = with_template(bundle, tmp_path / "thinker", source)
    given = ("--max-new-tokens", 60, "--max-thinking-tokens", 5)
    thinks = ("--template", "thinks=true")
    with terminal(folder, *given, *thinks) as (_, shown):
        assert "thinker, 256 tokens of context; /help" in read_until(shown, "> ")
        os.write(shown, b"\x1b[200~one\ntwo\x1b[201~\n")
        assert "\x1b[2m" in read_until(shown, ASKS)
        os.write(shown, f"/save {tmp_path}/a\n/stats\n".encode())
        read_until(shown, f"tokens kept\r\n{ASKS}")
    said, reply = json.loads((tmp_path / "a").read_text())
    assert said["content"] == "one\ntwo"
    result = jetdraft("chat", folder, *given, *thinks, "--threads", "1", stdin="one")
    assert reply["reasoning_content"] not in result.stdout
    wrong = jetdraft("chat", folder, "--template", "thinks", stdin="")
    assert_refused(wrong, "'thinks' is not KEY=VALUE")


def test_ctrl_c_stops_a_reply_and_not_the_program(chatty):
    with terminal(chatty, "--max-new-tokens", 200) as (process, ours):
        read_until(ours, "> ")
        os.write(ours, b"hello\n")
        read_until(ours, "hello\r\n\x1b[?2004l")
        select.select([ours], [], [], 60)
        process.send_signal(signal.SIGINT)
        read_until(ours, "> ")
        os.write(ours, b"/stats\n")
        assert "tokens in" in read_until(ours, f"tokens kept\r\n{ASKS}")
        while not select.select([ours], [], [], 1)[0]:
            process.send_signal(signal.SIGINT)
        read_until(ours, f"/quit leaves\r\n{ASKS}")
