"""The routes of the server, its answers to bad requests, and its metrics."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jetdraft import __version__
from jetdraft.errors import JetdraftError
from jetdraft.parsing import JsonError, read_json
from jetdraft.runtime.pool import Pool
from jetdraft.runtime.speech.segments import Transcript
from jetdraft.runtime.speech.transcription import check_speech
from jetdraft.server.connection import Admission
from jetdraft.server.desk import AnyRequest, Desk, Job
from jetdraft.server.generation_request import GenerationRequest
from jetdraft.server.limits import Limits
from jetdraft.server.refusal import RequestError, refusal
from jetdraft.server.reply import Events, Reply, unless_gone
from jetdraft.server.transcription_request import TranscriptionRequest, read_form

RECEIVE_SECONDS = 30.0
"""The most seconds that a body may take to arrive."""

DEFAULT_LIMITS = Limits()

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/transcriptions"
COUNTED = ("/v1/completions", CHAT, SPEECH, "/v1/models", "/metrics")
JSON, FORM = "application/json", "multipart/form-data"

COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "new_tokens": "Tokens that were generated.",
    "target_passes": "Passes of the target, without passes over prompts.",
    "drafted_tokens": "Tokens that were drafted.",
    "accepted_tokens": "Drafted tokens that the target chose too.",
    "reused_tokens": "Tokens of prompts that were still in the buffers.",
}
GAUGES = {
    "acceptance_rate": "Accepted drafted tokens per evaluated drafted token.",
    "tokens_per_pass": "Tokens per pass of the target.",
    "tokens_per_second": "Tokens per second of decoding, after the first round.",
    "waiting": "Requests that wait for a model.",
    "generating": "Models in use.",
}


class Service:
    """The models of a pool behind HTTP; `name` is the model's name in requests."""

    def __init__(
        self, pool: Pool, name: str, limits: Limits = DEFAULT_LIMITS, api_key: str = ""
    ) -> None:
        self.pool, self.name, self.limits = pool, name, limits
        self._key, self._admission = api_key, Admission(api_key)
        self.desk = Desk(pool.models, limits.max_waiting, limits.max_wait)
        self.metrics = Metrics(self.desk)
        parts = pool.models[0].parts
        self._sounds = asyncio.Semaphore(limits.max_sounds)
        self._keeps = parts.store is not None or parts.learning is not None
        self._defaults = pool.models[0].defaults
        self._fingerprint = _fingerprint(parts.profiles.machine)
        if pool.models[0].bundle.chat_template:
            _ = pool.models[0].template  # refuses a broken one before the first request

    def app(self, host: str = "127.0.0.1") -> Starlette:
        """The ASGI application for a server that listens on `host`."""
        self._admission = Admission(self._key, host)
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._answer, methods=["POST"]),
                Route(CHAT, self._answer, methods=["POST"]),
                Route(SPEECH, self._transcribe, methods=["POST"]),
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
        self._admission.check(request, keyed=False)
        return HTMLResponse(files("jetdraft.server").joinpath("page.html").read_text())

    async def _health(self, request: Request) -> Response:
        self._admission.check(request, keyed=False)
        state = {"generating": self.desk.generating, "waiting": self.desk.waiting}
        return JSONResponse({"status": "ok", **state})

    async def _metrics(self, request: Request) -> Response:
        self._admission.check(request)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        self._admission.check(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._admission.check(request)
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

    async def _answer(self, request: Request) -> ASGIApp:
        self._admission.check(request)
        body = await self._body(request)
        self._check_name(body.get("model", self.name))
        limits, model = self.limits, self.pool.models[0]
        chat = request.url.path == CHAT
        wanted = GenerationRequest.of(body, chat, limits.max_new_tokens, self._defaults)
        if chat and wanted.tools is not None:
            wanted = replace(wanted, tools=model.fitted(wanted.tools))
        seconds = wanted.options.get("max_seconds", limits.max_seconds)
        wanted.options["max_seconds"] = min(seconds, limits.max_seconds)
        reply = Reply(wanted, self.name, model.parts.text, self._fingerprint)
        job = self._job(request, wanted)
        if wanted.streamed:
            first = await unless_gone(request.receive, job, job.next())
            return Events(job, reply, first, partial(self._count, request))
        result = await unless_gone(request.receive, job, job.result())
        self._count(request, 200)
        return JSONResponse(reply.whole(result))

    def _job(self, request: Request, wanted: AnyRequest) -> Job:
        client = request.client.host if request.client else ""
        if self._keeps:
            wanted.options["drafting"] = {"user": client}  # only its own responses
        return Job(self.desk, wanted, client)

    async def _transcribe(self, request: Request) -> Response:
        self._admission.check(request)
        origin = request.headers.get("origin")
        host = request.headers.get("host", "")
        # A browser sends the form of a foreign page without asking.
        if origin is not None and origin.partition("://")[2] != host:
            raise RequestError(
                f"the page at {origin!r} is foreign; send the form from {host!r}",
                status=403,
            )
        check_speech(self.pool.models[0].parts)
        try:
            async with asyncio.timeout(self.limits.max_wait):
                await self._sounds.acquire()
        except TimeoutError:
            raise RequestError(
                "too many sounds are being heard; try again later", status=503
            ) from None
        try:
            return await self._heard(request)
        finally:
            self._sounds.release()

    async def _heard(self, request: Request) -> Response:
        data = await self._data(request, FORM, self.limits.max_sound_bytes)
        form = read_form(data, request.headers["content-type"])
        del data  # the request waits for a model with the sound alone
        wanted = TranscriptionRequest.of(form)
        del form
        if wanted.model is not None:
            self._check_name(wanted.model)
        wanted.options["max_seconds"] = self.limits.max_seconds
        job = self._job(request, wanted)
        result = await unless_gone(request.receive, job, job.result())
        assert isinstance(result, Transcript)
        self._count(request, 200)
        return wanted.response(result)

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object in the body, without fields that are null."""
        # A foreign page cannot send JSON unasked.
        data = await self._data(request, JSON, self.limits.max_body_bytes)
        try:
            body = read_json(data, most_bytes=self.limits.max_body_bytes)
        except JsonError as error:
            raise RequestError(f"the body is not JSON ({error})") from error
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        return {name: value for name, value in body.items() if value is not None}

    async def _data(self, request: Request, kind: str, most: int) -> bytearray:
        """The bytes of a body of that content type, at most `most`."""
        content = request.headers.get("content-type", "").partition(";")[0].strip()
        if content.lower() != kind:
            raise RequestError(f"content type {content!r} is not {kind}", status=415)
        data = bytearray()
        try:
            async with asyncio.timeout(RECEIVE_SECONDS):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        raise RequestError(
                            f"the body is longer than {most} bytes; send less",
                            status=413,
                        )
        except TimeoutError:
            raise RequestError("the body did not come in time", status=408) from None
        except ClientDisconnect:
            raise RequestError("the client has gone", status=499) from None
        return data

    def _check_name(self, name: object) -> None:
        if name != self.name:
            raise RequestError(
                f"there is no model {name!r}; ask for {self.name!r}",
                "model",
                404,
                "model_not_found",
            )

    async def _refuse(self, request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, RequestError) else 400
        self._count(request, status)
        return refusal(error, status, request.url.path == CHAT)

    async def _refuse_http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self._count(request, error.status_code)
        return refusal(f"{request.url.path}: {error.detail}", error.status_code)

    async def _fail(self, request: Request, error: Exception) -> Response:
        self._count(request, 500)
        return refusal("the server failed; its log says why", 500)

    def _count(self, request: Request, status: int) -> None:
        path = request.url.path
        label = path if path in COUNTED else "other"  # clients can invent paths
        self.metrics.answered[label, status] += 1


def _fingerprint(machine: dict[str, Any]) -> str:
    """A short name of this version, bundle and machine, as OpenAI has it."""
    whole = json.dumps([__version__, machine], sort_keys=True)
    return f"fp_{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


class Metrics(Collector):
    """Reads a desk; `answered` counts requests by path and status."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.answered: Counter[tuple[str, int]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Metric]:
        """The families of samples."""
        requests = CounterMetricFamily(
            "jetdraft_requests",
            "Requests by path and status.",
            labels=["path", "status"],
        )
        for (path, status), count in sorted(self.answered.items()):
            requests.add_metric([path, str(status)], count)
        yield requests
        totals = self._desk.total.to_json()
        for name, help_ in COUNTERS.items():
            yield CounterMetricFamily(f"jetdraft_{name}", help_, totals[name])
        now = {"waiting": self._desk.waiting, "generating": self._desk.generating}
        for name, help_ in GAUGES.items():
            value = now.get(name, totals.get(name))
            yield GaugeMetricFamily(f"jetdraft_{name}", help_, value or 0.0)
