"""The routes of the server, and its answers to bad requests."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jetdraft.errors import JetdraftError, OptionError
from jetdraft.runtime.piece import Result
from jetdraft.runtime.pool import Pool
from jetdraft.runtime.text.tools import BEGIN
from jetdraft.server.desk import Desk, Job
from jetdraft.server.generation_request import GenerationRequest, RequestError
from jetdraft.server.metrics import Metrics
from jetdraft.server.reply import Reply

T = TypeVar("T")

RECEIVE_SECONDS = 30.0
"""The most seconds that a body may take to arrive."""

COUNTED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics")
KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Limits:
    """Limits of a request: bytes, new tokens, places in the queue, seconds."""

    body_bytes: int = 1_000_000
    new_tokens: int = 1024
    waiting: int = 64
    wait_seconds: float = 120.0
    seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("wait_seconds", "seconds"):
            if not getattr(self, name) > 0.0:  # refuses NaN too
                raise OptionError(
                    f"the limit {name} must be above 0, not {getattr(self, name)}"
                )


class Service:
    """The models of a pool behind HTTP; `name` is the model's name in requests.

    uvicorn.run(Service(pool, "robot").app())
    """

    def __init__(
        self, pool: Pool, name: str, limits: Limits = Limits(), api_key: str = ""
    ) -> None:
        self.pool, self.name, self.limits = pool, name, limits
        self._key, self._local = api_key.encode(), True
        self.desk = Desk(pool.models, limits.waiting, limits.wait_seconds)
        self.metrics = Metrics(self.desk)
        template = pool.models[0].bundle.chat_template
        # Reading the template here refuses a broken one before the first request.
        self._defaults = pool.models[0].defaults
        self._marked = bool(template) and BEGIN in pool.models[0].template.source

    def app(self, host: str = "127.0.0.1") -> Starlette:
        """Return the ASGI application for a server that listens on `host`."""
        # Without a key only local names may reach the server; see `_admit`.
        self._local = is_loopback(host) and not self._key
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers={
                JetdraftError: self._refuse,
                HTTPException: self._refuse_http,
                Exception: self._fail,
            },
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.desk.threads.shutdown(wait=False)

    async def _page(self, request: Request) -> Response:
        self._admit(request, keyed=False)
        return HTMLResponse(files("jetdraft.server").joinpath("page.html").read_text())

    async def _health(self, request: Request) -> Response:
        self._admit(request, keyed=False)
        state = {"generating": self.desk.generating, "waiting": self.desk.waiting}
        return JSONResponse({"status": "ok", **state})

    async def _metrics(self, request: Request) -> Response:
        self._admit(request)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._admit(request)
        self._check_name(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        first = self.pool.models[0]
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "jetdraft",
            "context_window": first.parts.target.contract.capacity,
            "methods": list(first.methods),
        }

    async def _completions(self, request: Request) -> ASGIApp:
        return await self._answer(request, chat=False)

    async def _chat(self, request: Request) -> ASGIApp:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, chat: bool) -> ASGIApp:
        self._admit(request)
        body = await self._body(request)
        self._check_name(body.get("model", self.name))
        wanted = GenerationRequest.of(
            body, chat, self.limits.new_tokens, self._marked, self._defaults
        )
        seconds = wanted.options.get("max_seconds", self.limits.seconds)
        wanted.options["max_seconds"] = min(seconds, self.limits.seconds)
        reply = Reply(wanted, self.name, self.pool.models[0].parts.text)
        job = Job(self.desk, wanted, self._client(request, wanted.user))
        if wanted.streamed:
            first = await _unless_gone(request.receive, job, job.next())
            return Events(job, reply, first, partial(self._count, request))
        result = await _unless_gone(request.receive, job, job.result())
        self._count(request, 200)
        return JSONResponse(reply.whole(result))

    def _client(self, request: Request, user: str) -> str:
        """Return the name under which a request waits for its turn."""
        host = request.client.host if request.client else ""
        return f"{host} {user}"

    async def _body(self, request: Request) -> dict[str, Any]:
        """Return the JSON object in the body."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":  # a foreign page cannot send JSON unasked
            raise RequestError(
                f"content type {kind!r} is not application/json", status=415
            )
        try:
            async with asyncio.timeout(RECEIVE_SECONDS):
                data = await self._received(request)
        except TimeoutError:
            raise RequestError("the body did not come in time", status=408) from None
        except ClientDisconnect:
            raise RequestError("the client has gone", status=499) from None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON ({error})") from error
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        return {name: value for name, value in body.items() if value is not None}

    async def _received(self, request: Request) -> bytearray:
        """Return the bytes of the body; refuse a body that is too long."""
        most, data = self.limits.body_bytes, bytearray()
        async for part in request.stream():
            data += part
            if len(data) > most:
                raise RequestError(
                    f"the body is longer than {most} bytes; send less", status=413
                )
        return data

    def _admit(self, request: Request, keyed: bool = True) -> None:
        """Refuse a foreign host name and, where `keyed`, a missing or wrong key."""
        name = request.url.hostname or ""
        if self._local and not is_loopback(name):
            # A foreign page can point a host name of its own to this address.
            raise RequestError(f"{name!r} is not this server; ask for localhost")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(key.strip().encode(), self._key)
        if keyed and self._key and not (right and scheme.lower() == "bearer"):
            raise RequestError(
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                status=401,
            )

    def _check_name(self, name: object) -> None:
        if name != self.name:
            raise RequestError(
                f"there is no model {name!r}; ask for {self.name!r}", "model", 404
            )

    async def _refuse(self, request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, RequestError) else 400
        self._count(request, status)
        return _error(error, status)

    async def _refuse_http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self._count(request, error.status_code)
        return _error(f"{request.url.path}: {error.detail}", error.status_code)

    async def _fail(self, request: Request, error: Exception) -> Response:
        self._count(request, 500)
        return _error("the server failed; its log says why", 500)

    def _count(self, request: Request, status: int) -> None:
        path = request.url.path
        label = path if path in COUNTED else "other"  # clients can invent paths
        self.metrics.answered[label, status] += 1


