import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

import jetdraft as package
from tests.cli.running import INTERRUPTIBLE, assert_refused, jetdraft, succeed
from tests.runtime.test_conversation import TEMPLATE, with_template

ASKS = "\x1b[?2004h> "  # It takes pasted lines.
GIVEN = ("--max-new-tokens", "8", "--threads", "1")


@pytest.fixture(scope="module")
def chatty(bundle, tmp_path_factory):
    return with_template(bundle, tmp_path_factory.mktemp("chat") / "bundle", TEMPLATE)


def test_lines_are_turns_and_orders_are_obeyed(chatty, tmp_path):
    file = tmp_path / "talk.json"
    lines = ["hello", "/stats", "and then", "/save " + str(file), "/reset", "/stats"]
    lines += ["/nothing", "", "once more", "/quit"]
    given = ("--system", "be brief", *GIVEN)
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
    assert "/save FILE" in result.stderr, "help for what is no order"


@pytest.mark.parametrize("order", ["/save {}/none/talk.json", "/load {}/talk.json"])
def test_an_order_that_fails_ends_no_talk_and_shows_in_the_exit_code(
    chatty, tmp_path, order
):
    kept = tmp_path / "kept.json"
    lines = ["hello", order.format(tmp_path), f"/save {kept}"]
    result = jetdraft("chat", chatty, *GIVEN, stdin="\n".join(lines))
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert json.loads(kept.read_text())[0]["content"] == "hello"


def test_a_bundle_without_a_template_is_refused(bundle):
    result = jetdraft("chat", bundle, *GIVEN, stdin="hello\n")
    assert_refused(result, "no chat template")


def test_a_broken_template_is_refused(bundle, tmp_path):
    folder = with_template(bundle, tmp_path / "bundle", "{% if %}")
    assert_refused(
        jetdraft("chat", folder, *GIVEN, stdin="hello\n"), "broken in line 1"
    )


def test_lines_that_never_end_or_are_no_text_are_refused(chatty, monkeypatch):
    monkeypatch.setattr("jetdraft.cli.console.MAX_INPUT_CHARS", 1000)
    for said, refusal in ("a" * 1001, "more than 1000"), (b"a\xff", "UTF-8"):
        result = jetdraft("chat", chatty, *GIVEN, stdin=said)
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
    """A chat in a terminal, and the terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", INTERRUPTIBLE, "chat", *map(str, arguments)]
    process = subprocess.Popen(
        [*command, "--threads", "1"], stdin=theirs, stdout=theirs, stderr=theirs,
        start_new_session=True, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
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
