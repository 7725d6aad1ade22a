import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import jetdraft
from jetdraft.errors import ConstraintError, JetdraftError, OptionError
from jetdraft.runtime.text import constraint, worker_process
from tests import cases, tick
from tests.server.serving import until

# 575 characters that take a process for ever, and all memory.
FOREVER = "start: T\nT: " + " & ".join(
    f"/(.|\\n)*a(.|\\n){{{i}}}/" for i in range(1, 26)
)
LONG = {"type": "string", "pattern": "^" + "(ab|cd)?" * 50_000 + "$"}
PATTERNS = [{"type": "string", "pattern": f"a.{{{i}}}$"} for i in range(25)]
NAMES = {f"name{i}": {"type": "string"} for i in range(10_000)}
RULES = "".join(f'r{i}: r{i + 1} r{i + 1} | "a"\n' for i in range(300))
REFUSED = {
    "grammar": {"grammar": FOREVER},
    "patterns": {"json_schema": {"allOf": PATTERNS}},
    "long pattern": {"json_schema": LONG},
    "properties": {"json_schema": {"type": "object", "properties": NAMES}},
    "deep expression": {"regex": "(" * 9000 + "a" + ")" * 9000},
    "deep grammar": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "deep schema": {"json_schema": '{"items":' * 9000 + "{}" + "}" * 9000},
    "ambiguous rules": {"grammar": f'start: r0\n{RULES}r300: "b"\n'},
}

TOO_MUCH = r"cannot be followed .*too much time"
# Half a second of computing, to be read while others have the processor.
WIDE = "|".join(f"[a-f]{{2}}{i}" for i in range(20_000))


@pytest.fixture
def model(toy):
    with jetdraft.load(toy, threads=1) as model:
        yield model


@contextmanager
def at_most(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def follows(model):
    assert model.generate("a", regex="yes").text == "yes"


def workers(parents):
    below = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent, *_ = status(folder.name)
            command = folder.joinpath("cmdline").read_bytes()
            is_below = int(parent) in parents and state != "Z"
            if is_below and b"text/worker_main.py" in command:
                below.add(int(folder.name))
    return below | workers(below) if below else below


def status(process):
    return Path(f"/proc/{process}/stat").read_text().rsplit(")")[1].split()


def texts_of(model):
    return workers({model.vocabulary._process.pid})


def is_alive(process):
    with suppress(OSError):
        return status(process)[0] != "Z"
    return False


@contextmanager
def stopped(process):
    os.kill(process, signal.SIGSTOP)
    yield
    os.kill(process, signal.SIGCONT)
    until(lambda: not is_alive(process), 2)


def test_a_grammar_that_never_ends_is_ended(model, monkeypatch):
    monkeypatch.setattr(constraint, "COMPILE_SECONDS", 1.0)
    with pytest.raises(ConstraintError, match="too much time or memory") as found:
        model.generate("a", grammar=FOREVER, max_new_tokens=4)
    assert found.value.field == "grammar"
    until(lambda: not texts_of(model), 2)
    follows(model)


@pytest.mark.parametrize("way", ["generate", "stream", "astream"])
def test_a_deadline_ends_a_compilation(model, way):
    """It is no refusal: the text ends, like any text whose time is over."""
    assert model.vocabulary
    options = {"grammar": FOREVER, "max_seconds": 0.5}
    with at_most(3):
        if way == "astream":
            result = asyncio.run(model.astream("a", **options).result())
        elif way == "stream":
            result = model.stream("a", **options).result()
        else:
            result = model.generate("a", **options)
    assert (result.text, result.finish_reason) == ("", "deadline")
    follows(model)


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_too_much_is_refused_in_time(model, monkeypatch, name):
    monkeypatch.setattr(constraint, "COMPILE_SECONDS", 0.5)
    monkeypatch.setattr(constraint, "STEP_SECONDS", 0.5)
    with at_most(8), pytest.raises(OptionError):
        model.generate("a", **REFUSED[name], max_new_tokens=4)
    follows(model)


def test_memory_has_a_limit(model, monkeypatch):
    model.vocabulary.start()
    monkeypatch.setattr(worker_process, "MAX_BYTES", 16 << 20)
    monkeypatch.setattr(constraint, "COMPILE_SECONDS", 60.0)
    with at_most(30), pytest.raises(ConstraintError, match="too much time or memory"):
        model.generate("a", grammar=FOREVER)


def test_a_step_that_takes_too_long_ends_the_text(model, monkeypatch):
    """The pattern is compiled at once; the first mask would take for ever."""
    monkeypatch.setattr(constraint, "STEP_SECONDS", 0.3)
    stream = model.stream("a", **REFUSED["long pattern"])
    with at_most(5), pytest.raises(ConstraintError, match=TOO_MUCH):
        stream.result()
    follows(model)


@cases("seconds, reason", (1.0, "deadline"), (None, "cancelled"))
def test_a_step_ends_with_its_text(model, seconds, reason):
    assert model.vocabulary  # the text's time continues while it is read
    stream = model.stream("a", regex="[a-z]{1,50}", max_seconds=seconds)
    (text,) = texts_of(model)
    with stopped(text), at_most(constraint.STEP_SECONDS):
        if seconds is None:
            threading.Timer(0.3, stream.cancel).start()
        assert stream.result().finish_reason == reason


def test_a_worker_that_stops_is_given_up(model, monkeypatch):
    stream = model.stream("a", regex="[a-z]{1,50}", method="none")
    monkeypatch.setattr(constraint, "STEP_SECONDS", 0.2)
    monkeypatch.setattr("jetdraft.runtime.text.worker_process.PATIENCE", 1.5)
    (text,) = texts_of(model)
    with stopped(text), at_most(1), pytest.raises(ConstraintError, match=TOO_MUCH):
        stream.result()


def computed(process):
    return sum(map(int, status(process)[11:13])) / os.sysconf("SC_CLK_TCK")


def test_only_computing_counts_for_the_limits(model, monkeypatch):
    """A machine that has no time for the process refuses nothing."""
    assert model.vocabulary
    monkeypatch.setattr(constraint, "COMPILE_SECONDS", 1.5)
    monkeypatch.setattr(constraint, "STEP_SECONDS", 1.5)
    results = []

    def run():
        results.append(model.generate("a", regex=WIDE, max_new_tokens=3))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: texts_of(model), 5)
    (text,) = texts_of(model)
    until(lambda: computed(text) > 0.02, 5)
    os.kill(text, signal.SIGSTOP)
    time.sleep(2)
    os.kill(text, signal.SIGCONT)
    thread.join(30)
    assert len(results[0].token_ids) == 3


