import asyncio
import http.client
import json
import os
import socket
import stat
import threading
import time
from contextlib import ExitStack, closing, suppress
from functools import wraps
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest

from jetdraft import OptionError, Result, Stats
from jetdraft.server import RequestError, connection, http_server
from jetdraft.server.connection import CROWDED_CONNECTIONS, ConnectionLimiter, _peer_id
from jetdraft.server.http_server import open_unix_listener
from jetdraft.server.request_queue import Job, RequestQueue
from tests import cases
from tests.server.serving import connect, read, request, served, started, until

BODY = {"model": "toy", "prompt": "The robot sees", "max_tokens": 40, "seed": 1}
BODY |= {"method": "none", "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def test_idle_connections_give_way(service, address):
    with ExitStack() as stack:
        for number in range(140):
            stack.enter_context(connect(address)).sendall(HEAD if number % 2 else b"")
        assert httpx.get(f"{address}/health").status_code == 200
        assert httpx.post(f"{address}/v1/completions", json=BODY).status_code == 200


def test_a_connection_that_does_not_ask_is_closed(fresh, monkeypatch):
    monkeypatch.setattr(connection, "REQUEST_SECONDS", 0.3)
    with served(fresh) as address:
        with connect(address) as silent, connect(address) as slow:
            for byte in HEAD:  # each of them comes in time, the whole does not
                try:
                    slow.sendall(bytes([byte]))
                except OSError:
                    break
                time.sleep(0.05)
            assert end_of(silent)
            assert end_of(slow)
        with connect(address) as line:
            line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /")
            assert b"200 OK" in read(line), "what follows an answer must come in time"


def end_of(line):
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_reads_nothing_for_long_is_dropped(fresh, monkeypatch):
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.3)
    dropped, drop = threading.Event(), connection.Connection.drop
    monkeypatch.setattr(
        connection.Connection, "drop", lambda self: [drop(self), dropped.set()]
    )
    with served(fresh) as address, connect(address) as line:
        many = {"stream": True, "logprobs": 20, "max_tokens": 400}
        line.sendall(request({**BODY, **many}) * 30)
        assert dropped.wait(60)
        with suppress(ConnectionResetError):
            assert read(line).count(b"[DONE]") < 30


class Fake:
    """A connection that enters at once."""

    def __init__(self, keeper, peer, idle=True, since=0.0):
        self.keeper, self.peer, self.is_idle, self.since = keeper, peer, idle, since
        self.dropped, self.let_in = False, keeper.admit(self)

    def drop(self):
        self.dropped = True
        self.keeper.discard(self)


@cases(
    "per_peer, most, newcomer",
    (2, 9, "a"),  # a peer only pushes out its own
    (9, 3, "c"),  # the limit of all is at the cost of whoever has most
)
def test_a_newcomer_pushes_out_the_oldest_of_the_largest(per_peer, most, newcomer):
    keeper = ConnectionLimiter(per_peer=per_peer, most=most)
    lines = [Fake(keeper, peer, since=i) for i, peer in enumerate("baa")]
    lines.append(Fake(keeper, newcomer))
    assert lines[-1].let_in
    assert [line.dropped for line in lines] == [0, 1, 0, 0]


def test_where_all_work_newcomers_are_crowded_and_bounded():
    keeper = ConnectionLimiter(per_peer=2, most=2)
    busy = [Fake(keeper, "a", idle=False) for _ in range(2)]
    crowd = [Fake(keeper, "a") for _ in range(CROWDED_CONNECTIONS + 1)]
    assert not any(line.let_in for line in crowd)
    assert not any(line.dropped for line in busy)
    assert [line.dropped for line in crowd] == [1] + [0] * CROWDED_CONNECTIONS
    keeper.discard(busy[0])
    assert Fake(keeper, "a").let_in


