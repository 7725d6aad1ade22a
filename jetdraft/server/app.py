"""The routes of the server, its answers to bad requests, and its metrics."""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jetdraft import __version__
from jetdraft.errors import JetdraftError
from jetdraft.parsing import JsonError, read_json
from jetdraft.runtime.embedding import Embeddings
from jetdraft.runtime.pool import Pool
from jetdraft.runtime.speech.segments import Transcript
from jetdraft.runtime.speech.transcription import check_speech
from jetdraft.server import Limits, RequestError, ollama_api, refusal_fields
from jetdraft.server.connection import Admission, refusal_response
from jetdraft.server.dialect import CHATS, COMPLETIONS, EventStream, wait_unless_gone
from jetdraft.server.embedding_request import EmbeddingRequest
from jetdraft.server.generation_request import IGNORED_HEADER, GenerationRequest
from jetdraft.server.messages_api import MESSAGES
from jetdraft.server.prefix_folder import PrefixFolder
from jetdraft.server.reply import Reply
from jetdraft.server.request_queue import AnyRequest, Job, RequestQueue
from jetdraft.server.responses_api import RESPONSES
from jetdraft.server.transcription_request import TranscriptionRequest, read_form

RECEIVE_SECONDS = 30.0  # The most seconds that a body may take to arrive.
DEFAULT_LIMITS = Limits()
# The paths of transcriptions and embeddings, and the APIs of texts by their paths.
SPEECH_PATH, EMBEDDINGS_PATH = "/v1/audio/transcriptions", "/v1/embeddings"
DIALECTS = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHATS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/api/chat": ollama_api.CHAT,
    "/api/generate": ollama_api.GENERATE,
}
# Paths that are counted under their names; others are counted together.
COUNTED_PATHS = (*DIALECTS, SPEECH_PATH, EMBEDDINGS_PATH, "/v1/models", "/metrics")
# The content types of requests, and what clients send that do not think of it.
JSON_TYPE, FORM_TYPE = "application/json", "multipart/form-data"
LOOSE_TYPES = ("", "application/x-www-form-urlencoded")
# Metrics by name with their help: counters, and gauges of the stats or the queue.
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
    """The HTTP API of a pool of models; `name` is the model's name in requests.

    Pages of `origins` may ask in a browser; `prefixes` is the folder of a
    `PrefixFolder`. Raises `JetdraftError` for a broken chat template, an API key that
    cannot be sent, or a folder that cannot be used.
    """

    def __init__(
        self,
        pool: Pool,
        name: str,
        limits: Limits = DEFAULT_LIMITS,
        api_key: str = "",
        origins: Sequence[str] = (),
        prefixes: Path | None = None,
    ) -> None:
        self.pool, self.name, self.limits = pool, name, limits
        self._origins = tuple(origins)
        self._key, self._admission = api_key, Admission(api_key)
        parts = pool.models[0].parts
        self._fingerprint = _fingerprint(parts.profiles.machine)
        folder = None
        if prefixes is not None:
            pool.models[0].check_prefix_support()
            folder = PrefixFolder(prefixes, self._fingerprint, limits.prefix_bytes)
        waiting = limits.max_waiting, limits.max_wait
        self.desk = RequestQueue(pool.models, *waiting, folder)
        self.metrics = Metrics(self.desk)
        self._sound_slots = asyncio.Semaphore(limits.max_sounds)
        self._keeps_responses = parts.store is not None or parts.learning is not None
        self._defaults = pool.models[0].defaults
        if pool.models[0].bundle.chat_template:
            _ = pool.models[0].template  # refuses a broken one before the first request

    def app(self, host: str = "127.0.0.1") -> Starlette:
        """Make the ASGI application for a server that listens on `host`."""
        self._admission = Admission(self._key, host)
        return Starlette(
            routes=[
                Route("/", self._serve_page),
                Route("/health", self._serve_health),
                Route("/metrics", self._serve_metrics),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._serve_model),
                *(
                    Route(path, self._serve_generation, methods=["POST"])
                    for path in DIALECTS
                ),
                Route(SPEECH_PATH, self._serve_transcription, methods=["POST"]),
                Route(EMBEDDINGS_PATH, self._serve_embeddings, methods=["POST"]),
                Route("/api/version", self._serve_version),
                Route("/api/tags", self._tell_ollama),
                Route("/api/ps", self._tell_ollama),
                Route("/api/show", self._tell_ollama, methods=["POST"]),
            ],
            middleware=[_cross_origin(self._origins)] if self._origins else [],
            exception_handlers={
                JetdraftError: self._refuse,
                HTTPException: self._refuse_http,
                Exception: self._answer_failure,
            },
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.desk.threads.shutdown(wait=False)

    async def _serve_page(self, request: Request) -> Response:
        self._admission.check(request, needs_key=False)
        return HTMLResponse(files("jetdraft.server").joinpath("page.html").read_text())

    async def _serve_health(self, request: Request) -> Response:
        self._admission.check(request, needs_key=False)
        state = {"generating": self.desk.generating, "waiting": self.desk.waiting}
        return JSONResponse({"status": "ok", **state})

    async def _serve_metrics(self, request: Request) -> Response:
        self._admission.check(request)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _list_models(self, request: Request) -> Response:
        self._admission.check(request)
        ends = {"first_id": self.name, "last_id": self.name, "has_more": False}
        models = [self._model_entry()]
        return JSONResponse({"object": "list", "data": models, **ends})

    async def _serve_version(self, request: Request) -> Response:
        self._admission.check(request)
        return JSONResponse({"version": __version__})

    async def _tell_ollama(self, request: Request) -> Response:
        """List the model, or show it to a POST request."""
        self._admission.check(request)
        fields = ollama_api.model_fields(self.name, self.pool.models[0].bundle)
        if request.method != "POST":
            return JSONResponse({"models": [fields]})
        asked = await self._read_object(request)
        name = asked.get("model", asked.get("name", self.name))
        self._check_model_name(str(name).removesuffix(":latest"))
        return JSONResponse(fields)

    async def _serve_model(self, request: Request) -> Response:
        self._admission.check(request)
        self._check_model_name(request.path_params["name"])
        return JSONResponse(self._model_entry())

    def _model_entry(self) -> dict[str, Any]:
        """The model as OpenAI and Anthropic list it, with its capacity and methods."""
        first = self.pool.models[0]
        capacity = first.parts.target.contract.capacity
        return {
            "id": self.name,
            **{"object": "model", "created": 0, "owned_by": "jetdraft"},
            **{"type": "model", "display_name": self.name, "lifecycle": "active"},
            "created_at": "1970-01-01T00:00:00Z",
            "max_input_tokens": capacity,
            "max_tokens": self.limits.max_new_tokens,
            "context_window": capacity,
            "methods": list(first.methods),
            "chat": first.bundle.chat_template is not None,
        }

    async def _serve_generation(self, request: Request) -> ASGIApp:
        """Answer a completion or a chat: with JSON, or with a stream of events."""
        self._admission.check(request)
        asked, dialect = await self._read_object(request), DIALECTS[request.url.path]
        body, chat = dialect.body(asked)
        self._check_model_name(body.get("model", self.name))
        limits, model = self.limits, self.pool.models[0]
        wanted = GenerationRequest.of(body, chat, limits.max_new_tokens, self._defaults)
        if chat and wanted.tools is not None:
            wanted = replace(wanted, tools=model.fitted(wanted.tools))
        seconds = wanted.options.get("max_seconds", limits.max_seconds)
        wanted.options["max_seconds"] = min(seconds, limits.max_seconds)
        codec = model.parts.text
        reply = Reply(wanted, self.name, codec, self._fingerprint, asked)
        job = self._start_job(request, wanted)
        if wanted.streamed:
            first = await wait_unless_gone(request.receive, job, job.next())
            done = partial(self._count_request, request)
            return EventStream(job, reply, dialect, first, done)
        results = await wait_unless_gone(request.receive, job, job.results())
        self._count_request(request, 200)
        answer = dialect.whole(reply.complete(results), reply)
        return JSONResponse(answer, headers=reply.headers)

    async def _serve_embeddings(self, request: Request) -> Response:
        """Answer a request for the embeddings of texts."""
        self._admission.check(request)
        body = await self._read_object(request)
        self._check_model_name(body.get("model", self.name))
        wanted = EmbeddingRequest.of(body, self.limits.max_seconds)
        job = self._start_job(request, wanted)
        (result,) = await wait_unless_gone(request.receive, job, job.results())
        assert isinstance(result, Embeddings)
        answer = wanted.answer(result, self.name)
        self._count_request(request, 200)
        return JSONResponse(answer)

    def _start_job(self, request: Request, wanted: AnyRequest) -> Job:
        """Put a request into the queue; its drafts use this client's responses only."""
        client = request.client.host if request.client else ""
        if self._keeps_responses:
            wanted.options["drafting"] = {"user": client}
        return Job(self.desk, wanted, client)

    async def _serve_transcription(self, request: Request) -> Response:
        """Answer a transcription, when few enough sounds are in memory."""
        self._admission.check(request)
        origin = request.headers.get("origin")
        host = request.headers.get("host", "")
        # A browser sends the form of a foreign page without asking.
        is_own = origin is None or origin.partition("://")[2] == host
        if not is_own and not {origin, "*"} & {*self._origins}:
            raise RequestError(
                f"the page at {origin!r} is foreign; send the form from {host!r}",
                status=403,
            )
        check_speech(self.pool.models[0].parts)
        try:
            async with asyncio.timeout(self.limits.max_wait):
                await self._sound_slots.acquire()
        except TimeoutError:
            raise RequestError(
                "too many sounds are being heard; try again later", status=503
            ) from None
        try:
            return await self._transcribe_form(request)
        finally:
            self._sound_slots.release()

    async def _transcribe_form(self, request: Request) -> Response:
        data = await self._read_body(request, FORM_TYPE, self.limits.max_sound_bytes)
        form = read_form(data, request.headers["content-type"])
        del data  # the request waits for a model with the sound alone
        wanted = TranscriptionRequest.of(form)
        del form
        if wanted.model is not None:
            self._check_model_name(wanted.model)
        wanted.options["max_seconds"] = self.limits.max_seconds
        job = self._start_job(request, wanted)
        [result] = await wait_unless_gone(request.receive, job, job.results())
        assert isinstance(result, Transcript)
        self._count_request(request, 200)
        return wanted.response(result)

    async def _read_object(self, request: Request) -> dict[str, Any]:
        """Read the JSON object in the body, without fields that are null."""
        # A foreign page cannot send JSON unasked.
        data = await self._read_body(request, JSON_TYPE, self.limits.max_body_bytes)
        try:
            body = read_json(data, most_bytes=self.limits.max_body_bytes)
        except JsonError as error:
            reason = str(error).removeprefix("no valid JSON: ")
            raise RequestError(f"the body is not JSON ({reason})") from error
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        return {name: value for name, value in body.items() if value is not None}

    async def _read_body(self, request: Request, kind: str, most: int) -> bytearray:
        """Read a body of type `kind`, at most `most` bytes; raises `RequestError`."""
        content = request.headers.get("content-type", "").partition(";")[0].strip()
        # A browser names the origin of each page that posts, curl and others do not.
        is_loose = kind == JSON_TYPE and "origin" not in request.headers
        if content.lower() != kind and not (is_loose and content in LOOSE_TYPES):
            raise RequestError(f"content type {content!r}; send {kind}", status=415)
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

    def _check_model_name(self, name: object) -> None:
        """Raise `RequestError` with status 404 unless `name` is this model's."""
        if name != self.name:
            raise RequestError(
                f"there is no model {name!r}; ask for {self.name!r}",
                "model",
                404,
                "model_not_found",
            )

    async def _refuse(self, request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, RequestError) else 400
        self._count_request(request, status)
        return self._refusal(request, error, status)

    async def _refuse_http(self, request: Request, error: Exception) -> Response:
        """Answer an error of starlette, for example 404 for an unknown path."""
        assert isinstance(error, HTTPException)
        self._count_request(request, error.status_code)
        message = f"{request.url.path}: {error.detail}"
        return self._refusal(request, message, error.status_code)

    async def _answer_failure(self, request: Request, error: Exception) -> Response:
        """Answer an unexpected error with status 500; starlette logs it."""
        self._count_request(request, 500)
        return self._refusal(request, "the server failed; its log says why", 500)

    def _refusal(self, request: Request, error: object, status: int) -> Response:
        """Answer an error in the shape of the API that was asked."""
        path = request.url.path
        dialect = DIALECTS.get(path, COMPLETIONS)
        if path.startswith("/api/"):
            dialect = ollama_api.CHAT
        elif "anthropic-version" in request.headers:
            dialect = MESSAGES
        fields = refusal_fields(error, status, chat=dialect is not COMPLETIONS)
        return refusal_response(dialect.error(fields, status), status)

    def _count_request(self, request: Request, status: int) -> None:
        """Count a request by its path and status, for the metrics."""
        path = request.url.path
        label = path if path in COUNTED_PATHS else "other"  # clients can invent paths
        self.metrics.request_counts[label, status] += 1


