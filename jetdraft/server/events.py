"""Server-sent events, which end when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope, Send

from jetdraft.errors import JetdraftError, OptionError
from jetdraft.runtime.piece import Result
from jetdraft.server.desk import Job
from jetdraft.server.refusal import RequestError, refusal_fields
from jetdraft.server.reply import Reply

STATUS = "jetdraft.status"
"""Where the scope of a request has how its stream ended, which began with 200."""

T = TypeVar("T")


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
            status = 500 if isinstance(sent, Exception) else self._status
            scope[STATUS] = status
            self._done(status)
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
            usual = 400 if isinstance(error, OptionError) else 500
            self._status = getattr(error, "status", usual)
            yield json.dumps(refusal_fields(error, self._status))
        yield "[DONE]"


def _part(line: str, more: bool) -> Message:
    data = f"data: {line}\n\n".encode() if line else b""
    return {"type": "http.response.body", "body": data, "more_body": more}


async def unless_gone(receive: Receive, job: Job, wanted: Awaitable[T]) -> T:
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