def test_health_is_answered_while_all_connections_work(fresh, slow, monkeypatch):
    monkeypatch.setattr(http_server, "SPARE_CONNECTIONS", -38)  # with 40 that wait: two
    with served(fresh) as address, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connect(address)).sendall(request(BODY))
        until(lambda: fresh.desk.generating == 2)
        health = httpx.get(f"{address}/health")
        assert (health.status_code, health.json()["generating"]) == (200, 2)
        refused = httpx.post(f"{address}/v1/completions", json=BODY)
        assert refused.status_code == 503
        # On this connection a client would be refused for ever.
        assert refused.headers["connection"] == "close"
        assert "too many connections" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]


def test_a_limit_of_files_is_no_end(toy):
    resource = pytest.importorskip("resource")
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, own)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, own[1]))
        process, address = stack.enter_context(started(toy))
        resource.setrlimit(resource.RLIMIT_NOFILE, own)
        with ExitStack() as lines:
            for _ in range(500):
                lines.enter_context(connect(address))
            assert httpx.get(f"{address}/health", timeout=60).status_code == 200
            answer = httpx.post(f"{address}/v1/completions", json=BODY, timeout=60)
            assert answer.status_code == 200
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < 256
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr.read().startswith("POST /v1/completions 200, ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_half_closed_client_gets_its_answer(address, slow, stream, version, model):
    with connect(address) as line:
        line.sendall(request({**BODY, "stream": stream}, version))
        line.shutdown(socket.SHUT_WR)
        answer = read(line)
    # Before the answer there may be interim responses, which every client skips.
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.replace(interim, b"").startswith(b"HTTP/1.1 200 ")
    assert (interim in answer) == (version == "1.1")
    assert b'"finish_reason":' in answer
    if stream:
        assert answer.rstrip().endswith((b"[DONE]", b"0"))


def test_the_answer_of_a_half_closed_client_is_read_by_http_client(address, slow):
    """It skips 100 only, and takes any other interim response for the answer."""
    place = urlsplit(address)
    client = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    client.connect()
    content = json.dumps(BODY)
    client.putrequest("POST", "/v1/completions")
    client.putheader("Content-Type", "application/json")
    client.putheader("Content-Length", str(len(content)))
    client.endheaders(content.encode())
    client.sock.shutdown(socket.SHUT_WR)
    with closing(client), client.getresponse() as answer:
        assert answer.status == 200
        assert json.loads(answer.read())["choices"][0]["finish_reason"] == "length"


def test_half_a_request_is_none(address):
    with connect(address) as line:
        line.sendall(request(BODY)[:-3])
        line.shutdown(socket.SHUT_WR)
        assert read(line) == b""


def test_what_is_not_http_is_refused_in_the_usual_form(address):
    with connect(address) as line:
        line.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, content = read(line).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


def transport(address, family=socket.AF_INET6):
    line = SimpleNamespace(family=family)
    return SimpleNamespace(
        get_extra_info=lambda name: line if name == "socket" else (address, 1)
    )


def test_a_network_of_ipv6_is_one_client():
    assert _peer_id(transport("2001:db8::1")) == _peer_id(transport("2001:db8::f:2"))
    assert _peer_id(transport("2001:db8::1")) != _peer_id(transport("2001:db8:0:1::1"))
    assert _peer_id(transport("::ffff:10.0.0.1")) == "10.0.0.1"
    assert _peer_id(transport("fe80::1%eth0")) == "fe80::/64"
    assert _peer_id(transport("10.0.0.1", socket.AF_INET)) == "10.0.0.1"


def test_turns_go_by_the_connection(fresh, slow, tmp_path):
    path = tmp_path / "s"
    headers = {"X-Forwarded-For": "10.0.0.9", "Forwarded": "for=10.0.0.9"}
    with ExitStack() as stack:
        listener = stack.enter_context(open_unix_listener(path))
        address = stack.enter_context(served(fresh, listener))
        for number in range(4):
            body = {**BODY, "user": f"user {number}"}
            line = stack.enter_context(connect(address))
            extra = "".join(f"{k}: {v}{number}\r\n" for k, v in headers.items())
            line.sendall(request(body).replace(b"Host", extra.encode() + b"Host"))
        until(lambda: fresh.desk.waiting == 2)
        own = stack.enter_context(socket.socket(socket.AF_UNIX))
        own.connect(str(path))
        own.sendall(request(BODY))
        until(lambda: fresh.desk.waiting == 3)
        waiting = {c: len(queue) for c, queue in fresh.desk._waiting.items()}
        assert waiting == {"127.0.0.1": 2, f"uid {os.getuid()}": 1}
    until(lambda: fresh.desk.generating == 0)


def test_a_server_answers_at_both_doors(toy, tmp_path):
    path = tmp_path / "s"
    with started(toy, "--uds", path) as (process, address):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            # No page of a browser comes this way, so any name will do.
            answer = client.post("http://robot/v1/completions", json=BODY, timeout=60)
        other = httpx.post(f"{address}/v1/completions", json=BODY, timeout=60)
        texts = {a.json()["choices"][0]["text"] for a in (answer, other)}
        assert len(texts) == 1
        process.terminate()
        assert process.wait(60) == 0
    assert not path.exists()


def test_the_socket_of_a_dead_server_is_replaced(toy, tmp_path):
    path = tmp_path / "s"
    with started(toy, "--uds", path) as (process, _):
        process.kill()
        process.wait()
    assert stat.S_ISSOCK(path.lstat().st_mode)
    with open_unix_listener(path), socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))


