import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil

from jetdraft.server.generation_request import (
    IGNORED_FIELDS,
    OPTION_FIELDS,
    READ_FIELDS,
)
from jetdraft.testing import toy_bundle
from tests.fuzz import Fault, Subject
from tests.fuzz.damages import DEEP, VALUES, routes
from tests.runtime.text.test_worker import REFUSED

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAY = [{"role": "user", "content": "Tell me the speed."}]
TOOL = {"type": "function", "function": {"name": "read_sensor"}}
FORM = {
    "type": "json_schema",
    "json_schema": {"schema": {"type": "object", "properties": {"a": {}}}},
}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (TEXT, {"prompt": "The robot sees", "max_tokens": 8, "seed": 1}),
    (TEXT, {"prompt": [5, 8, 9], "max_tokens": 8, "logprobs": 2, "temperature": 0}),
    (TEXT, {"prompt": "a", "stream": True, "max_tokens": 8, "include_drafted": True}),
    (CHAT, {"messages": SAY, "max_tokens": 8, "logprobs": True, "top_logprobs": 1}),
    (CHAT, {"messages": SAY, "max_tokens": 8, "stream": True, "tools": [TOOL]}),
    (CHAT, {"messages": SAY, "max_tokens": 8, "tools": [TOOL], "tool_choice": "auto"}),
    (CHAT, {"messages": SAY, "max_tokens": 8, "response_format": FORM}),
    (CHAT, {"messages": SAY, "max_tokens": 8, "method": "draft", "user": "ann"}),
    (TEXT, {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, "echo": True}),
    *(
        (path, {**body, "stream": stream})
        for stream in (False, True)
        for path, body in (
            ("/v1/messages", {"messages": SAY, "max_tokens": 8, "system": "a"}),
            ("/v1/responses", {"input": SAY, "tools": [{**TOOL["function"]}]}),
            ("/api/chat", {"model": "toy", "messages": SAY, "tools": [TOOL]}),
            ("/api/generate", {"model": "toy", "prompt": "a", "options": {"top_k": 1}}),
        )
    ),
)
PLACES = (*OPTION_FIELDS, *READ_FIELDS, *IGNORED_FIELDS, "unknown")
MORE: tuple[Any, ...] = (
    *({"\ud800": "\ud800"}, {"maximum": 2**64}, [["Infinity", 1]], {"5": 10**400}),
    *({"5": 1e400}, {"type": "object", "properties": {"\ud800": {"type": "x"}}}),
    *({"pattern": "("}, {"$ref": "#"}, {"$ref": "#/x"}, [SAY], SAY, [TOOL], FORM),
    *([{"role": "\ud800", "content": "a"}], [{"role": "tool", "content": [1]}]),
    *([{"type": "function", "function": {"name": "\ud800"}}], "required", "start: X"),
)
CHUNKED = "Transfer-Encoding: chunked\r\n\r\n"
LOCAL, FOREIGN = (
    ("localhost", "127.0.0.1", "localhost:1"),
    (
        *("evil.example", "ev{il.example", 'ev"il.example', "evil^.example", "a b", ""),
        *("evil.example:99999", "evil.example:x", "localhost.evil.example"),
        "localhost@x",
        *("[::2]", "127.0.0.1.evil.example", "0x7f.1.evil", "evil.example#localhost"),
    ),
)
# Seconds until every request must be answered; a text may take two.
ANSWERED = 12.0
# Seconds until all models are free again.
FREE = 10.0
# Seconds in which /health must answer whatever else is asked.
HEALTHY = 2.5
# Growth of the server's memory after the first hundred cases.
MAX_BYTES_MORE = 80_000_000


