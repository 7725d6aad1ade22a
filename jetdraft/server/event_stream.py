"""Answers that are sent while the text is generated, and clients that leave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from jetdraft.errors import JetdraftError, OptionError
from jetdraft.runtime.piece import Result
from jetdraft.server import RequestError, refusal_fields
from jetdraft.server.dialect import Dialect
from jetdraft.server.reply import Json, Reply
from jetdraft.server.request_queue import Job

T = TypeVar("T")
STATUS_KEY = "jetdraft.status"  # In an ASGI scope: the final status of a stream.


class EventStream:
    """An ASGI response that sends the pieces of a job as the events of a `dialect`.

    `first` is what `job.next` returned first. At the end `done` is called with the
    status: 200, the status of an error in the stream, or 499 if the client has left.
    """

    def __init__(
        self,
        job: Job,
        reply: Reply,
        dialect: Dialect,
        first: Any,
        done: Callable[[int], None],
    ) -> None:
        self._job, self._reply, self._first, self._done = job, reply, first, done
        self._dialect, self._status = dialect, 499

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_events(send))
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._job.cancel()
            gone.cancel()
            sending.cancel()
            sent, _ = await asyncio.gather(sending, gone, return_exceptions=True)
            status = 500 if isinstance(sent, Exception) else self._status
            scope[STATUS_KEY] = status
            self._done(status)
        if isinstance(sent, Exception):
            raise sent

    async def _send_events(self, send: Send) -> None:
        headers = {
            "Content-Type": self._dialect.media_type,
            "Cache-Control": "no-store",
            **self._reply.headers,
        }
        raw = [(name.lower().encode(), v.encode()) for name, v in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        async for event in self._dialect.events(self._chunks(), self._reply):
            data = self._dialect.line(event).encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        last = self._dialect.last.encode()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _chunks(self) -> AsyncIterator[Json]:
        """Yield OpenAI's chunks of all texts; an error is the last chunk."""
        reply, piece = self._reply, self._first
        try:
            while True:
                for chunk in reply.first_chunks():
                    yield chunk
                while not isinstance(piece, Result):
                    for chunk in reply.piece_chunks(piece):
                        yield chunk
                    piece = await self._job.next()
                for chunk in reply.last_chunks(piece):
                    yield chunk
                if len(reply.results) == reply.request.count:
                    break
                piece = await self._job.next()
            self._status = 200
        except JetdraftError as error:
            usual = 400 if isinstance(error, OptionError) else 500
            self._status = getattr(error, "status", usual)
            yield refusal_fields(error, self._status)


async def wait_unless_gone(receive: Receive, job: Job, wanted: Awaitable[T]) -> T:
    """Await `wanted`; if the client leaves first, cancel the job and raise an error."""
    waiting = asyncio.ensure_future(wanted)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
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


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
