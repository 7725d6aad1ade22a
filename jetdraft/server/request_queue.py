"""The queue in which requests wait for a model, and the job that runs a request."""

import asyncio
import logging
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from contextvars import ContextVar
from itertools import count
from math import inf, prod
from pathlib import Path
from threading import Lock
from typing import TypeVar
from uuid import uuid4

import numpy as np
from starlette.types import Receive

from jetdraft.contracts.tensors import Int64s
from jetdraft.errors import JetdraftError, OutputError, StoreError, as_error
from jetdraft.files import read_arrays
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.prefix import TOKENS, common_length
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.speech.transcription import Transcription
from jetdraft.runtime.stream import Embedder, Stream
from jetdraft.runtime.text.stops import CANCELLED, INTERRUPTED
from jetdraft.server import RequestError
from jetdraft.server.generation_request import GenerationRequest
from jetdraft.server.whole_requests import EmbeddingRequest, TranscriptionRequest

T = TypeVar("T")
AnyRequest = GenerationRequest | TranscriptionRequest | EmbeddingRequest
# A list for each HTTP request; its jobs append their numbers of new tokens to it.
WRITTEN_TOKENS: ContextVar[list[int] | None] = ContextVar("written", default=None)
MIN_ROWS = 64  # Fewer rows of a prompt are read again sooner than a file.
REMEMBERED_PROMPTS = 64  # Their beginnings are compared with a new prompt's.
_FILE_NAME = re.compile(r"prefix-[0-9a-f]{32}\.npz")
log = logging.getLogger("jetdraft.server")


class RequestQueue:
    """Gives models to requests: clients take turns, a client's requests stay in order.

    At most `max_waiting` requests wait, each for at most `max_wait` seconds. `jobs` are
    the unfinished jobs, `total` adds up the stats of all generations, and `threads` run
    the generations. A queue belongs to one event loop. A request that continues the
    last request of a free model gets this model, whose buffers may hold the
    conversation; any other gets the model that has been free for longest.
    """

    def __init__(
        self,
        models: Sequence[Model],
        max_waiting: int,
        max_wait: float,
        prefixes: "PrefixFolder | None" = None,
    ) -> None:
        self.max_waiting, self.max_wait = max_waiting, max_wait
        self.models, self.prefixes = list(models), prefixes
        self.threads = ThreadPoolExecutor(len(self.models), "jetdraft-serve")
        self.total = Stats("", exact=True, prompt_tokens=0)
        self._free = list(models)
        self._last_texts: dict[int, str] = {}  # by the id of a model
        self._waiting: dict[str, deque[asyncio.Future[Model]]] = {}
        self.jobs: set[Job] = set()

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def generating(self) -> int:
        return len(self.models) - len(self._free)

    @property
    def overdue(self) -> float:
        """Seconds since the earliest deadline of a job; 0 or less before it."""
        now = time.monotonic()
        return max((now - job.deadline for job in self.jobs), default=0.0)

    def end_jobs(self) -> None:
        """Cut the running texts, and refuse the waiting requests with status 503."""
        for job in list(self.jobs):
            job.end()

    @asynccontextmanager
    async def acquire_model(self, client: str, text: str) -> AsyncIterator[Model]:
        """Wait for a free model and yield it; other requests get it after the block.

        `client` names who takes turns, and `text` continues what it begins with. Raises
        `RequestError`, with status 429 if too many requests wait, and with 503 after
        `max_wait` seconds.
        """
        if self._free:
            last = [self._last_texts.get(id(model), "") for model in self._free]
            continued = [len(t) if text.startswith(t) else 0 for t in last]
            model = self._free.pop(continued.index(max(continued)))
        else:
            model = await self._wait_for_turn(client)
        self._last_texts[id(model)] = text
        try:
            yield model
        finally:
            self._release(model)

    async def _wait_for_turn(self, client: str) -> Model:
        if self.waiting >= self.max_waiting:
            self._make_room(client)
        turn: asyncio.Future[Model] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            async with asyncio.timeout(self.max_wait):
                return await turn
        except (TimeoutError, asyncio.CancelledError, RequestError) as error:
            queue = self._waiting.get(client, deque())
            if turn in queue:
                queue.remove(turn)
            if not queue:
                self._waiting.pop(client, None)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._release(turn.result())
            if isinstance(error, TimeoutError):
                fact = f"no model was free for {self.max_wait:g} s; try again later"
                raise RequestError(fact, status=503) from None
            raise

    def _make_room(self, client: str) -> None:
        """Refuse the last request of whoever has the most; raises if it is `client`."""
        refusal = RequestError("too many requests wait; try again later", status=429)
        longest = max(self._waiting.values(), key=len, default=deque())
        if len(longest) <= 1 + len(self._waiting.get(client, ())):
            raise refusal
        turn = longest.pop()
        if not turn.done():
            turn.set_exception(refusal)

    def _release(self, model: Model) -> None:
        """Give a model to the next client in turn; it is free if nobody waits."""
        while self._waiting:
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue
            if not turn.done():
                turn.set_result(model)
                return
        self._free.append(model)