class Serving(Subject):
    name = "server"
    things = "requests"
    seconds = 120.0

    def __init__(self, folder: Path, light: bool = False) -> None:
        super().__init__(folder, light)
        self.bundle = toy_bundle(folder / "toy")
        self.tried, self._at_start = 0, (0, 0, 0)
        self.sent: object = None
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "jetdraft", "serve", str(self.bundle)]
        command += ["--port", "0", "--models", "2", "--threads", "1"]
        command += ["--max-seconds", "2", "--max-new-tokens", "64"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://127.0.0.1:(\d+)", line)
        if found is None:
            raise Fault(f"the server does not start: {line}")
        self.port, self.log = int(found[1]), list[str]()
        self._reading = threading.Thread(target=self._read_log, daemon=True)
        self._reading.start()
        self.tried = 0
        self.good = [self._whole(*body) for body in BODIES[:2]]

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(iter(self.process.stderr.readline, ""))

    def run(self, draw: Random) -> str:
        kind = draw.choice(KINDS if self.tried else ("json",))
        try:
            outcome = str(getattr(self, f"_{kind}")(draw))
            self._check(draw)
        except BaseException as error:
            error.add_note(f"kind: {kind}; sent last: {self.sent!r:.2000}")
            self.close()
            self._start()
            raise
        self.tried += 1
        if self.tried == 100:
            self._at_start = self._sizes()
        return outcome

    def _json(self, draw: Random) -> str:
        path, body = draw.choice(BODIES)
        for _ in range(draw.randint(0, 3)):
            body = _changed(draw, body)
        kind = draw.choice(("application/json",) * 8 + ("Application/JSON", "text/x"))
        return self._ask(path, _dumped(draw, body), {"Content-Type": kind})

    def _headers(self, draw: Random) -> str:
        path, body = draw.choice(BODIES)
        name = draw.choice(("Authorization", "X-A", "Accept", "Content-Type", "Cookie"))
        value = draw.choice(("", "Bearer", "Bearer " + "x" * 5000, "\xff", "a, b", "%"))
        data = json.dumps(body).encode()
        return self._ask(path, data, {"Content-Type": "application/json", name: value})

    def _path(self, draw: Random) -> str:
        path = draw.choice(("/", "/v1/models", "/v1/models/%00", "/metrics", "/x" * 99))
        method = draw.choice(("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW"))
        return self._ask(draw.choice((path, CHAT, TEXT)), b"", {}, method)

    def _host(self, draw: Random) -> str:
        local = draw.random() < 0.3
        host = draw.choice(LOCAL if local else FOREIGN)
        data = json.dumps(BODIES[0][1]).encode()
        head = _head(TEXT, f"Content-Length: {len(data)}\r\n\r\n", host)
        status = self._raw_status(head.encode() + data)
        if (status == 200) != local:
            raise Fault(f"the host {host!r} was answered with {status}")
        return f"{status}"

    def _raw(self, draw: Random) -> str:
        data = json.dumps(BODIES[0][1]).encode()
        start = _head(TEXT, "")
        sent = draw.choice(
            (
                bytes(draw.randrange(256) for _ in range(draw.randint(1, 300))),
                b"GET / HTTP/9.9\r\n\r\n",
                b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
                f"{start}Content-Length: -1\r\n\r\n".encode() + data,
                f"{start}Content-Length: 5\r\nContent-Length: 9\r\n\r\n".encode(),
                f"{start}{CHUNKED}ffffffffffffffff\r\n".encode(),
                f"{start}{CHUNKED}0\r\n\r\n".encode(),
                f"{start}Expect: 100-continue\r\nContent-Length: 9\r\n\r\n".encode(),
                f"{start}X: {'y' * 70_000}\r\n\r\n".encode(),
                start.replace("\r\n", "\n").encode() + b"\n",
                f"{start}Upgrade: websocket\r\nConnection: upgrade\r\n\r\n".encode(),
            )
        )
        return f"raw {self._raw_status(sent, waits=0.3) or 'without an answer'}"

    def _half(self, draw: Random) -> str:
        path, body = draw.choice(BODIES)
        request = _request(path, json.dumps(body).encode())
        with self._socket() as client:
            client.sendall(request[: draw.randrange(1, len(request))])
            if draw.random() < 0.3:
                client.shutdown(socket.SHUT_WR)
                time.sleep(0.05)
        return "half a request"

    def _leaver(self, draw: Random) -> str:
        path, body = draw.choice(BODIES)
        body = {**body, "max_tokens": 64, "stream": draw.random() < 0.7}
        with self._socket() as client:
            client.sendall(_request(path, json.dumps(body).encode()))
            if draw.random() < 0.7:
                client.recv(draw.randint(1, 500))
            if draw.random() < 0.5:  # a reset in place of an end
                client.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )
        return "left early"

    def _slow(self, draw: Random) -> str:
        body = {**BODIES[2][1], "max_tokens": 64, "ignore_eos": True}
        with self._socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.sendall(_request(TEXT, json.dumps(body).encode()))
            for _ in range(draw.randint(1, 20)):
                client.recv(draw.randint(1, 9))
                time.sleep(0.005)
        return "read slowly"

    def _burst(self, draw: Random) -> str:
        wanted = [draw.randrange(len(self.good)) for _ in range(12)]
        with ThreadPoolExecutor(12) as threads:
            answers = threads.map(lambda at: self._whole(*BODIES[at]), wanted)
        for at, answer in zip(wanted, answers, strict=True):
            if answer != self.good[at]:
                raise Fault(f"{answer!r} among twelve, {self.good[at]!r} alone")
        return "twelve at once"

    def _idle(self, draw: Random) -> str:
        with ExitStack() as stack:
            for number in range(draw.choice((20, 140))):
                client = stack.enter_context(self._socket())
                if number % 2:
                    client.sendall(b"POST / HTTP/1.1\r\nHost: local")
            self._health(HEALTHY)
        return "idle connections"

    def _bomb(self, draw: Random) -> str:
        name = draw.choice(sorted(BOMBS))
        body = {"max_seconds": 2, "max_tokens": 4, **BOMBS[name]}
        path = CHAT if "messages" in body else TEXT
        if path == TEXT:
            body = {"prompt": "a", **body}
        answer: list[str] = []
        data = json.dumps(body).encode()
        thread = threading.Thread(
            target=lambda: answer.append(self._ask(path, data, JSON))
        )
        thread.start()
        end = time.monotonic() + ANSWERED
        while thread.is_alive() and time.monotonic() < end:
            self._health(HEALTHY)
            thread.join(0.2)
        if not answer:
            raise Fault(f"{name}: no answer in {ANSWERED} s")
        return f"costly {answer[0]}"

    def _ask(
        self, path: str, data: bytes, headers: dict[str, str], method: str = "POST"
    ) -> str:
        """Send a request and check the answer's shape; gives its status."""
        self.sent = method, path, headers, data
        status, kind, body = self._exchange(method, path, data, headers)
        if method != "HEAD":
            _check_shape(status, kind, body, path)
        return str(status)

    def _exchange(
        self,
        method: str,
        path: str,
        data: bytes,
        headers: dict[str, str],
        seconds: float = ANSWERED,
    ) -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        with closing(connection):
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("content-type", ""), answer.read()

    def _whole(self, path: str, body: dict[str, Any]) -> object:
        data = json.dumps(body).encode()
        answer = json.loads(self._exchange("POST", path, data, JSON, seconds=30)[2])
        if "choices" not in answer:
            raise Fault(f"a good request got {answer}")
        return answer["choices"]

    def _raw_status(self, data: bytes, waits: float = ANSWERED) -> int:
        """The status after sending bytes; 0 without an answer."""
        with self._socket(waits) as client, suppress(OSError):
            client.sendall(data)
            first = client.recv(4096)
            found = re.match(rb"HTTP/1.1 (\d+)", first)
            status = int(found[1]) if found else 0
            if status >= 500:
                raise Fault(f"{data[:300]!r} was answered with {first!r}")
            return status
        return 0

    def _socket(self, timeout: float = ANSWERED) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def _health(self, seconds: float) -> dict[str, Any]:
        try:
            status, _, data = self._exchange("GET", "/health", b"", {}, seconds)
        except OSError as error:
            raise Fault(f"/health: {error!r}") from error
        if status != 200:
            raise Fault(f"/health was answered with {status} {data!r}")
        state: dict[str, Any] = json.loads(data)
        return state

    def _check(self, draw: Random) -> None:
        """All models are free, nothing was logged, good answers are the same."""
        end = time.monotonic() + FREE
        while (state := self._health(FREE))["generating"] or state["waiting"]:
            if time.monotonic() > end:
                raise Fault(f"models are not free again: {state}")
            time.sleep(0.005)
        text = "".join(self.log)
        if "Traceback" in text or "Error" in text:
            self.log.clear()
            raise Fault(f"the server's log: {text[-3000:]}")
        if draw.random() < 0.02:
            for at, good in enumerate(self.good):
                if self._whole(*BODIES[at]) != good:
                    raise Fault("a good request has another answer than before")

    def _sizes(self) -> tuple[int, int, int]:
        process = psutil.Process(self.process.pid)
        return process.memory_info().rss, process.num_threads(), process.num_fds()

    def finish(self) -> None:
        time.sleep(0.2)
        if self.tried < 100:
            return
        sizes = self._sizes()
        self.facts["MB of the server at first"] = self._at_start[0] // 10**6
        self.facts["MB of the server at last"] = sizes[0] // 10**6
        for what, before, after, most in zip(
            ("bytes", "threads", "file handles"),
            *(self._at_start, sizes, (MAX_BYTES_MORE, 8, 8)),
            strict=True,
        ):
            if after - before > most:
                raise Fault(f"the server had {before} {what} and has {after} now")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