def test_the_socket_of_a_server_that_lives_and_what_replaced_it_are_left(tmp_path):
    path = tmp_path / "s"
    with open_unix_listener(path):
        with pytest.raises(OptionError, match="another server listens"):
            open_unix_listener(path).__enter__()
        assert path.exists()
        path.unlink()
        path.write_text("kept")
    assert path.read_text() == "kept"


def test_nothing_but_a_socket_is_removed(tmp_path):
    file, link, folder = (tmp_path / name for name in ("file", "link", "folder"))
    file.write_text("kept")
    link.symlink_to(tmp_path / "nowhere")
    folder.mkdir()
    os.mkfifo(tmp_path / "fifo")
    for path in (file, link, folder, tmp_path / "fifo"):
        with pytest.raises(OptionError, match="no socket"):
            open_unix_listener(path).__enter__()
    assert file.read_text() == "kept"
    assert link.is_symlink()
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["x" * 200, "none/s", "a\0b"])
def test_impossible_paths(tmp_path, name):
    with pytest.raises(OptionError, match="choose another --uds"):
        open_unix_listener(tmp_path / name).__enter__()


def test_the_mask_of_the_process_is_as_before(tmp_path):
    before = os.umask(0o022)
    try:
        with open_unix_listener(tmp_path / "s"):
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def story(body):
    @wraps(body)
    def test(**arguments):
        run(body(**arguments))

    return test


async def take(queue, client, log, name=None, hold=None, text=""):
    async with queue.acquire_model(client, text) as model:
        log.append(name or client)
        await (hold.wait() if hold else asyncio.sleep(0))
        return model


async def start(*coroutines):
    tasks = []
    for coroutine in coroutines:
        tasks.append(asyncio.create_task(coroutine))
        await asyncio.sleep(0)
    return tasks


@story
async def test_clients_take_turns():
    queue, log, hold = RequestQueue(["m"], 9, 30.0), [], asyncio.Event()
    tasks = await start(
        take(queue, "x", log, "x0", hold),
        *(take(queue, "greedy", log, f"g{i}") for i in range(4)),
        take(queue, "small", log, "s0"),
        take(queue, "other", log, "o0"),
    )
    assert queue.waiting == 6
    assert queue.generating == 1
    hold.set()
    await asyncio.gather(*tasks)
    assert log == ["x0", "g0", "s0", "o0", "g1", "g2", "g3"]
    assert (queue.waiting, queue.generating) == (0, 0)


@cases(
    "most, seconds, waiting, words, status",
    (1, 30.0, "b", "too many", 429),
    (9, 0.05, "", r"0\.05 s", 503),
)
@story
async def test_a_queue_and_waiting_have_an_end(most, seconds, waiting, words, status):
    queue, log, hold = RequestQueue(["m"], most, seconds), [], asyncio.Event()
    holder = take(queue, "a", log, hold=hold)
    tasks = await start(holder, *(take(queue, name, log) for name in waiting))
    with pytest.raises(RequestError, match=words) as refused:
        await take(queue, "c", log)
    assert refused.value.status == status
    assert queue.waiting == len(waiting)
    hold.set()
    await asyncio.gather(*tasks)
    assert await take(queue, "c", log) == "m"