class Job:
    """Runs one request in a thread; the constructor puts it into the queue.

    The generation does not wait for its reader: `next` returns its pieces one by one
    and then its `Result`, and so on for further texts of the request; or it raises the
    error of a text, also if the text was cut. `deadline` is in seconds of
    `time.monotonic`, infinite while no text runs.
    """

    deadline = inf

    def __init__(self, queue: RequestQueue, request: AnyRequest, client: str) -> None:
        self._queue, self._request, self._client = queue, request, client
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | Result | Exception] = asyncio.Queue()
        self._has_ended = False
        self._cancelled, self._written = False, WRITTEN_TOKENS.get()
        self._model: Model | None = None
        self._stream: Stream | Transcription | Embedder | None = None
        self._task = asyncio.create_task(self._run())
        queue.jobs.add(self)
        self._task.add_done_callback(lambda task: queue.jobs.discard(self))

    async def next(self) -> Piece | Result:
        """Wait for the next piece, or the result; raises the generation's error."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def results(self) -> list[Result]:
        """Wait for the results of all texts, and drop their pieces."""
        results = list[Result]()
        while len(results) < self._request.count:
            if isinstance(event := await self.next(), Result):
                results.append(event)
        return results

    async def wait(self, receive: Receive, wanted: Awaitable[T]) -> T:
        """Await `wanted`; if the client leaves first, cancel and raise an error."""
        waiting = asyncio.ensure_future(wanted)
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise RequestError("the client has gone", status=499)
            return waiting.result()
        finally:
            if not waiting.done():
                self.cancel()
            gone.cancel()
            waiting.cancel()

    def cancel(self) -> None:
        """Leave the queue, or end the generation at its next round."""
        self._cancelled = True
        if self._model is None:
            self._task.cancel()
        elif not self._has_ended:
            self.deadline = min(self.deadline, time.monotonic())
            # Without a stream, the model may compile a constraint.
            (self._stream or self._model).cancel()

    def end(self) -> None:
        """Cancel the job because the server ends; `next` raises with status 503."""
        if self._model is None:
            self._events.put_nowait(RequestError("the server is ending", status=503))
        self.cancel()

    async def _run(self) -> None:
        """Wait for a model and generate; an error goes to the readers of `next`."""
        try:
            given = self._client, self._request.beginning
            async with self._queue.acquire_model(*given) as model:
                self._model = model
                self.deadline = time.monotonic() + self._request.max_seconds
                try:
                    last = await self._generate_in_thread(model)
                finally:
                    self._model, self.deadline = None, inf
            # The client may go on at once, and its model must be free by then.
            self._events.put_nowait(last)
        except Exception as error:  # `next` raises it
            self._events.put_nowait(error)

    async def _generate_in_thread(self, model: Model) -> Result:
        """Generate in a thread; wait for its last round even if the event loop ends."""
        future = self._loop.run_in_executor(self._queue.threads, self._generate, model)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait([future])
            future.exception()  # otherwise asyncio logs it
            raise

    def _generate(self, model: Model) -> Result:
        """Generate in the thread; hands all but the last result to `next`."""
        prefixes, prompts = self._queue.prefixes, list[Sequence[int]]()
        request, written = self._request, 0
        if request.model in model.bundle.adapters:  # the files are of no adapter
            self._model = model = model.adapted(request.model)
            prefixes = None
        for started in request.streams(model):
            with closing(started) as stream:
                self._stream = stream
                if prefixes is not None and type(stream) is Stream:
                    prefixes.load(model, stream.prompt)
                    prompts.append(stream.prompt)
                if self._cancelled:  # before there was a stream
                    stream.cancel()
                for piece in stream:
                    if isinstance(piece, Piece):
                        self._post_event(piece)
                result = stream.result()
            self._stream, written = None, written + 1
            if self._written is not None:
                self._written.append(result.stats.new_tokens)
            self._loop.call_soon_threadsafe(self._queue.total.merge, result.stats)
            if result.finish_reason in (CANCELLED, INTERRUPTED):
                # OpenAI has no finish reason for this.
                fact = "the server is ending, and has cut this text; ask again"
                raise RequestError(fact, status=503)
            if written < request.count:
                self._post_event(result)
        self._has_ended, self.deadline = True, inf  # nothing is left to cancel
        if prefixes is not None and not self._cancelled:
            for prompt in prompts:
                prefixes.save(model, prompt)
        return result

    def _post_event(self, event: Piece | Result) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PrefixFolder:
    """Saves the rows that two prompts begin with, in files of at most `most_bytes`.

    A prompt that continues an earlier prompt, as a conversation does, shares nothing
    new: its rows are in the buffers. `name` stands for bundle and machine. The files
    that were unused for longest go first, whatever their names. Several threads may use
    a folder, each with a model of its own. Raises `OutputError` if it cannot be made.

        folder = PrefixFolder(Path("prefixes"), "fp_0123", 1_000_000_000)
        folder.load(model, prompt)    # before the generation
        folder.save(model, prompt)    # after it
    """

    def __init__(self, folder: Path, name: str, most_bytes: int) -> None:
        self._all, self._own, self._most_bytes = folder, folder / name, most_bytes
        self._prompts: deque[Int64s] = deque(maxlen=REMEMBERED_PROMPTS)
        self._lock, self._unlike = Lock(), count()
        fact, fix = f"cannot make {self._own}", "choose another --prefixes"
        with as_error(OutputError, (OSError, ValueError), fact, fix):
            self._own.mkdir(0o700, parents=True, exist_ok=True)
        files = self._own.glob("prefix-*.npz")
        self._saved = {file: _read_tokens(file) for file in files}

    def load(self, model: Model, prompt: Sequence[int]) -> None:
        """Put rows that begin `prompt` into the model's buffers, if it lacks many."""
        rows, file = self._longest(model, prompt)
        held = model.parts.prefix.reusable_rows(prompt, exact=True)
        if file is None or rows < held + MIN_ROWS:
            return
        try:
            model.load_prefix(file)
            with suppress(OSError):
                os.utime(file)  # so that it is deleted later
        except (JetdraftError, OSError) as error:
            self._drop(file, error)

    def save(self, model: Model, prompt: Sequence[int]) -> None:
        """Save the beginning that `prompt` shares with an earlier prompt, if new."""
        ids, shared = np.asarray(prompt, np.int64), 0
        parts = model.parts
        sees = (ids == parts.picture_token) | (ids == parts.picture_place)
        if np.any(sees):  # A file has no images: what follows the beginning is unlike.
            ids = np.append(ids[: np.argmax(sees)], -1 - next(self._unlike))
        saved, _ = self._longest(model, prompt)
        with self._lock:
            for earlier in self._prompts:
                common = common_length(earlier, ids)
                if common < min(len(earlier), len(ids)):
                    shared = max(shared, common)
            self._prompts.append(ids)
        forms = [each.forms(shared).values() for each in parts.caches.values()]
        size = sum(prod(s) * t.itemsize for own in forms for s, t in own)
        if shared < saved + MIN_ROWS or size > self._most_bytes:
            return
        file = self._own / f"prefix-{uuid4().hex}.npz"
        try:
            self._make_room(size)
            model.save_prefix(file, ids[:shared])
            with self._lock:
                self._saved[file] = _read_tokens(file)
        except Exception as error:  # no text depends on the file
            self._drop(file, error)

    def _longest(self, model: Model, prompt: Sequence[int]) -> tuple[int, Path | None]:
        """How many rows of a prompt a file has, and the file that has the most."""
        whole, ids = bool(model.parts.target.cache.states), np.asarray(prompt, np.int64)
        best: tuple[int, Path | None] = 0, None
        with self._lock:
            for file, tokens in self._saved.items():
                rows = common_length(tokens, ids)
                if rows > best[0] and (rows == len(tokens) or not whole):
                    best = rows, file
        return best

    def _make_room(self, size: int) -> None:
        """Delete the files that were unused for longest, until `size` bytes fit."""
        own = (f for f in self._all.glob("*/*.npz") if _FILE_NAME.fullmatch(f.name))
        stats = [(file, file.stat()) for file in own]
        used = size + sum(stat.st_size for _, stat in stats)
        for file, stat in sorted(stats, key=lambda pair: pair[1].st_mtime):
            if used > self._most_bytes:
                used -= stat.st_size
                self._drop(file)

    def _drop(self, file: Path, error: Exception | None = None) -> None:
        if error is not None:
            log.warning("%s", error)
        with self._lock:
            self._saved.pop(file, None)
        with suppress(OSError):
            file.unlink()


def _read_tokens(file: Path) -> Int64s:
    """The tokens whose rows a file has; no tokens if it cannot be read."""
    try:
        refusal = StoreError(f"{file} is not a saved prefix; delete it")
        return np.asarray(read_arrays(file, refusal, TOKENS)[TOKENS], np.int64)
    except (JetdraftError, ValueError) as error:
        log.warning("%s", error)
        return np.zeros(0, np.int64)