JSON = {"Content-Type": "application/json"}
KINDS = ("json",) * 60 + ("raw",) * 12 + ("headers", "half", "leaver", "host") * 5
KINDS += ("slow", "path", "path") + ("burst",) * 2 + ("idle", "bomb")

TOOLS = [{"type": "function", "function": {"name": f"tool{n}"}} for n in range(3000)]
STOPS = [f"x{n}" for n in range(90_000)]
BOMBS: dict[str, dict[str, Any]] = {
    **{name: REFUSED[name] for name in ("grammar", "long pattern", "properties")},
    "many stops": {"ignore_eos": True, "stop": STOPS},
    "a long prompt": {"prompt": "word " * 180_000},
    "many tools": {"messages": SAY, "tools": TOOLS},
    "nested repetition": {"regex": "((a{1,99}){1,99}){1,99}"},
}


def _changed(draw: Random, body: dict[str, Any]) -> dict[str, Any]:
    body = json.loads(json.dumps(body))
    value = draw.choice((*VALUES, *MORE))
    if draw.random() < 0.6:
        return {**body, draw.choice(PLACES): value}
    route = draw.choice(list(routes(body)))
    inner: Any = body
    for key in route[:-1]:
        inner = inner[key]
    inner[route[-1]] = value
    return body


def _dumped(draw: Random, body: dict[str, Any]) -> bytes:
    depth = draw.choice((90, 5000, 200_000))
    try:
        text = json.dumps(body).replace(f'"{DEEP}"', "[" * depth + "]" * depth)
    except ValueError:  # an integer with too many digits
        text = "{"
    data = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.05:
        data = data[: draw.randrange(len(data) + 1)]
    return draw.choice((data,) * 20 + (b"\xff" + data, data + data, data[::-1]))