@story
async def test_whoever_fills_the_queue_makes_room():
    queue, log, hold = RequestQueue(["m"], 3, 30.0), [], asyncio.Event()
    tasks = await start(
        take(queue, "greedy", log, "g0", hold),
        *(take(queue, "greedy", log, f"g{i}") for i in range(1, 4)),
        take(queue, "small", log, "s0"),
    )
    hold.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, RequestError) for end in ends] == [0, 0, 0, 1, 0]
    assert ends[3].status == 429
    assert log == ["g0", "g1", "s0", "g2"]
    assert (queue.waiting, queue.generating) == (0, 0)


@cases("has_its_turn", False, True)
@story
async def test_who_leaves_is_forgotten(has_its_turn):
    queue, log, hold = RequestQueue(["m"], 9, 30.0), [], asyncio.Event()
    others = take(queue, "b", log), take(queue, "c" if has_its_turn else "b", log, "c")
    first, second, third = await start(take(queue, "a", log, hold=hold), *others)
    if has_its_turn:
        hold.set()
        while not first.done():
            await asyncio.sleep(0)
    second.cancel()  # if its turn has come, it has not seen so yet
    await asyncio.sleep(0)
    assert queue.waiting == (not has_its_turn)
    hold.set()
    await asyncio.gather(first, third)
    assert (log, queue.generating) == (["a", "c"], 0)


class Windows:
    max_seconds, count, beginning, model = 30.0, 1, "", ""

    def __init__(self):
        self.started, self.cancelled = threading.Event(), threading.Event()
        self.is_closed = False

    def streams(self, model):
        yield self

    def __iter__(self):
        self.started.set()
        assert self.cancelled.wait(20)
        return iter(())

    def cancel(self):
        self.cancelled.set()

    def close(self):
        self.is_closed = True

    def result(self):
        return Result.of([], Stats("none", True, 0), False)


def job_of(stream):
    bundle = SimpleNamespace(adapters={})
    queue = RequestQueue([SimpleNamespace(cancel=lambda: None, bundle=bundle)], 1, 30.0)
    return Job(queue, stream, "a"), queue


@story
async def test_a_job_cancels_its_stream_and_not_only_the_model():
    windows = Windows()
    job, queue = job_of(windows)
    await asyncio.to_thread(windows.started.wait, 20)
    job.cancel()
    await job.results()
    assert queue.generating == 0, "its client may go on at once"


def test_a_loop_that_ends_leaves_no_generation_behind():
    """Else its thread holds the model, which another service takes for free."""
    windows = Windows()

    async def story():
        job_of(windows)
        await asyncio.to_thread(windows.started.wait, 20)

    run(story())
    assert windows.cancelled.is_set()
    assert windows.is_closed


def test_an_end_of_the_process_is_no_answer():
    """It ends the loop; a reader that got it would raise it inside a request."""
    read = []

    class Ending(Windows):
        def __iter__(self):
            raise SystemExit(3)

    async def story():
        job, _ = job_of(Ending())
        try:
            await job.next()
        except BaseException as error:
            read.append(type(error))
            raise

    with pytest.raises(SystemExit):
        run(story())
    assert read == [asyncio.CancelledError]


@story
async def test_a_request_gets_the_model_whose_last_request_it_continues():
    queue, log = RequestQueue(["m", "n", "o"], 9, 30.0), []
    texts = ["be brief. hi", "be brief. yes", "be brief. hi. so", "be kind", "do"]
    had = [await take(queue, "x", log, text=text) for text in texts]
    # The third continues the first; others get what has been free for longest.
    assert had == ["m", "n", "m", "o", "n"]
    hold = asyncio.Event()
    taken = await start(take(queue, "x", log, text="be kind. now", hold=hold))
    assert await take(queue, "x", log, text="be kind. then") == "m", "o is not free"
    hold.set()
    assert await taken[0] == "o"
