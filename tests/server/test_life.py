import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from openai import OpenAI

from jetdraft import Model, OptionError, OutputError, Pool
from jetdraft.server.app import Service
from jetdraft.server.http_server import Systemd, open_listener, open_unix_listener
from jetdraft.server.request_queue import MIN_ROWS, PrefixFolder
from tests.programs import assert_refused, jetdraft, without
from tests.runtime.test_conversation import with_template
from tests.server.conftest import LIMITS
from tests.server.serving import connect, read, request, served, started, until

LONG = {"model": "toy", "prompt": "The robot sees", "max_tokens": 380}
LONG |= {"temperature": 0.9, "seed": 1, "method": "none", "ignore_eos": True}
ANSWERED = "POST /v1/completions 200"
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}]}
CLIENTS, REQUESTS = 8, 8
PROMPTS = ("The robot sees", '{"name": "Ann"', "The cat", "A blue ball")
RANDOM = np.random.default_rng(7)
SYSTEM = RANDOM.integers(0, 288, 100).tolist()
ASKED = [[*SYSTEM, *RANDOM.integers(0, 288, 9).tolist()] for _ in range(4)]
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.9, "seed": 3}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_the_device(service, address, slow, stream):
    before = service.desk.total.new_tokens
    line = connect(address, {**LONG, "stream": stream})
    until(lambda: service.desk.generating == 1)
    if stream:
        assert line.recv(1000)
    line.close()
    until(lambda: service.desk.generating == 0)
    assert service.desk.total.new_tokens - before < LONG["max_tokens"]


def test_a_client_that_goes_away_leaves_the_queue(service, address, slow):
    lines = [connect(address, LONG) for _ in range(3)]
    until(lambda: service.desk.waiting == 1)
    for line in reversed(lines):
        line.close()
    until(lambda: service.desk.generating == service.desk.waiting == 0)


def test_who_does_not_read_holds_nobody_up(service, address):
    body = {**LONG, "stream": True, "logprobs": 5}
    before = service.desk.total.generations
    lines = [connect(address, body, buffer=4096) for _ in range(6)]
    until(lambda: service.desk.total.generations == before + 6)
    assert httpx.post(f"{address}/v1/chat/completions", json=CHAT).status_code == 200
    for line in lines:
        received = b""
        while b"[DONE]" not in received:
            part = line.recv(65536)
            assert part, "it is still there to be read"
            received += part
        line.close()


def test_a_deadline(address, slow):
    body = {**LONG, "max_seconds": 0.3}
    found = httpx.post(f"{address}/v1/completions", json=body).json()
    assert found["choices"][0]["finish_reason"] == "length"
    assert 0 < found["usage"]["completion_tokens"] < 30


def asked(address, body):
    """The answer, or the error, that a thread waits for."""
    thread = ThreadPoolExecutor(1)
    return thread.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=60)


