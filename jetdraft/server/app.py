"""The routes of the server, its answers to bad requests, and its metrics."""

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import generate_latest
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
from jetdraft.errors import JetdraftError, OptionError, printable, refusing
from jetdraft.parsing import JsonError, read_json
from jetdraft.runtime.passes.pictures import NO_IMAGES
from jetdraft.runtime.pool import Pool
from jetdraft.runtime.speech.transcription import check_speech
from jetdraft.runtime.text.template import take_images
from jetdraft.server import Limits, RequestError, ollama_api, refusal_fields
from jetdraft.server.block_apis import MESSAGES, RESPONSES
from jetdraft.server.connection import Admission, refusal_response
from jetdraft.server.generation_request import IGNORED_HEADER, GenerationRequest
from jetdraft.server.reply import CHATS, COMPLETIONS, EventStream, Json, Reply
from jetdraft.server.request_queue import AnyRequest, Job, PrefixFolder, RequestQueue
from jetdraft.server.whole_requests import EmbeddingRequest, TranscriptionRequest

T = TypeVar("T")
Answer = Callable[[Request], Awaitable[Any]]
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
# Fields whose answers only OpenAI's first two APIs have.
OPENAI_FIELDS = ("n", "logprobs", "top_logprobs", "include_drafted")
# Paths that need no key; and paths that are counted under their names, unlike others.
OPEN_PATHS = ("/", "/health")
COUNTED_PATHS = (*DIALECTS, SPEECH_PATH, EMBEDDINGS_PATH, "/v1/models", "/metrics")
# The content types of requests, and what clients send that do not think of it.
JSON_TYPE, FORM_TYPE = "application/json", "multipart/form-data"
# Base64 of images, which a body may have beside `max_body_bytes`.
IMAGE_DATA = re.compile(rb"[A-Za-z0-9+/=]{1000,}")
LOOSE_TYPES = ("", "application/x-www-form-urlencoded")
# Metrics by name with their help: counters, and gauges of the stats or the queue.
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "new_tokens": "Tokens that were generated.",
    "target_passes": "Passes of the target, without passes over prompts.",
    "drafted_tokens": "Tokens that were drafted.",
    "accepted_tokens": "Drafted tokens that the target chose too.",
    "reused_tokens": "Tokens of prompts that were still in the buffers.",
    "picture_tokens": "Tokens of prompts that are rows of images.",
    "unseen_tokens": "Rows of images in whose place a drafter had a token only.",
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
        images: Path | None = None,
    ) -> None:
        self.pool, self.limits = pool, limits
        # The models in requests: the bundle's, and with each adapter by its name.
        self.name, self.names = name, [name, *pool.models[0].bundle.adapters]
        if len({*self.names}) < len(self.names):
            fact = f"{name!r} is the name of an adapter too"
            raise OptionError(f"{fact}; give another --name", "name")
        self._origins, self._key, self._images = tuple(origins), api_key, images
        self._admission, self._model = Admission(api_key), pool.models[0]
        parts = self._model.parts
        whole = json.dumps([__version__, parts.profiles.machine], sort_keys=True)
        self._fingerprint = f"fp_{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
        folder = None
        if prefixes is not None:
            self._model.check_prefix_support()
            folder = PrefixFolder(prefixes, self._fingerprint, limits.prefix_bytes)
        waiting = limits.max_waiting, limits.max_wait
        self.desk = RequestQueue(pool.models, *waiting, folder)
        self.metrics = Metrics(self.desk)
        self._sound_slots = asyncio.Semaphore(limits.max_sounds)
        self._keeps_responses = parts.store is not None or parts.learning is not None
        if self._model.bundle.chat_template:
            _ = self._model.template  # refuses a broken one before the first request

    def app(self, host: str = "127.0.0.1") -> Starlette:
        """Make the ASGI application for a server that listens on `host`."""
        self._admission = Admission(self._key, host)
        cross_origin = Middleware(
            CORSMiddleware,
            allow_origins=self._origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[IGNORED_HEADER],
        )
        errors = JetdraftError, HTTPException, Exception
        return Starlette(
            routes=list(self._routes()),
            middleware=[cross_origin] if self._origins else [],
            exception_handlers=dict.fromkeys(errors, self._refuse),
            lifespan=self._lifespan,
        )

    def _routes(self) -> Iterator[Route]:
        gets: dict[str, Answer] = {
            "/": self._serve_page,
            "/health": self._serve_health,
            "/metrics": self._serve_metrics,
            "/v1/models": self._tell_models,
            "/v1/models/{name:path}": self._tell_models,
            "/api/version": self._serve_version,
            **dict.fromkeys(("/api/tags", "/api/ps"), self._tell_ollama),
        }
        posts: dict[str, Answer] = {
            **dict.fromkeys(DIALECTS, self._serve_generation),
            SPEECH_PATH: self._serve_transcription,
            EMBEDDINGS_PATH: self._serve_embeddings,
            "/api/show": self._tell_ollama,
        }
        for method, answers in (("GET", gets), ("POST", posts)):
            for path, answer in answers.items():
                yield Route(path, partial(self._admit, answer), methods=[method])

    async def _admit(self, answer: Answer, request: Request) -> ASGIApp:
        """Answer a request that is admitted; an object is sent as JSON."""
        self._admission.check(request, request.scope["path"] not in OPEN_PATHS)
        said: ASGIApp | Json = await answer(request)
        return JSONResponse(said) if isinstance(said, dict) else said

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.desk.threads.shutdown(wait=False)

    async def _serve_page(self, request: Request) -> Response:
        return HTMLResponse(files("jetdraft.server").joinpath("page.html").read_text())

    async def _serve_health(self, request: Request) -> Json:
        state = {"generating": self.desk.generating, "waiting": self.desk.waiting}
        return {"status": "ok", **state}

    async def _serve_metrics(self, request: Request) -> Response:
        kind = "text/plain; version=0.0.4"
        return Response(generate_latest(self.metrics), media_type=kind)

    async def _tell_models(self, request: Request) -> Json:
        """Show the model in the path, or list all."""
        if "name" in request.path_params:
            return self._model_entry(self._checked_name(request.path_params["name"]))
        ends = {"first_id": self.name, "last_id": self.names[-1], "has_more": False}
        return {"object": "list", "data": [*map(self._model_entry, self.names)], **ends}

    async def _serve_version(self, request: Request) -> Json:
        return {"version": __version__}

    async def _tell_ollama(self, request: Request) -> Json:
        """List the model, or show it to a POST request."""
        fields = partial(ollama_api.model_fields, model=self._model)
        if request.method != "POST":
            return {"models": [*map(fields, self.names)]}
        asked = await self._read_object(request)
        name = str(asked.get("model", asked.get("name", self.name)))
        return fields(self._checked_name(name.removesuffix(":latest")))

    def _model_entry(self, name: str) -> Json:
        capacity = self._model.parts.target.contract.capacity
        return {
            "id": name,
            **{"object": "model", "created": 0, "owned_by": "jetdraft"},
            **{"type": "model", "display_name": name, "lifecycle": "active"},
            "created_at": "1970-01-01T00:00:00Z",
            **{"max_input_tokens": capacity, "context_window": capacity},
            "max_tokens": self.limits.max_new_tokens,
            "methods": list(self._model.methods),
            "chat": self._model.bundle.chat_template is not None,
        }

    async def _serve_generation(self, request: Request) -> ASGIApp:
        asked, path = await self._read_object(request), request.url.path
        dialect = DIALECTS[path]
        own = str(asked.get("model")).removesuffix(":latest")
        if path.startswith("/api/") and (fields := ollama_api.loaded(own, asked)):
            self._checked_name(own)
            self._count_request(request, 200)
            return JSONResponse(fields)
        body, chat = dialect.body(asked)
        name = self._checked_name(body.get("model", self.name))
        if dialect not in (CHATS, COMPLETIONS):
            for field in OPENAI_FIELDS:
                if (value := body.pop(field, None)) and (field, value) != ("n", 1):
                    raise RequestError(f"this API has no {field}; leave it out", field)
        limits, defaults = self.limits, self._model.defaults
        wanted = GenerationRequest.of(body, chat, limits.max_new_tokens, defaults)
        self._check_images(take_images(wanted.messages)[1])
        if chat and wanted.tools is not None:
            wanted = replace(wanted, tools=self._model.fitted(wanted.tools))
        seconds = wanted.options.get("max_seconds", limits.max_seconds)
        wanted.options["max_seconds"] = min(seconds, limits.max_seconds)
        codec, own = self._model.parts.text, self._fingerprint
        reply = Reply(wanted, name, codec, own, asked, dialect.begun_calls)
        job = self._start_job(request, wanted)
        if wanted.streamed:
            first = await job.wait(request.receive, job.next())
            done = partial(self._count_request, request)
            return EventStream(job, reply, dialect, first, done)
        whole = await self._finish(
            request, job, lambda *results: dialect.whole(reply.complete(results), reply)
        )
        return JSONResponse(whole, headers=wanted.headers)

    async def _serve_embeddings(self, request: Request) -> Response:
        body = await self._read_object(request)
        self._checked_name(body.get("model", self.name))
        wanted = EmbeddingRequest.of(body, self.limits.max_seconds)
        job = self._start_job(request, wanted)
        whole = await self._finish(request, job, partial(wanted.answer, self.name))
        return JSONResponse(whole, headers=wanted.headers)

    def _start_job(self, request: Request, wanted: AnyRequest) -> Job:
        """Put a request into the queue; its drafts use this client's responses only."""
        client = request.client.host if request.client else ""
        if self._keeps_responses:
            wanted.options["drafting"] = {"user": client}
        return Job(self.desk, wanted, client)

    async def _finish(self, request: Request, job: Job, form: Callable[..., T]) -> T:
        """Wait for the results of a job; returns what `form` makes of them."""
        answer = form(*await job.wait(request.receive, job.results()))
        self._count_request(request, 200)
        return answer

    async def _serve_transcription(self, request: Request) -> Response:
        """Answer a transcription, when few enough sounds are in memory."""
        origin = request.headers.get("origin")
        host = request.headers.get("host", "")
        # A browser sends the form of a foreign page without asking.
        is_own = origin is None or origin.partition("://")[2] == host
        if not is_own and not {origin, "*"} & {*self._origins}:
            fact = f"the page at {origin!r} is foreign; send the form from {host!r}"
            raise RequestError(fact, status=403)
        check_speech(self._model.parts)
        fact = "too many sounds are being heard; try again later"
        with refusing(RequestError(fact, status=503), TimeoutError):
            async with asyncio.timeout(self.limits.max_wait):
                await self._sound_slots.acquire()
        try:
            most = self.limits.max_sound_bytes
            data = await self._read_body(request, FORM_TYPE, most)
            wanted = TranscriptionRequest.of(data, request.headers["content-type"])
            del data  # the request waits for a model with the sound alone
            self._checked_name(wanted.model or self.name)
            wanted.options["max_seconds"] = self.limits.max_seconds
            job = self._start_job(request, wanted)
            return await self._finish(request, job, wanted.response)
        finally:
            self._sound_slots.release()

    async def _read_object(self, request: Request) -> Json:
        """Read the JSON object in the body, without fields that are null."""
        # A foreign page cannot send JSON unasked.
        most = self.limits.max_body_bytes
        if self._model.bundle.vision is not None:
            most = max(most, self.limits.max_sound_bytes)
        data = await self._read_body(request, JSON_TYPE, most)
        if len(IMAGE_DATA.sub(b"", data)) > self.limits.max_body_bytes:
            fact = f"more than {self.limits.max_body_bytes} bytes are no image"
            raise RequestError(f"{fact}; send less", status=413)
        try:
            body = read_json(data, most_bytes=most)
        except JsonError as error:
            reason = str(error).removeprefix("no valid JSON: ")
            raise RequestError(f"the body is not JSON ({reason})") from error
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        return {name: value for name, value in body.items() if value is not None}

    async def _read_body(self, request: Request, kind: str, most: int) -> bytearray:
        content = request.headers.get("content-type", "").partition(";")[0].strip()
        # A browser names the origin of each page that posts, curl and others do not.
        is_loose = kind == JSON_TYPE and "origin" not in request.headers
        if content.lower() != kind and not (is_loose and content in LOOSE_TYPES):
            raise RequestError(f"content type {content!r}; send {kind}", status=415)
        data = bytearray()
        late = RequestError("the body did not come in time", status=408)
        gone = RequestError("the client has gone", status=499)
        with refusing(late, TimeoutError), refusing(gone, ClientDisconnect):
            async with asyncio.timeout(RECEIVE_SECONDS):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        fact = f"the body is longer than {most} bytes; send less"
                        raise RequestError(fact, status=413)
        return data

    def _check_images(self, images: Sequence[bytes | Path]) -> None:
        """Raise `RequestError` for files that are not below the folder of images."""
        if images and self._model.bundle.vision is None:
            raise RequestError(NO_IMAGES, "messages")
        for file in (image for image in images if isinstance(image, Path)):
            folder, is_below = self._images and self._images.resolve(), False
            with suppress(OSError, ValueError, RuntimeError):  # NUL, loops of links
                is_below = bool(folder and file.resolve().is_relative_to(folder))
            if not is_below:
                fact = f"{printable(file)} is not below a folder of serve --images"
                raise RequestError(f"{fact}; send the image as data:", "messages")

    def _checked_name(self, name: Any) -> str:
        """Return the name of a model or adapter; raises `RequestError`."""
        if name not in self.names:
            known = " or ".join(map(repr, self.names))
            fact = f"there is no model {name!r}; ask for {known}"
            raise RequestError(fact, "model", 404, "model_not_found")
        return str(name)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Answer and count an error, in the shape of the API that was asked."""
        path, fact, status = request.url.path, error, getattr(error, "status", 400)
        if isinstance(error, HTTPException):  # for example of an unknown path
            fact, status = RequestError(f"{path}: {error.detail}"), error.status_code
        elif not isinstance(error, JetdraftError):  # starlette logs it
            fact, status = RequestError("the server failed; its log says why"), 500
        dialect = DIALECTS.get(path, COMPLETIONS)
        if path.startswith("/api/"):
            dialect = ollama_api.CHAT
        elif "anthropic-version" in request.headers or path.startswith("/v1/messages"):
            dialect = MESSAGES
        self._count_request(request, status)
        fields = refusal_fields(fact, status, chat=dialect is not COMPLETIONS)
        return refusal_response(dialect.error(fields, status), status)

    def _count_request(self, request: Request, status: int) -> None:
        path = request.url.path
        label = path if path in COUNTED_PATHS else "other"  # clients can invent paths
        self.metrics.request_counts[label, status] += 1


class Metrics(Collector):
    """Metrics of a queue for Prometheus; `request_counts` are by path and status."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self.request_counts: Counter[tuple[str, int]] = Counter()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their values of now; prometheus_client calls it."""
        about = "jetdraft_requests", "Requests by path and status."
        requests = CounterMetricFamily(*about, labels=["path", "status"])
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