def _request(path: str, data: bytes) -> bytes:
    return _head(path, f"Content-Length: {len(data)}\r\n\r\n").encode() + data


def _head(path: str, more: str, host: str = "localhost") -> str:
    lines = (f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json")
    return "\r\n".join([*lines, more])


def _check_shape(status: int, kind: str, body: bytes, path: str) -> None:
    if status >= 500:
        raise Fault(f"{path} was answered with {status} {body[:300]!r}")
    if kind.startswith("text/event-stream"):
        lines = [line for line in body.decode().split("\n\n") if line]
        if path not in (CHAT, TEXT):
            return
        values = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        if lines[-1] != "data: [DONE]" or not all("object" in v for v in values):
            raise Fault(f"no stream of OpenAI: {body[-300:]!r}")
    elif status >= 400:
        if body == b"Invalid HTTP request received.":
            return
        error = json.loads(body)["error"]
        if path == "/v1/messages" or path.startswith("/api/"):
            return
        if set(error) != {"message", "type", "param", "code"} or not error["message"]:
            raise Fault(f"no error of OpenAI: {body!r}")
    elif path in (CHAT, TEXT):
        choice = json.loads(body)["choices"][0]
        if not {"index", "finish_reason"} <= set(choice):
            raise Fault(f"no answer of OpenAI: {body!r}")