def test_sigterm_lets_texts_end(toy):
    with started(toy, slow=0.02) as (process, address):
        asking = [asked(address, {**LONG, "max_tokens": count}) for count in (60, 20)]
        until(lambda: httpx.get(f"{address}/health").json()["waiting"] == 1)
        process.send_signal(signal.SIGTERM)
        answers = [each.result(60) for each in asking]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert {a.json()["usage"]["completion_tokens"] for a in answers} == {60, 20}
        assert process.wait(60) == 0
        drain, *requests = process.stderr.read().splitlines()
        assert drain == "finishing 2 texts, at most 30 s; Ctrl-C cuts them"
        rows = [re.fullmatch(rf"{ANSWERED}, (\d+) tokens, \d+ ms", n) for n in requests]
        assert all(rows), requests
        assert {line[1] for line in rows} == {"60", "20"}  # either came first


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_ctrl_c_cuts_the_text_and_answers(toy, stream):
    with started(toy, slow=0.05) as (process, address):
        asking = asked(address, {**LONG, "stream": stream})
        until(lambda: httpx.get(f"{address}/health").json()["generating"] == 1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().endswith("30 s; Ctrl-C cuts it\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        answer = asking.result(60).text
        assert '"server_error"' in answer
        assert answer.rstrip().endswith("[DONE]") == stream
        line, answered = process.stderr.read(), ANSWERED.replace("200", "503")
        tokens = re.fullmatch(rf"{answered}, (\d+) tokens, \d+ ms\n", line)
        assert tokens, line
        assert int(tokens[1]) < LONG["max_tokens"]


def test_a_second_ctrl_c_cuts_a_text_whose_request_comes_later(toy):
    whole = request(LONG).replace(b"Host", b"Expect: 100-continue\r\nHost", 1)
    with started(toy, slow=0.05) as (process, address), connect(address) as line:
        line.sendall(whole[:-9])
        assert line.recv(999).startswith(b"HTTP/1.1 100")
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        line.sendall(whole[-9:])
        assert read(line).startswith(b"HTTP/1.1 503")
        assert process.wait(60) == 130


def test_the_log_has_every_request_and_no_text(fresh, caplog):
    caplog.set_level("INFO", "jetdraft.server")
    with served(fresh) as address, httpx.Client(base_url=address) as client:
        client.get("/health")
        client.post("/v1/completions", json={**LONG, "max_tokens": 3})
        client.post("/v1/completions", json={**LONG, "prompt": 5})
        client.get("/v1/models")
        client.get(f"/a%0ab{'c' * 999}", params={"prompt": LONG["prompt"]})
    records = [r for r in caplog.records if r.name == "jetdraft.server"]
    lines = [record.getMessage() for record in records]
    assert [re.sub(r"\d+ ms$", "ms", line) for line in lines[:3]] == [
        "POST /v1/completions 200, 3 tokens, ms",
        "POST /v1/completions 400, ms",
        "GET /v1/models 200, ms",
    ]
    [strange] = lines[3:]
    assert strange.startswith("GET /a\\nbccc")
    assert " 404, " in strange
    assert len(strange) < 250


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_longer_than_the_drain_is_cut_and_answered(toy, stream):
    with started(toy, "--drain", "1", slow=0.05) as (process, address):
        asking = [asked(address, {**LONG, "stream": stream})]
        until(lambda: httpx.get(f"{address}/health").json()["generating"] == 1)
        asking.append(asked(address, LONG))
        until(lambda: httpx.get(f"{address}/health").json()["waiting"] == 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        answers = [each.result(60) for each in asking]
        cut, refused = sorted(answers, key=lambda a: "has cut" not in a.text)
        assert refused.status_code == 503
        assert "ending" in refused.json()["error"]["message"]
        # No finish reason of OpenAI would be true.
        assert cut.status_code == (200 if stream else 503)
        *lines, last = cut.text.removesuffix("data: [DONE]\n\n").split("data: ")
        error = json.loads(last)["error"]
        assert (error["type"], error["param"]) == ("server_error", None)
        assert (len(lines) > 2) == cut.text.endswith("[DONE]\n\n") == stream
        assert not any('"finish_reason":"' in line for line in lines)
        lines = process.stderr.read()
        assert lines.startswith("finishing 2 texts, at most 1 s")
        assert lines.count("\n") == 3, lines


def test_who_waits_too_long_is_refused(service, slow):
    own = Service(service.pool, "toy", replace(LIMITS, max_wait=0.2))
    with served(own) as address:
        lines = [connect(address, LONG) for _ in range(2)]
        until(lambda: own.desk.generating == 2)
        answer = httpx.post(f"{address}/v1/completions", json=LONG, timeout=60)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("server_error", None)
        assert error["message"].startswith("no model was free for 0.2 s")
        assert answer.headers["retry-after"] == "1"
        for line in lines:
            line.close()
        until(lambda: own.desk.generating == 0)


def test_a_store_shows_nobody_what_others_asked(toy, tmp_path):
    """Each peer drafts from its own responses; `user` makes nobody another."""
    body = {**LONG, "max_tokens": 60, "temperature": 0, "method": "recall"}

    def accepted(client, **more):
        answer = client.post("/v1/completions", json={**body, **more}).json()
        details = answer["usage"]["completion_tokens_details"]
        return details["accepted_prediction_tokens"]

    path = tmp_path / "socket"
    door = httpx.HTTPTransport(uds=str(path))
    with (
        Pool(toy, 1, threads=1, store=tmp_path / "said.sqlite") as pool,
        open_unix_listener(path) as listener,
        served(Service(pool, "toy"), listener) as address,
        httpx.Client(base_url=address, timeout=60) as one,
        httpx.Client(base_url="http://localhost", transport=door, timeout=60) as other,
    ):
        assert accepted(one) == 0
        assert accepted(one, user="else") > 10
        assert accepted(other, user="else") == 0
        assert accepted(other) > 10


def test_a_kill_in_mid_stream_loses_nothing_else(toy, model):
    before = sorted(os.listdir(toy))
    with started(toy, slow=0.02) as (process, address):
        asking = asked(address, LONG)
        until(lambda: httpx.get(f"{address}/health").json()["generating"] == 1)
        process.kill()
        assert isinstance(asking.exception(60), httpx.HTTPError)
    assert sorted(os.listdir(toy)) == before
    with started(toy) as (_, address):
        found = httpx.post(f"{address}/v1/chat/completions", json=CHAT).json()
    assert found["choices"][0]["finish_reason"] == "stop"


def test_a_port_in_use_is_told_before_anything_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = jetdraft("serve", tmp_path, "--port", port)
    assert_refused(result, str(port), "choose another --port")


@pytest.mark.parametrize("host", ["a..b", "\u00e4" * 80, "x" * 300, "nope.invalid"])
def test_a_host_that_is_none_is_refused(host):
    with pytest.raises(OptionError, match="choose another --port or --host") as refused:
        open_listener(host, 0).__enter__()
    assert "\n" not in str(refused.value)


def test_a_broken_template_is_told_before_the_first_request(toy, tmp_path):
    broken = with_template(toy, tmp_path / "broken", "{% for m in messages %}")
    refused = jetdraft("serve", broken, "--port", 0)
    assert_refused(refused, "chat template is broken")


def test_without_the_packages_it_says_what_to_install(toy):
    done = without("starlette", "serve", toy)
    assert done.returncode == 2
    assert "pip install 'jetdraft[cpu,serve]'" in done.stderr


def resident(pid):
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ask(address, number):
    found = {}
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        for turn in range(REQUESTS):
            prompt = PROMPTS[(number + turn) % len(PROMPTS)]
            seed = 100 * number + turn
            asked = {"model": "toy", "temperature": 0.9, "seed": seed, "max_tokens": 24}
            if turn % 2:
                chunks = client.completions.create(**asked, prompt=prompt, stream=True)
                text = "".join(chunk.choices[0].text for chunk in chunks)
            else:
                text = client.completions.create(**asked, prompt=prompt).choices[0].text
            found[prompt, seed] = text
    return found


def test_all_are_answered_and_none_mixed_up(toy, model):
    with started(toy, "--models", "2") as (process, address):
        ask(address, CLIENTS)  # what is allocated once
        before = resident(process.pid)
        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = list(threads.map(lambda n: ask(address, n), range(CLIENTS)))
        after = resident(process.pid)
    texts = {key: text for found in answers for key, text in found.items()}
    assert len(texts) == CLIENTS * REQUESTS
    for (prompt, seed), text in texts.items():
        way = {"method": "none", "temperature": 0.9, "seed": seed, "max_new_tokens": 24}
        assert text == model.generate(prompt, **way).text
    assert len(set(texts.values())) > CLIENTS * REQUESTS / 2
    assert after - before < 16e6, "memory stays"


@pytest.fixture
def manager(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(str(tmp_path / "notify"))
        own.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", own.getsockname())
        yield own


def heard(manager):
    return manager.recv(100).decode()


def test_readiness_watchdog_and_end(manager, toy, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "1500000")
    with started(toy) as (process, address):
        assert heard(manager) == "READY=1"
        assert httpx.get(f"{address}/health").status_code == 200
        assert [heard(manager) for _ in range(3)] == ["WATCHDOG=1"] * 3
        process.terminate()
        while (said := heard(manager)) == "WATCHDOG=1":
            pass
        assert said == "STOPPING=1"
        assert process.wait(60) == 0


def test_a_model_that_hangs_is_not_alive(service, address):
    assert service.desk.overdue <= 0

    class Hanging:
        deadline = time.monotonic() - 5.0

    service.desk.jobs.add(Hanging)
    try:
        assert service.desk.overdue >= 5.0
    finally:
        service.desk.jobs.discard(Hanging)


def test_a_hanging_model_silences_the_watchdog(manager, toy, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    with started(toy, "--max-seconds", "0.2", slow=20.0) as (_, address):
        assert heard(manager) == "READY=1"
        assert heard(manager) == "WATCHDOG=1"
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{address}/v1/completions", json=LONG, timeout=2.0)
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):  # noqa: PT012
            while True:
                manager.recv(100)
        time.sleep(1.2)
        with pytest.raises(BlockingIOError):
            manager.recv(100)
        assert httpx.get(f"{address}/health").status_code == 200, "the loop is well"


def test_an_abstract_address():
    name = f"\0jetdraft-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(name)
        own.settimeout(60)
        Systemd({"NOTIFY_SOCKET": "@" + name[1:]}).notify("READY=1")
        assert heard(own) == "READY=1"


def test_nobody_listens(tmp_path):
    Systemd({}).notify("READY=1")
    Systemd({"NOTIFY_SOCKET": str(tmp_path / "none")}).notify("READY=1")


def test_whose_watchdog_it_is():
    def seconds(**more):
        return Systemd({"WATCHDOG_USEC": "2000000", **more}).watchdog_seconds

    assert (seconds(), seconds(WATCHDOG_PID=str(os.getpid()))) == (2.0, 2.0)
    assert seconds(WATCHDOG_PID="1") is None
    assert seconds(WATCHDOG_USEC="x") is None


@pytest.fixture(scope="module")
def pool(bundle):
    with Pool(bundle, 2, threads=1) as pool:
        yield pool


def answered(folder, model, *prompts):
    results = []
    for prompt in prompts:
        folder.load(model, prompt)
        results.append(model.generate(token_ids=prompt, **OPTIONS))
        folder.save(model, prompt)
    return results


def test_a_beginning_that_two_prompts_share_is_read_once(pool, tmp_path):
    first, other = pool.models
    folder = PrefixFolder(tmp_path / "new", "own", 10**9)
    for model in pool.models:
        model.forget()
    expected = [other.generate(token_ids=p, **OPTIONS).token_ids for p in ASKED]
    other.forget()
    found = answered(folder, first, *ASKED[:2])
    [file] = (tmp_path / "new").glob("own/*.npz")
    # Another client's model, and the same folder after a restart.
    found += answered(folder, other, ASKED[2])
    again = PrefixFolder(tmp_path / "new", "own", 10**9)
    other.forget()
    found += answered(again, other, ASKED[3])
    assert [result.token_ids for result in found] == expected
    assert [r.stats.reused_tokens for r in found] == [0, 100, 100, 100]
    assert list((tmp_path / "new").glob("own/*.npz")) == [file]


def test_a_growing_conversation_and_short_beginnings_are_not_written(pool, tmp_path):
    folder, prompt = PrefixFolder(tmp_path, "own", 10**9), list(SYSTEM)
    for _ in range(3):
        answered(folder, pool.models[0], prompt)
        prompt += prompt[:7]
    answered(folder, pool.models[0], *(p[-9 - MIN_ROWS + 1 :] for p in ASKED))
    assert not list(tmp_path.glob("own/*"))


def test_a_saved_beginning_has_rows_of_the_target_and_cuts_no_text(pool, tmp_path):
    text, saved = SYSTEM * 2, []
    for model, before in zip(pool.models, (text[::-1], text), strict=True):
        model.generate(token_ids=before, method="draft", **OPTIONS)
        model.generate(token_ids=[*text, *text[:9]], method="none", **OPTIONS)
        model.save_prefix(tmp_path / "saved.npz", text)
        assert model.parts.prefix.reusable_rows(text * 2, True) >= len(text) + 9
        saved.append(dict(np.load(tmp_path / "saved.npz")))
    names = [name for name in saved[0] if "/" in name]
    assert {name.partition("/")[0] for name in names} == {"target"}
    assert all(np.array_equal(saved[0][name], saved[1][name]) for name in names)


def test_files_have_a_bound(pool, tmp_path):
    """The file that was unused for longest goes, also a file of another bundle."""
    folder = PrefixFolder(tmp_path, "own", 10**9)
    answered(folder, pool.models[0], *ASKED[:2])
    [file] = tmp_path.glob("own/*.npz")
    size = file.stat().st_size
    (tmp_path / "old").mkdir()
    old, used = (tmp_path / f"old/prefix-{n * 32}.npz" for n in "ab")
    other = tmp_path / "old/mine.npz"
    for path in (old, used, other):
        path.write_bytes(file.read_bytes())
    os.utime(old, (1, 1))
    os.utime(other, (0, 0))
    file.unlink()
    folder = PrefixFolder(tmp_path, "own", 2 * size)
    answered(folder, pool.models[0], *ASKED[:2])
    assert not old.exists()
    assert used.exists()
    assert other.exists(), "it is not the server's"
    assert sum(f.stat().st_size for f in tmp_path.glob("*/p*")) <= 2 * size
    answered(PrefixFolder(tmp_path / "small", "own", size // 2), pool.models[0], *ASKED)
    assert not list((tmp_path / "small").glob("*/*"))


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: b"x"])
def test_a_damaged_file_is_deleted(pool, tmp_path, caplog, damage):
    model = pool.models[0]
    expected = model.generate(token_ids=ASKED[2], **OPTIONS).token_ids
    folder = PrefixFolder(tmp_path, "own", 10**9)
    answered(folder, model, *ASKED[:2])
    [file] = tmp_path.glob("own/*.npz")
    file.write_bytes(damage(file.read_bytes()))
    model.forget()
    assert answered(folder, model, ASKED[2])[0].token_ids == expected
    assert not file.exists() or file.stat().st_size > 1000
    assert "is not a saved prefix" in caplog.text


def test_a_server_shares_beginnings(pool, tmp_path):
    reused = []
    with served(Service(pool, "tiny", prefixes=tmp_path)) as address:
        for prompt in ASKED[:3]:
            for model in pool.models:
                model.forget()
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 4}
            answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
            details = answer.json()["usage"]["prompt_tokens_details"]
            reused.append(details["cached_tokens"])
    assert reused == [0, 0, 100]


def test_where_no_prefix_can_be_kept(pool, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "a\0b"):
        with pytest.raises(OutputError, match="choose another --prefixes"):
            PrefixFolder(tmp_path / name, "own", 1)


def test_an_encoder_decoder_keeps_none(monkeypatch, pool, tmp_path):
    refuse = Mock(side_effect=OptionError("depend on its source"))
    monkeypatch.setattr(Model, "check_prefix_support", refuse)
    with pytest.raises(OptionError, match="source"):
        Service(pool, "tiny", prefixes=tmp_path)
