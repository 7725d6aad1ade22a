"""Who waits for a model, whose turn it is, and the generations under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from jetdraft.runtime.generation import Piece, Result, Stream
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.model import Model
from jetdraft.server.asking import Ask, RequestError


class Desk:
    """Hands out models: clients take turns, each client's requests stay in order.

    At most `most` requests wait, none longer than `seconds`. Belongs to one event loop.

        async with desk.take("client") as model: ...
    """

    def __init__(self, models: Sequence[Model], most: int, seconds: float) -> None:
        self.most, self.seconds = most, seconds
        self.models = list(models)
        self.threads = ThreadPoolExecutor(len(self.models), "jetdraft-serve")
        self.total = Stats("", exact=True, prompt_tokens=0)
        self._free = list(models)
        self._waiting: dict[str, deque[asyncio.Future[Model]]] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(len(queue) for queue in self._waiting.values())

    @property
    def generating(self) -> int:
        """How many models are taken."""
        return len(self.models) - len(self._free)

    @asynccontextmanager
    async def take(self, client: str) -> AsyncIterator[Model]:
        """A model, when it is this client's turn; `RequestError` if that takes long."""
        model = self._free.pop() if self._free else await self._wait(client)
        try:
            yield model
        finally:
            self._give(model)

    async def _wait(self, client: str) -> Model:
        if self.waiting >= self.most:
            self._make_room(client)
        turn: asyncio.Future[Model] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(client, deque())
        queue.append(turn)
        try:
            async with asyncio.timeout(self.seconds):
                return await turn
        except (TimeoutError, asyncio.CancelledError, RequestError) as error:
            self._leave(client, turn)
            if isinstance(error, TimeoutError):
                raise RequestError(
                    f"no model was free for {self.seconds:g} s; try again later",
                    status=503,
                ) from None
            raise

    def _make_room(self, client: str) -> None:
        """Send away the last of whoever has most in the queue; this one, if so."""
        full = RequestError("too many requests wait; try again later", status=429)
        longest = max(self._waiting.values(), key=len, default=deque())
        if len(longest) <= 1 + len(self._waiting.get(client, ())):
            raise full
        turn = longest.pop()
        if not turn.done():
            turn.set_exception(full)

    def _leave(self, client: str, turn: asyncio.Future[Model]) -> None:
        """Give up waiting; a model that came in the last moment goes on."""
        queue = self._waiting.get(client, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._waiting.pop(client, None)
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self._give(turn.result())

    def _give(self, model: Model) -> None:
        """To the client that waits longest for its turn; it goes to the end then."""
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
    """One request's generation: runs in a thread, waits for no reader.

    `next` gives its pieces, at last its `Result`, or raises what went wrong.
    """

    def __init__(self, desk: Desk, ask: Ask, client: str) -> None:
        self._desk, self._ask, self._client = desk, ask, client
        self._loop = asyncio.get_running_loop()
        self._said: asyncio.Queue[Piece | Result | BaseException] = asyncio.Queue()
        self._stream: Stream | None = None
        self._cancelled = self._running = False
        self._task = asyncio.create_task(self._run())

    async def next(self) -> Piece | Result:
        """What comes next, when it comes."""
        found = await self._said.get()
        if isinstance(found, BaseException):
            raise found
        return found

    async def result(self) -> Result:
        """What came out in all."""
        while not isinstance(found := await self.next(), Result):
            pass
        return found

    def cancel(self) -> None:
        """Nobody waits any more: leave the queue, or end at the next round."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()
        elif not self._running:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            async with self._desk.take(self._client) as model:
                self._running = True
                await self._loop.run_in_executor(
                    self._desk.threads, self._generate, model
                )
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # whoever waits for it must hear
            self._said.put_nowait(error)

    def _generate(self, model: Model) -> None:
        """In a thread of its own."""
        stream = self._stream = self._ask.stream(model)
        if self._cancelled:
            stream.cancel()
        for piece in stream:
            self._post(piece)
        result = stream.result()
        self._loop.call_soon_threadsafe(self._desk.total.merge, result.stats)
        self._post(result)

    def _post(self, said: Piece | Result) -> None:
        self._loop.call_soon_threadsafe(self._said.put_nowait, said)