@pytest.mark.parametrize("whose", ["text", "vocabulary"])
def test_a_worker_that_dies_ends_one_text(model, whose):
    options = {"method": "none", "max_new_tokens": 100}
    stream = model.stream("a", regex="[a-z]{40}", **options)
    (text,), twin = texts_of(model), model.twin()
    with twin.stream("a", regex="[b-c]{4}") as other:
        next(stream)
        if whose == "text":
            os.kill(text, signal.SIGKILL)
            with pytest.raises(ConstraintError, match="cannot be followed"):
                stream.result()
        else:
            os.kill(model.vocabulary._process.pid, signal.SIGKILL)
            assert len(stream.result().text) == 40
        assert len(other.result().text) == 4
    follows(model)


def test_a_worker_that_dies_below_a_draft_is_replaced(model):
    options = {"regex": "[a-z]{40}", "max_new_tokens": 100}
    plain = model.generate("a", method="none", **options)
    stream = model.stream("a", method="draft", num_draft_tokens=4, **options)
    (text,) = texts_of(model)
    next(stream)
    os.kill(text, signal.SIGKILL)
    assert stream.result().token_ids == plain.token_ids


def test_cancel_ends_all_compilations(model):
    results, before = [], set(texts_of(model))

    def run():
        results.append(model.stream("a", grammar=FOREVER))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(set(texts_of(model)) - before) == 2, 5)
    with at_most(2):
        model.cancel()
        for thread in threads:
            thread.join()
    for result in (stream.result() for stream in results):
        assert (result.text, result.finish_reason) == ("", "cancelled")