def _cross_origin(origins: Sequence[str]) -> Middleware:
    """What lets a browser send requests from pages of other origins."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[IGNORED_HEADER],
    )


def _fingerprint(machine: dict[str, Any]) -> str:
    """Return OpenAI's system_fingerprint: a hash of version, bundle and machine."""
    whole = json.dumps([__version__, machine], sort_keys=True)
    return f"fp_{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


class Metrics(Collector):
    """Metrics of a queue for Prometheus; `request_counts` are by path and status."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self.request_counts: Counter[tuple[str, int]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format, as bytes."""
        return bytes(generate_latest(self._registry))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their values of now; prometheus_client calls it."""
        requests = CounterMetricFamily(
            "jetdraft_requests",
            "Requests by path and status.",
            labels=["path", "status"],
        )
        for (path, status), count in sorted(self.request_counts.items()):
            requests.add_metric([path, str(status)], count)
        yield requests
        totals = self._queue.total.to_json()
        for name, help_ in COUNTERS.items():
            yield CounterMetricFamily(f"jetdraft_{name}", help_, totals[name])
        now = {"waiting": self._queue.waiting, "generating": self._queue.generating}
        for name, help_ in GAUGES.items():
            value = now.get(name, totals.get(name))
            yield GaugeMetricFamily(f"jetdraft_{name}", help_, value or 0.0)