class Events:
    """Server-sent events: a job's pieces as they come, until the client goes away.

    `first` is the job's first piece or its result; `done` is called with the status at
    the end.
    """

    def __init__(
        self, job: Job, reply: Reply, first: Any, done: Callable[[int], None]
    ) -> None:
        self._job, self._reply, self._first, self._done = job, reply, first, done
        self._status = 499

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI application."""
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._job.cancel()
            gone.cancel()
            sending.cancel()
            sent, _ = await asyncio.gather(sending, gone, return_exceptions=True)
            self._done(500 if isinstance(sent, Exception) else self._status)
        if isinstance(sent, Exception):
            raise sent

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for line in self._lines():
            await send(_part(line, more=True))
        await send(_part("", more=False))

    async def _lines(self) -> AsyncIterator[str]:
        reply, piece = self._reply, self._first
        for chunk in reply.first():
            yield json.dumps(chunk)
        try:
            while not isinstance(piece, Result):
                for chunk in reply.piece(piece):
                    yield json.dumps(chunk)
                piece = await self._job.next()
            for chunk in reply.last(piece):
                yield json.dumps(chunk)
            self._status = 200
        except JetdraftError as error:
            self._status = 500
            yield json.dumps(_error_fields(error, 500))
        yield "[DONE]"


def _part(line: str, more: bool) -> Message:
    data = f"data: {line}\n\n".encode() if line else b""
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _unless_gone(receive: Receive, job: Job, wanted: Awaitable[T]) -> T:
    """Wait for `wanted` of a job; cancel the job if the client goes away."""
    waiting = asyncio.ensure_future(wanted)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            job.cancel()
            raise RequestError("the client has gone", status=499)
        return waiting.result()
    except asyncio.CancelledError:
        job.cancel()
        raise
    finally:
        gone.cancel()
        waiting.cancel()


async def _gone(receive: Receive) -> None:
    """Return when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(error: object, status: int) -> Response:
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(_error_fields(error, status), status, headers)


def _error_fields(error: object, status: int) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = KINDS.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    param = getattr(error, "param", None) or getattr(error, "field", None) or None
    return {
        "error": {"message": str(error), "type": kind, "param": param, "code": None}
    }


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