def test_what_arrives_meanwhile_does_not_end_a_worker(model):
    """The system tells a process of what arrives, perhaps when it was read already."""
    properties = {f"name{i}": {"type": "string"} for i in range(300)}
    schema = json.dumps({"type": "object", "properties": properties})
    link = model.vocabulary.start_worker()
    link.send(5.0, lambda: False, "compile", {}, "json_schema", schema)
    for _ in range(3):
        time.sleep(0.01)
        link.send(5.0, lambda: False, "masks", [], [0], [-1])
    assert link.receive_reply(5.0, lambda: False) == ([], b"")
    for _ in range(3):
        counts, masks = link.receive_reply(5.0, lambda: False)
        assert counts[0] > 0
        assert len(masks) >= model.bundle.target.contract.vocab_size / 8
    link.close()


def test_the_event_loop_is_free_while_a_constraint_is_compiled(model):
    async def main():
        ticking = asyncio.create_task(tick(0.01, seen := []))
        result = await model.astream("a", grammar=FOREVER, max_seconds=0.5).result()
        assert result.finish_reason == "deadline"
        stream = model.astream("a", grammar=FOREVER)
        waiting = asyncio.create_task(stream.result())
        await asyncio.sleep(0.2)
        stream.cancel()
        assert (await waiting).finish_reason == "cancelled"
        ticking.cancel()
        return len(seen)

    assert asyncio.run(main()) > 20
    follows(model)


@pytest.fixture
def slow_start(monkeypatch):
    started, popen = [], worker_process._run_program

    def stopped(*arguments):
        process = popen(*arguments)
        os.kill(process.pid, signal.SIGSTOP)
        started.append(process.pid)
        return process

    monkeypatch.setattr(worker_process, "_run_program", stopped)
    monkeypatch.setattr(worker_process, "START_SECONDS", 4.0)
    yield started
    for process in started:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


@cases("seconds, reason", (0.3, "deadline"), (None, "cancelled"))
def test_the_start_of_a_process_ends_with_its_text(model, slow_start, seconds, reason):
    if seconds is None:
        threading.Timer(0.3, model.cancel).start()
    with at_most(2):
        result = model.generate("a", regex="yes", max_seconds=seconds)
    assert (result.text, result.finish_reason) == ("", reason)
    (process,) = slow_start
    os.kill(process, signal.SIGCONT)  # it was slow, and reads on for the next text
    follows(model)
    assert slow_start == [process]


def test_who_waits_for_a_process_that_another_started_can_end_too(model, slow_start):
    first = threading.Thread(target=model.generate, args=("a",), kwargs={"regex": "b"})
    first.start()
    until(lambda: slow_start, 2)
    with at_most(2), model.twin() as twin:
        result = twin.generate("a", regex="b", max_seconds=0.2)
        assert result.finish_reason == "deadline"
    model.cancel()
    first.join(2)
    assert not first.is_alive()


def test_a_process_that_never_starts_is_given_up(model, slow_start, monkeypatch):
    monkeypatch.setattr(worker_process, "START_SECONDS", 0.3)
    for _ in range(2):
        with pytest.raises(OptionError, match="could not be started"):
            model.generate("a", regex="yes")
    assert len(slow_start) == 2
    assert not any(map(is_alive, slow_start))


@pytest.mark.parametrize("grammar", [FOREVER, 'start: "yes"'])
def test_no_worker_survives_its_program(toy, grammar):
    code = (
        "import sys, jetdraft\n"
        "model = jetdraft.load(sys.argv[1], threads=1)\n"
        "model.vocabulary\n"
        "print('read', flush=True)\n"
        "stream = model.stream('a', grammar=sys.argv[2])\n"
        "sys.stdin.read()\n"
    )
    line = [sys.executable, "-c", code, str(toy), grammar]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        until(lambda: len(workers({child.pid})) == 2, 10)
        orphans = workers({child.pid})
        child.kill()
        child.wait()
        until(lambda: not any(map(is_alive, orphans)), 2)


def test_nothing_is_left_of_models_that_are_closed(toy):
    codecs, others = [], workers({os.getpid()})
    for _ in range(4):
        with jetdraft.load(toy, threads=1) as model:
            follows(model)
            codecs.append(weakref.ref(model.parts.text))
        del model
    gc.collect()
    assert not any(codec() for codec in codecs)
    assert workers({os.getpid()}) <= others


def test_closed_models_start_nothing(model):
    model.close()
    with pytest.raises(JetdraftError, match="closed"):
        model.stream("a", regex="b")
