"""A stream for asyncio: rounds run in a thread, so the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.text_stream import Stream

T = TypeVar("T")


class AsyncStream:
    """An asynchronous iterator of `Piece`, and a context manager that ends it.

    If a task is cancelled while it waits, the model is free at the end of the round.

    async with model.astream("def fib(n):") as stream:
        async for piece in stream:
            print(piece.text, end="")
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pieces = iter(stream)
        self._thread = ThreadPoolExecutor(1, "jetdraft")

    @property
    def stats(self) -> Stats:
        """The stats of the generation, filled as it goes."""
        return self._stream.stats

    def cancel(self) -> None:
        """End at the next round, with finish reason "cancelled"."""
        self._stream.cancel()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Piece:
        if self._thread._shutdown:
            raise StopAsyncIteration
        piece = await self._in_thread(lambda: next(self._pieces, None))
        if piece is None:
            await self.aclose()
            raise StopAsyncIteration
        return piece

    async def result(self) -> Result:
        """Run the generation to its end, and give all of its text."""
        if self._thread._shutdown:
            return self._stream.result()  # nothing is left to run
        result = await self._in_thread(self._stream.result)
        await self.aclose()
        return result

    async def aclose(self) -> None:
        """End the generation; the model is free again when this returns."""
        self._stream.cancel()
        if not self._thread._shutdown:
            await asyncio.shield(self._submit(self._stream.close))
            self._thread.shutdown(wait=False)

    def __del__(self) -> None:
        # Nobody can read the stream now, so free the model when its round ends.
        self._stream.cancel()
        if not self._thread._shutdown:
            self._thread.submit(self._stream.close)
            self._thread.shutdown(wait=False)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await self._submit(work)
        except asyncio.CancelledError:
            await self.aclose()
            raise

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)
